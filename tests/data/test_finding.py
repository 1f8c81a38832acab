"""What is found in folders and metadata files, and what is made of it."""

import json
import os
import random
import unicodedata
from pathlib import Path

import pytest

from library import data, families
from library.config.building import replace_options
from library.config.problems import ConfigError
from library.curation import scanning
from library.data import folders
from library.data.images import Image, balance
from tests.data import make


def names(images):
    return [os.path.basename(image.path) for image in images.items]


def test_folders_give_repeats_words_and_captions(tmp_path):
    folder = make.folder(tmp_path, "3_black cat", ((64, 64), (96, 64)))
    (folder / "00.txt").unlink()
    images = data.scan(make.config(tmp_path))
    assert [(i.repeats, i.size, i.caption) for i in images.items] == [
        (3, (64, 64), "black cat"),
        (3, (96, 64), "cat number 1, sitting, on a mat"),
    ]


@pytest.mark.parametrize(
    ("name", "repeats", "words"),
    [
        ("１０_cat", 10, "cat"),
        ("03_a_b", 3, "a_b"),
        ("3", 3, ""),
        ("5x", None, ""),
        ("-2_a", None, ""),
        ("²_a", None, ""),
    ],
)
def test_repeats_are_whole_numbers_as_sd_scripts_reads_them(name, repeats, words):
    found = folders.concept(Path(name))
    assert (found and (found.repeats, found.words)) == (repeats and (repeats, words))


def test_the_same_folders_give_the_same_images_whatever_their_order_on_disk(tmp_path):
    for name in random.Random(0).sample([f"{i}_c{i}" for i in range(1, 8)], 7):
        make.folder(tmp_path, name)
    images = data.scan(make.config(tmp_path))
    assert [image.path for image in images.items] == sorted(image.path for image in images.items)
    assert images == data.scan(make.config(tmp_path))


def test_junk_is_not_read(tmp_path):
    folder = make.folder(tmp_path, "1_cat", ((64, 64),))
    (folder / "._00.png").write_bytes(b"junk of macOS")
    (folder / "__MACOSX").mkdir()
    make.picture(folder / "__MACOSX" / "x.png")
    (folder / "notes.md").write_text("hello")
    (tmp_path / "__MACOSX").mkdir()
    images = data.scan(make.config(tmp_path))
    assert names(images) == ["00.png"] and not images.warnings


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".JPEG", ".webp", ".bmp", ".avif"])
def test_every_format_is_sized_and_read(tmp_path, suffix):
    from library.data import pixels

    if suffix not in {".avif"} | pixels.extensions() and suffix.lower() not in pixels.extensions():
        pytest.skip("no decoder here")
    path = make.picture(tmp_path / "1_cat" / f"a{suffix}", (80, 48))
    image = data.scan(make.config(tmp_path)).items[0]
    assert image.size == (80, 48) and pixels.read_pixels(path).shape == (48, 80, 3)


def test_the_stored_size_counts_and_not_the_turned_one(tmp_path):
    from PIL import Image as Pillow

    turned = Pillow.Exif()
    turned[274] = 6
    make.picture(tmp_path / "1_cat" / "a.jpg", (80, 48), exif=turned)
    config = make.config(tmp_path)
    assert data.scan(config).items[0].size == (80, 48)
    assert any("EXIF" in str(warning) for warning in data.check_data(config, 32).warnings)


def test_captions_of_faces_and_of_several_lines(tmp_path):
    make.picture(tmp_path / "1_cat" / "me_10_20_30_40.png")
    (tmp_path / "1_cat" / "me.txt").write_text("\ufeffsmiling\nlaughing\n", encoding="utf-8")
    assert data.scan(make.config(tmp_path)).items[0].caption == "smiling"
    assert data.scan(make.config(tmp_path, enable_wildcard=True)).items[0].caption == "smiling\nlaughing"
    (tmp_path / "1_cat" / "me.txt").write_bytes(b"smiling\rlaughing")  # line ends of old programs, as sd-scripts has it
    assert data.scan(make.config(tmp_path)).items[0].caption == "smiling"


def test_txt_files_beside_the_default_extension_are_pointed_out(tmp_path):
    make.folder(tmp_path, "1_cat")
    images = data.scan(make.config(tmp_path, caption_extension=".caption"))
    assert {image.caption for image in images.items} == {"cat"}
    assert 'set caption_extension = ".txt" to use them' in str(images.warnings[0])


def test_a_few_missing_captions_are_named(tmp_path):
    folder = make.folder(tmp_path, "1_cat")
    (folder / "02.txt").unlink()
    (folder / "01.txt").write_text("")
    warnings = data.scan(make.config(tmp_path)).warnings
    assert any("02.png" in str(warning) for warning in warnings) and any(
        "01.txt" in str(warning) for warning in warnings
    )


@pytest.mark.parametrize(("image", "caption"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_names_of_macos_and_of_other_systems_are_the_same(tmp_path, image, caption):
    names = {form: unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD")}
    make.picture(tmp_path / "1_cat" / f"{names[image]}.png")
    (tmp_path / "1_cat" / f"{names[caption]}.txt").write_text("a cup")
    images = data.scan(make.config(tmp_path))
    assert [item.caption for item in images.items] == ["a cup"] and not images.warnings
    listed = tmp_path / "meta.json"
    listed.write_text(json.dumps({f"{names[caption]}.png": {"caption": "tea"}}))
    images = data.scan(make.config(tmp_path / "1_cat", in_json=str(listed)))
    assert [item.caption for item in images.items] == ["tea"] and os.path.isfile(images.items[0].path)


def test_the_extension_of_captions_may_be_in_capitals_and_the_exact_name_comes_first(tmp_path):
    folder = make.folder(tmp_path, "1_cat", ((64, 64),) * 2, captions=False)
    (folder / "00.TXT").write_text("capitals")
    (folder / "01.TXT").write_text("capitals")
    (folder / "01.txt").write_text("exact")
    images = data.scan(make.config(tmp_path))
    assert [item.caption for item in images.items] == ["capitals", "exact"] and not images.warnings


def test_files_that_only_look_like_captions_are_named(tmp_path):
    folder = make.folder(tmp_path, "1_cat", ((64, 64),) * 5, captions=False)
    (folder / "00.txt").write_text("a cat")
    os.rename(folder / "04.png", folder / "Photo.png")
    for name in ("01.png.txt", "02.json", "03.caption", "photo.txt", "readme.txt", "00.json"):
        (folder / name).write_text("x")
    warnings = [str(warning) for warning in data.scan(make.config(tmp_path)).warnings]
    (said,) = [warning for warning in warnings if "not read as captions" in warning]
    assert "01.png.txt, 02.json, 03.caption, photo.txt;" in said and "ending .txt" in said
    opened = scanning.scan_collection(tmp_path, make.config(tmp_path))
    assert [warning for warning in map(str, opened.notes) if "01.png.txt, 02.json, 03.caption, photo.txt;" in warning]


def test_regularisation_images_fill_up_to_the_number_of_the_others(tmp_path):
    make.folder(tmp_path / "train", "3_cat")  # 12 per epoch
    make.folder(tmp_path / "reg", "1_animal", ((64, 64),) * 2)
    images = data.scan(make.config(tmp_path / "train", reg_data_dir=str(tmp_path / "reg")))
    assert [image.repeats for image in images.items if image.is_reg] == [6, 6]
    assert data.summarise_images(images)["repeats"] == 24


def some_images(count, repeats=1):
    return [Image(str(i), (64, 64), "", repeats, None, 0, None) for i in range(count)]


def test_balance_repeats_one_by_one_and_leaves_out_what_is_too_much():
    assert [image.repeats for image in balance(some_images(3), 8)] == [3, 3, 2]
    assert [image.repeats for image in balance(some_images(3, 5), 8)] == [5, 5]
    assert balance(some_images(3), 0) == [] == balance([], 5)


def test_held_back_images_are_seen_once_and_never_regularise(tmp_path):
    make.folder(tmp_path / "train", "3_cat")
    make.folder(tmp_path / "reg", "1_animal")
    config = make.config(tmp_path / "train", reg_data_dir=str(tmp_path / "reg"), seed=1)
    images = data.scan(make.holding_back(config, 0.5))
    assert [i.repeats for i in images.validation.items] == [1, 1]
    assert not any(i.is_reg for i in images.validation.items)


def test_sizes_come_from_the_names_of_caches_unless_the_image_is_newer(tmp_path):
    folder = make.folder(tmp_path, "1_cat", ((64, 64),))
    cache = folder / "00_0640x0480_sdxl.npz"
    cache.write_bytes(b"")
    assert data.scan(make.config(tmp_path)).items[0].size == (640, 480)
    os.utime(cache, (1, 1))
    assert data.scan(make.config(tmp_path)).items[0].size == (64, 64)


def test_cache_info_remembers_what_has_not_changed(tmp_path):
    folder = make.folder(tmp_path, "1_cat", ((64, 64),) * 2)
    config = make.config(tmp_path, cache_info=True)
    first = data.scan(config)
    memory = folder / "metadata_cache.json"
    cache_entries = json.loads(memory.read_text())
    caption = {"caption": first.items[0].caption, "caption_file": "00.txt"}
    assert cache_entries[first.items[0].path] == {**caption, "resolution": [64, 64]}
    for about in cache_entries.values():
        about["caption"] = "remembered"
    memory.write_text(json.dumps(cache_entries))
    make.picture(folder / "new.png")
    (folder / "01.txt").write_text("changed")
    os.utime(folder / "01.txt", (2e9, 2e9))
    assert [image.caption for image in data.scan(config).items] == ["remembered", "changed", "cat"]
    memory.write_text(json.dumps(dict.fromkeys(cache_entries, "edited by hand")))
    assert [image.size for image in data.scan(config).items] == [(64, 64)] * 3


def test_cache_info_remembers_no_caption_of_another_file_or_of_other_lines(tmp_path):
    folder = make.folder(tmp_path, "1_cat", ((64, 64),))
    (folder / "00.txt").write_text("one\ntwo")
    (folder / "00.caption").write_text("of the other file")
    os.utime(folder / "00.caption", (1e9, 1e9))
    config = make.config(tmp_path, cache_info=True)

    def caption(**values):
        return data.scan(replace_options(config, **values)).items[0].caption

    for _ in range(2):
        assert caption() == "one"
        assert caption(enable_wildcard=True) == "one\ntwo"
        assert caption(caption_extension=".caption") == "of the other file"
    assert caption() == "one"
    (tmp_path / "old.txt").write_text("an older file in its place")
    os.utime(tmp_path / "old.txt", (1e9, 1e9))
    os.replace(tmp_path / "old.txt", folder / "00.txt")
    assert caption() == "an older file in its place"


def test_a_dataset_file_has_resolutions_and_subsets_of_its_own(tmp_path):
    folder = make.folder(tmp_path, "x")
    (tmp_path / "data.toml").write_text(f"""
        [general]
        caption_extension = ".txt"
        [[datasets]]
        resolution = 64
        batch_size = 2
        [[datasets.subsets]]
        image_dir = '{folder}'
        num_repeats = 2
        [[datasets]]
        resolution = 128
        [[datasets.subsets]]
        image_dir = '{folder}'
        caption_prefix = "photo of"
        """)
    images = data.scan(make.config(None, dataset_config=str(tmp_path / "data.toml")))
    assert [(i.dataset, i.fit.bucket, i.repeats) for i in images.items] == [(0, (64, 64), 2)] * 4 + [
        (1, (128, 128), 1)
    ] * 4
    assert data.summarise_images(images)["batches_per_epoch"] == 4 + 4


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_metadata_files(tmp_path, kind):
    folder = make.folder(tmp_path, "images", ((64, 64), (96, 64)), captions=False)
    rows = {
        "00.png": {"caption": "a cat", "tags": "x, y"},
        str(folder / "01.png"): {"tags": "z", "image_size": [96, 64]},
    }
    file = tmp_path / f"meta.{kind}"
    if kind == "json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("\n".join(json.dumps({"image_path": key, **row}) for key, row in rows.items()))
    images = data.scan(make.config(folder, in_json=str(file), dataset_repeats=4))
    assert [(i.caption, i.size, i.repeats) for i in images.items] == [("a cat,x, y", (64, 64), 4), ("z", (96, 64), 4)]


ROWS = ('{"file_name": "00.png", "text": "a cat, red"}', '{"file_name": "deeper/01.png", "text": "a\u2028dog"}')
LISTED = {
    "metadata.jsonl": "\n".join(ROWS),
    "list.json": f"[{', '.join(ROWS)}]",
    "metadata.csv": 'file_name,text\r\n00.png,"a cat, red"\r\ndeeper/01.png,a\u2028dog\r\n',
    "semicolons.csv": "file_name;text\n00.png;a cat, red\ndeeper/01.png;a\u2028dog\n",
    "other.tsv": "image\tprompt\textra\n00.png\ta cat, red\t1\ndeeper/01.png\ta\u2028dog\t\n",
}


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("by_file", [False, True])
def test_lists_of_the_hub_are_captions(tmp_path, name, by_file):
    make.picture(tmp_path / "x" / "00.png")
    make.picture(tmp_path / "x" / "deeper" / "01.png", seed=1)
    file = tmp_path / "x" / name
    file.write_text(LISTED[name], encoding="utf-8", newline="")
    config = make.config(tmp_path / "x", in_json=str(file))
    if by_file:
        subset = f"metadata_file = '{file}'\n" + (f"image_dir = '{tmp_path / 'x'}'\n" if name == "other.tsv" else "")
        (tmp_path / "d.toml").write_text(f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\n{subset}")
        config = make.config(None, dataset_config=str(tmp_path / "d.toml"))
    assert [item.caption for item in data.scan(config).items] == ["a cat, red", "a\u2028dog"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("m.parquet", "PAR1", ["m.parquet", "Parquet", "metadata.jsonl", '{"file_name": "0001.png", "text": "a cat"}']),
        ("m.csv", "file_name,text\n00.png,a cat, red\n", ["line 2", "double quotes"]),
        ("m.csv", "00.png,a cat\n", ["first line", "file_name,text"]),
        ("m.csv", "", ["first line"]),
        ("m.jsonl", '{"file_name": "00.png", "label": 3}\n', ["no captions", "file_name, label"]),
        (
            "m.jsonl",
            '{"text": "a"}\n{"file_name": "00.png", "text": ["a"]}\n3\n',
            ["line 1", "file_name", "line 2", "must be text", "line 3"],
        ),
    ],
)
def test_lists_that_cannot_be_read_say_what_to_write(tmp_path, name, text, said):
    make.picture(tmp_path / "00.png")
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        data.scan(make.config(tmp_path, in_json=str(tmp_path / name)))
    assert all(words in str(caught.value) for words in said), str(caught.value)


def test_a_list_that_nothing_names_is_pointed_out(tmp_path):
    folder = make.folder(tmp_path, "1_cat", captions=False)
    (folder / "metadata.csv").write_text("file_name,text\n00.png,a cat\n")
    said = [str(warning) for warning in data.scan(make.config(tmp_path)).warnings if "metadata.csv" in str(warning)]
    assert len(said) == 1 and "in_json" in said[0]


def test_tags_of_a_list_are_joined_by_the_separator(tmp_path):
    make.picture(tmp_path / "00.png")
    (tmp_path / "m.json").write_text(json.dumps({"00.png": {"tags": ["a, b", "c"]}}))
    (image,) = data.scan(make.config(tmp_path, in_json=str(tmp_path / "m.json"), caption_separator=".")).items
    assert image.caption == "a, b. c"


def test_metadata_may_name_images_of_which_only_the_latents_are_left(tmp_path):
    (tmp_path / "a_0640x0480_sdxl.npz").write_bytes(b"")
    (tmp_path / "meta.json").write_text(json.dumps({"a.png": {"caption": "a cat"}}))
    image = data.scan(make.config(tmp_path, in_json=str(tmp_path / "meta.json"))).items[0]
    assert image.size == (640, 480) and image.caption == "a cat"


@pytest.mark.parametrize("text", ["[1, 2]", "{", '{"a.png": 3}', '{"nowhere.png": {"caption": "x"}}', "{}"])
def test_broken_metadata_is_named(tmp_path, text):
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(ConfigError, match=r"meta\.json"):
        data.scan(make.config(tmp_path, in_json=str(tmp_path / "meta.json")))


def test_all_wrong_entries_of_metadata_are_named_in_plain_words(tmp_path):
    (tmp_path / "meta.json").write_text('{"a.png": "a cat", "b.png": null, "c.png": {}}')
    problems = data.check_data(make.config(tmp_path, in_json=str(tmp_path / "meta.json")), 32).problems
    wrong = (("a.png", "'a cat'"), ("b.png", "None"))
    said = [f"'{name}' must be an object with caption or tags, got {value}" for name, value in wrong]
    assert [str(problem).split("meta.json: ", 1)[1] for problem in problems] == said
    assert {problem.option for problem in problems} == {"in_json"}
    (tmp_path / "meta.jsonl").write_text('{"image_path": "a.png"}\n\n{"caption": "x"}')
    (problem,) = data.check_data(make.config(tmp_path, in_json=str(tmp_path / "meta.jsonl")), 32).problems
    assert "meta.jsonl, line 3: it must have image_path, or file_name and text" in str(problem)


def test_a_folder_given_twice_in_one_dataset_counts_once_and_is_reported(tmp_path):
    folder = make.folder(tmp_path, "x", ((64, 64),))
    subset = f"[[datasets.subsets]]\nimage_dir = '{folder}'\ncaption_extension = '.txt'\n"
    path = tmp_path / "data.toml"
    path.write_text(f"[[datasets]]\nresolution = 64\n{subset}num_repeats = 3\n{subset}")
    config = make.config(None, dataset_config=str(path))
    assert [image.repeats for image in data.scan(config).items] == [3]
    assert any("given again in one [[datasets]]" in str(warning) for warning in data.check_data(config, 32).warnings)
    path.write_text(f"[general]\nresolution = 64\n[[datasets]]\n{subset}[[datasets]]\n{subset}")
    assert not any("given again" in str(warning) for warning in data.check_data(config, 32).warnings)


def masked(tmp_path, masks):
    folder = make.folder(tmp_path, "x", ((64, 64), (96, 64)))
    for name, size in masks.items():
        make.picture(tmp_path / "masks" / name, size, mode="L")
    (tmp_path / "masks").mkdir(exist_ok=True)
    (tmp_path / "data.toml").write_text(f"""
        [[datasets]]
        resolution = 64
        [[datasets.subsets]]
        image_dir = '{folder}'
        conditioning_data_dir = '{tmp_path / "masks"}'
        """)
    return make.config(None, dataset_config=str(tmp_path / "data.toml"), masked_loss=True)


def test_masks_belong_to_images_by_name(tmp_path):
    images = data.scan(masked(tmp_path, {"00.png": (64, 64), "01.jpg": (96, 64)}))
    assert [os.path.basename(image.mask_file) for image in images.items] == ["00.png", "01.jpg"]


def test_masks_may_lie_in_a_folder_of_the_name_that_the_images_have(tmp_path):
    images = data.scan(masked(tmp_path, {"x/00.png": (64, 64), "x/01.png": (96, 64), "00.png": (8, 8)}))
    assert [image.mask_file for image in images.items] == [str(tmp_path / "masks" / "x" / f"0{n}.png") for n in (0, 1)]


@pytest.mark.parametrize("masks", [{"00.png": (64, 64)}, {"00.png": (64, 64), "01.png": (64, 64)}])
def test_missing_masks_and_masks_of_another_size_are_named(tmp_path, masks):
    with pytest.raises(ConfigError, match=r"01\.png"):
        data.scan(masked(tmp_path, masks))


def test_a_scan_reports_its_progress(tmp_path):
    make.folder(tmp_path, "1_cat", ((64, 64),) * 3)
    told = []
    data.scan(make.config(tmp_path), lambda name, *step: told.append((str(name), *step)))
    assert told == [("reading image sizes", 3, 3)]


def test_a_summary_is_plain_values(tmp_path):
    make.folder(tmp_path, "5_cat", ((128, 128), (192, 64), (192, 64)))
    config = make.config(tmp_path, resolution="128", max_bucket_reso=256, enable_bucket=True, train_batch_size=2)
    images = data.scan(config)
    summary_of_images = json.loads(json.dumps(data.summarise_images(images, world=2)))
    assert summary_of_images["images"] == 3 and summary_of_images["repeats"] == 15
    assert [(row["images"], row["repeats"], row["batches"]) for row in summary_of_images["buckets"]] == [
        (1, 5, 3),
        (2, 10, 5),
    ]
    assert summary_of_images["batches_per_epoch"] == 4


@pytest.mark.parametrize("script", families.RUNS)
def test_options_of_buckets_change_the_buckets(tmp_path, script):
    make.folder(tmp_path, "1_cat", ((64, 64), (300, 100), (150, 225), (500, 500)))
    base = {"resolution": "256", "enable_bucket": True, "min_bucket_reso": 128, "max_bucket_reso": 512}

    def buckets(**values):
        return [image.fit.bucket for image in data.scan(make.config(tmp_path, script, **base | values)).items]

    square, wide, high = (256, 256), (384, 128), (192, 320)
    assert buckets() == [square, wide, high, square]
    changes = {
        "enable_bucket": (False, [square] * 4),
        "resolution": ("128", [(128, 128)] * 4),
        "min_bucket_reso": (192, [square, (320, 192), high, square]),
        "max_bucket_reso": (320, [square, (320, 128), high, square]),
        "bucket_reso_steps": (128, [square, wide, (128, 384), square]),
        "bucket_no_upscale": (True, [(64, 64), (256, 64), (128, 192), square]),
    }
    for name, (value, expected) in changes.items():
        assert buckets(**{name: value}) == expected, name


def test_paths_in_the_root_of_a_drive_have_one_separator(tmp_path):
    """Else a path and the folder that is split off it are not found under the names they were listed by."""
    root = tmp_path.anchor
    path = folders.Listing(root).path("a.png")
    assert path == os.path.join(root, "a.png") and os.path.split(path) == (root, "a.png")
