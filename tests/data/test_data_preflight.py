"""Each common mistake with data gets its one sentence, with the way out, and all come at once."""

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from library import data
from library.config.building import working_fix
from library.config.sections.captions import UNREAD_CAPTIONS
from library.config.values import WINDOWS
from library.data import folders
from tests.data import make


def problems(config):
    return data.check_data(config, 32).problems


def test_nothing_is_wrong_with_good_data(tmp_path):
    make.folder(tmp_path, "10_cat")
    config = make.config(tmp_path)
    assert problems(config) == [] == data.check_data(config, 32).warnings


def test_a_missing_folder_and_a_file_instead_of_one(tmp_path):
    assert [*map(str, problems(make.config(tmp_path / "no")))] == [
        f"train_data_dir: {tmp_path / 'no'} does not exist; choose the folder of your images"
    ]
    (tmp_path / "file").write_text("")
    assert "is a file" in str(problems(make.config(tmp_path / "file"))[0])


@pytest.mark.parametrize("rules", ["min_bucket_reso = 32", "bucket_reso_steps = 48\nmin_bucket_reso = 48"])
def test_impossible_buckets_of_a_dataset_file_are_reported_once(tmp_path, rules):
    make.folder(tmp_path / "images", "cat")
    file = tmp_path / "data.toml"
    file.write_text(
        f"[[datasets]]\nresolution = 64\nenable_bucket = true\n{rules}\n"
        f"[[datasets.subsets]]\nimage_dir = '{(tmp_path / 'images/cat').as_posix()}'\n"
    )
    (problem,) = problems(make.config(None, dataset_config=str(file)))
    assert "in data.toml dataset 1" in str(problem) and "bucket_reso_steps" in str(problem)


def test_nothing_given_at_all():
    messages = problems(make.config(None, resolution=None))
    assert [str(problem).split(" ")[0] for problem in messages] == ["train_data_dir", "resolution"]


def test_an_empty_folder(tmp_path):
    assert "is empty" in str(problems(make.config(tmp_path))[0])


def test_the_leaf_instead_of_its_parent_is_told_the_parent(tmp_path):
    leaf = make.folder(tmp_path, "10_cat")
    (problem,) = problems(make.config(leaf))
    assert str(problem).endswith(f"give the folder above it: {tmp_path}")


@pytest.mark.parametrize("script", ["sdxl_train_network", "sdxl_train", "flux_train_network", "flux_train"])
def test_images_directly_in_the_folder_are_trained_on_and_a_fix_sets_repeats(tmp_path, script):
    make.folder(tmp_path, "cats")
    config = make.config(tmp_path / "cats", script, max_train_epochs=2)
    assert problems(config) == []
    (hint,) = data.check_data(config, 32).warnings
    assert "4 images directly in" in str(hint) and "each seen once per epoch" in str(hint)
    (name, repeats), *others = working_fix(hint, config).items()
    assert name == "dataset_repeats" and repeats > 1 and not others
    fixed = make.config(tmp_path / "cats", script, dataset_repeats=repeats)
    assert [image.repeats for image in data.scan(fixed).items] == [repeats] * 4
    (hint,) = data.check_data(fixed, 32).warnings
    assert f"each seen {repeats} times" in str(hint) and not working_fix(hint, fixed)


def test_loose_images_beside_folders_with_a_number_are_reported_not_to_be_used(tmp_path):
    make.folder(tmp_path, "3_cat")
    make.folder(tmp_path, ".", ((64, 64),) * 2)
    config = make.config(tmp_path, dataset_repeats=7)
    assert {image.repeats for image in data.scan(config).items} == {3} and len(data.scan(config).items) == 4
    told = "\n".join(map(str, data.check_data(config, 32).warnings))
    assert "are not used (2)" in told and "dataset_repeats has no effect" in told


def test_a_flat_folder_whose_images_have_no_captions_says_so(tmp_path):
    make.folder(tmp_path, "cats", captions=False)
    assert any("caption" in str(told) for told in data.check_data(make.config(tmp_path / "cats"), 32).warnings)
    assert {image.caption for image in data.scan(make.config(tmp_path / "cats")).items} == {""}


def test_regularisation_images_may_lie_flat_too_and_count_as_many_as_the_others(tmp_path):
    make.folder(tmp_path, "cats")
    make.folder(tmp_path, "reg", ((64, 64),) * 2, captions=False)
    images = data.scan(make.config(tmp_path / "cats", reg_data_dir=str(tmp_path / "reg"), dataset_repeats=3)).items
    assert {reg: sum(i.repeats for i in images if i.is_reg is reg) for reg in (True, False)} == {True: 12, False: 12}


def test_a_folder_called_by_a_year_is_flat_and_one_with_0_repeats_does_not_count(tmp_path):
    make.folder(tmp_path, "2024_holiday")
    images = data.scan(make.config(tmp_path / "2024_holiday")).items
    assert [image.repeats for image in images] == [1] * 4 and {image.subset.class_tokens for image in images} == {None}
    make.folder(tmp_path / "mixed", ".")
    make.folder(tmp_path / "mixed", "0_old")
    assert len(data.scan(make.config(tmp_path / "mixed")).items) == 4
    assert any("0 repeats" in str(told) for told in data.check_data(make.config(tmp_path / "mixed"), 32).warnings)


def test_images_that_lie_only_deeper_are_found_for_the_user(tmp_path):
    make.folder(tmp_path, "sets/summer/cats")
    config = make.config(tmp_path)
    (problem,) = problems(config)
    assert "only further down" in str(problem)
    assert working_fix(problem, config) == {"train_data_dir": str(tmp_path / "sets/summer/cats")}
    make.folder(tmp_path / "one", "cats")
    (problem,) = problems(config := make.config(tmp_path / "one"))
    assert working_fix(problem, config) == {"train_data_dir": str(tmp_path / "one" / "cats")}
    (tmp_path / "bare" / "inner").mkdir(parents=True)
    assert "neither" in str(problems(make.config(tmp_path / "bare"))[0])


def test_sub_folders_of_a_flat_folder_are_reported_not_to_be_read(tmp_path):
    make.folder(tmp_path, ".")
    make.folder(tmp_path, "more")
    config = make.config(tmp_path)
    assert len(data.scan(config).items) == 4
    assert any(
        "images in more" in str(told) and "not used" in str(told) for told in data.check_data(config, 32).warnings
    )


def test_folders_without_a_number_are_told_their_name(tmp_path):
    make.folder(tmp_path, "cats")
    (problem,) = problems(make.config(tmp_path))
    assert "rename 'cats' to '1_cats'" in str(problem)


def test_some_folders_without_a_number_are_only_a_warning(tmp_path):
    make.folder(tmp_path, "1_cats")
    make.folder(tmp_path, "dogs")
    make.folder(tmp_path, "2024_summer", ((64, 64),))
    config = make.config(tmp_path)
    warnings = data.check_data(config, 32).warnings
    assert not problems(config)
    assert any("1_dogs" in str(warning) for warning in warnings)
    assert any("2024 repeats" in str(warning) for warning in warnings)


def test_every_bad_image_is_named_at_once(tmp_path):
    folder = make.folder(tmp_path, "1_cat")
    whole = make.picture(folder / "photo.jpg", (64, 64)).read_bytes()
    (folder / "photo.jpg").write_bytes(whole[: len(whole) // 2])
    whole = (folder / "00.png").read_bytes()
    (folder / "00.png").write_bytes(whole[: len(whole) // 2])
    (folder / "01.png").write_bytes(b"")
    (folder / "02.png").write_text("not an image")
    (folder / "link.png").symlink_to(tmp_path / "gone.png")
    (folder / "link_0064x0064_sdxl.npz").symlink_to(tmp_path / "gone.npz")
    message_text = "\n".join(map(str, problems(make.config(tmp_path))))
    named = ("photo.jpg", "00.png", "01.png", "02.png", "link.png")
    assert all(name in message_text for name in named) and "03.png" not in message_text


def test_images_in_formats_that_are_not_read_are_named(tmp_path):
    folder = make.folder(tmp_path, "1_cat", ((64, 64),))
    for name in ("a.gif", "b.TIFF", "c.heic"):
        make.picture(folder / "x.png").rename(folder / name)
    assert any(
        "a.gif, b.TIFF, c.heic" in str(warning) for warning in data.check_data(make.config(tmp_path), 32).warnings
    )
    (folder / "00.png").unlink()
    (problem,) = problems(make.config(tmp_path))
    assert "a.gif, b.TIFF, c.heic" in str(problem) and "PNG or WebP" in str(problem)


def test_folders_that_may_not_be_listed_are_passed_over_or_named(tmp_path, monkeypatch):
    make.folder(tmp_path / "drive", "1_cat", ((64, 64),))
    closed = tmp_path / "drive" / "System Volume Information"
    closed.mkdir()
    scandir = os.scandir

    def scan(folder):
        if Path(folder) == closed:
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scan)
    assert not problems(make.config(tmp_path / "drive"))
    assert [*map(str, problems(make.config(closed)))] == [f"train_data_dir: {closed} cannot be read: Permission denied"]


def test_a_folder_that_is_read_only_is_named_before_latents_are_made_there(tmp_path, monkeypatch):
    folder = make.folder(tmp_path, "1_cat", ((64, 64),))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)  # rights do not bind the tests' user
    assert not problems(make.config(tmp_path, cache_latents=True))
    config = make.config(tmp_path, cache_latents_to_disk=True)
    (problem,) = problems(config)
    assert str(problem).startswith(f"cache_latents_to_disk: {folder} may not be written to")
    assert working_fix(problem, config) == {"cache_latents_to_disk": False, "cache_latents": True}
    (folder / "00_0064x0064_sdxl.npz").write_bytes(b"")
    assert not problems(config)


def test_a_name_too_long_for_a_cache_file_is_told_where_caches_are_written(tmp_path):
    folder = make.folder(tmp_path, "1_cat", ((64, 64),))
    # 249 bytes, or on Windows 240 characters: prompts are names of images in some programs
    make.picture(folder / f"{'絵' * (240 if WINDOWS else 83)}.png")
    assert not problems(make.config(tmp_path))
    (problem,) = problems(make.config(tmp_path, cache_latents_to_disk=True))
    assert "1 image with a name too long" in str(problem) and "236 bytes" in str(problem)


def test_a_long_list_of_bad_images_is_cut(tmp_path):
    make.folder(tmp_path, "1_cat", ((64, 64),))
    for i in range(50):
        (tmp_path / "1_cat" / f"bad{i:02d}.png").write_bytes(b"")
    (problem,) = problems(make.config(tmp_path))
    assert (
        "50 files" in str(problem)
        and "bad19.png" in str(problem)
        and "bad20.png" not in str(problem)
        and "30 more" in str(problem)
    )


def test_an_image_bomb_is_not_decoded(tmp_path):
    import struct
    import zlib

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    make.folder(tmp_path, "1_cat", ((64, 64),))
    (tmp_path / "1_cat" / "bomb.png").write_bytes(bomb)
    (problem,) = problems(make.config(tmp_path))
    assert "bomb.png" in str(problem) and "too many pixels" in str(problem)


def test_captions_in_another_encoding_are_named(tmp_path):
    folder = make.folder(tmp_path, "1_cat", ((64, 64),) * 2)
    (folder / "01.txt").write_bytes("grün".encode("latin-1"))
    (problem,) = problems(make.config(tmp_path))
    assert "01.txt" in str(problem) and "UTF-8" in str(problem)
    for content in ("grün".encode("utf-16-le"), b"a\0b"):  # without a mark, it decodes as UTF-8
        (folder / "01.txt").write_bytes(content)
        (problem,) = problems(make.config(tmp_path))
        assert "01.txt" in str(problem) and "UTF-8" in str(problem)
    (folder / "01.txt").write_bytes("grün".encode("utf-16"))  # as Windows' editor marks it
    assert not problems(make.config(tmp_path))
    assert "grün" in {image.caption for image in data.scan(make.config(tmp_path)).items}


def test_twins_that_would_share_a_cache_are_named(tmp_path):
    folder = make.folder(tmp_path, "1_cat", ((64, 64),))
    make.picture(folder / "00.jpg")
    assert not problems(make.config(tmp_path))
    (problem,) = problems(make.config(tmp_path, cache_latents_to_disk=True))
    assert "00.jpg and 00.png" in str(problem)


def test_latents_without_images_are_enough_only_where_they_are_read(tmp_path):
    make.folder(tmp_path, "x", ((64, 64),))
    (tmp_path / "x" / "gone_0064x0064_sdxl.npz").write_bytes(b"")
    (tmp_path / "meta.json").write_text('{"00.png": {"caption": "a"}, "gone.png": {"caption": "b"}}')
    options = {"in_json": str(tmp_path / "meta.json")}
    assert not problems(make.config(tmp_path / "x", cache_latents_to_disk=True, **options))
    (problem,) = problems(make.config(tmp_path / "x", **options))
    assert "gone.png" in str(problem) and "cache_latents_to_disk" in str(problem)


def test_an_image_too_thin_for_any_bucket(tmp_path):
    make.folder(tmp_path, "1_cat", ((64, 64), (900, 20)))
    (problem,) = problems(make.config(tmp_path, enable_bucket=True, bucket_no_upscale=True))
    assert "01.png" in str(problem) and "too thin" in str(problem)


def test_rules_of_buckets_are_checked_against_the_model(tmp_path):
    make.folder(tmp_path, "1_cat")
    config = make.config(tmp_path, resolution="80,80")
    assert [p for p in problems(config) if "resolution" in str(p)]


def test_both_folders_and_the_images_are_checked_at_once(tmp_path):
    folder = make.folder(tmp_path / "train", "1_cat")
    (folder / "00.png").write_bytes(b"")
    messages = problems(make.config(tmp_path / "train", reg_data_dir=str(tmp_path / "none")))
    assert len(messages) == 2 and "reg_data_dir" in str(messages[0]) and "00.png" in str(messages[1])


def test_an_empty_concept_folder_is_named(tmp_path):
    make.folder(tmp_path, "1_cat")
    (tmp_path / "1_dog").mkdir()
    make.folder(tmp_path / "1_bird", "more")
    messages = problems(make.config(tmp_path))
    assert any("1_dog holds no images" in str(p) for p in messages)
    assert any("1_bird" in str(p) and "more" in str(p) for p in messages)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (
            {"cache_text_encoder_outputs": True, "network_train_unet_only": True, "enable_wildcard": True},
            "enable_wildcard",
        ),
        ({"masked_loss": True}, "masked_loss"),
        ({"alpha_mask": True}, "alpha_mask"),
        ({"face_crop_aug_range": "2,4"}, "face_crop_aug_range"),
        ({"train_batch_size": 9}, "batch size"),
        ({"resolution": "128"}, "upscaled"),
    ],
)
def test_options_that_do_nothing_with_this_data_are_pointed_out(tmp_path, options, word):
    make.folder(tmp_path, "1_cat")
    config = make.config(tmp_path, **options)
    assert not problems(config)
    assert any(word in str(warning) for warning in data.check_data(config, 32).warnings)


def test_one_transparent_image_is_enough_for_alpha_mask(tmp_path):
    path = make.folder(tmp_path, "1_cat") / "00.png"
    with Image.open(path) as picture:
        picture.convert("RGBA").save(path)
    assert not any(
        "alpha_mask" in str(warning) for warning in data.check_data(make.config(tmp_path, alpha_mask=True), 32).warnings
    )


def test_looking_at_data_needs_no_torch(tmp_path):
    import subprocess
    import sys

    make.folder(tmp_path, "1_cat")
    code = f"""
import sys
sys.modules["torch"] = None
from library import data, families
from library.config import building
values = {{"train_data_dir": {str(tmp_path)!r}, "resolution": 64}}
config = building.build_config(families.config_class("flux_train"), values)
assert not data.check_data(config, 16).problems and len(data.scan(config)) == 4
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_lines_of_captions_that_nothing_reads_are_counted_and_may_be_used(tmp_path):
    place = make.folder(tmp_path, "3_cat")
    files = sorted((tmp_path / "3_cat").glob("*.txt")) or sorted((tmp_path / "3_cat").glob("*.caption"))
    files[0].write_text("".join(f"line {number}\n\n" for number in range(5000)), encoding="utf-8")
    files[1].write_text("one\ntwo", encoding="utf-8")
    config = make.config(tmp_path)
    (said,) = (line for line in data.check_data(config, 32).warnings if "several lines" in str(line))
    assert str(said).startswith("2 caption files") and "5,000 lines not" in str(said) and "4,999" in str(said), place
    assert working_fix(said, config) == {"enable_wildcard": True}
    assert not any(
        "several lines" in str(line)
        for line in data.check_data(make.config(tmp_path, enable_wildcard=True), 32).warnings
    )


@pytest.mark.parametrize("script", ["sdxl_train_network", "sdxl_train", "sdxl_train_textual_inversion"])
def test_keeping_the_base_models_answer_is_for_adapters(tmp_path, script):
    folder = make.folder(tmp_path, "10_cat")
    file = tmp_path / "images.toml"
    file.write_text(
        f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{folder.as_posix()}'\n"
        "custom_attributes.diff_output_preservation = true\n",
        encoding="utf-8",
    )
    config = make.config(None, script, dataset_config=str(file), min_bucket_reso=None, max_bucket_reso=None)
    told = list(data.check_data(config, 32).warnings)
    assert [("diff_output_preservation has no effect" in str(text)) for text in told] == [True] * (
        script != "sdxl_train_network"
    )


def test_options_that_the_dataset_file_overrules_are_named(tmp_path):
    folder, file = make.folder(tmp_path, "10_cat").as_posix(), tmp_path / "images.toml"
    general = "resolution = 64\nbatch_size = 2\nenable_bucket = true\nmin_bucket_reso = 64\n"
    subsets = [f"[[datasets.subsets]]\nimage_dir = '{folder}'\ncaption_extension = '.txt'\n" for _ in range(2)]
    file.write_text(f"[general]\n{general}[[datasets]]\n{subsets[0]}num_repeats = 2\n[[datasets]]\n{subsets[1]}")

    def told(**values):
        options = {"resolution": None, "min_bucket_reso": None, "max_bucket_reso": None, "caption_extension": None}
        config = make.config(None, **options | values, dataset_config=str(file))
        return [text for text in map(str, data.check_data(config, 32).warnings) if "no effect" in text]

    ours = {"resolution": 128, "train_batch_size": 4, "caption_extension": ".tags"}
    both = "resolution, train_batch_size and caption_extension have no effect: images.toml sets it for all images"
    assert told(**ours) == [both]
    assert told(train_batch_size=4) == ["train_batch_size has no effect: images.toml sets it for all images"]
    assert told() == told(dataset_repeats=3, flip_aug=True) == []  # which the file leaves to the run, for some or all


def test_keys_of_folders_beside_a_metadata_file_are_named(tmp_path):
    image, file = make.picture(tmp_path / "a.png"), tmp_path / "images.toml"
    (tmp_path / "meta.json").write_text(json.dumps({str(image): {"caption": "a cat"}}))
    subset = f"[[datasets.subsets]]\nmetadata_file = '{(tmp_path / 'meta.json').as_posix()}'\nclass_tokens = 'cat'\n"
    file.write_text(f"[[datasets]]\n{subset}")
    config = make.config(None, dataset_config=str(file), min_bucket_reso=None, max_bucket_reso=None)
    told = [text for text in map(str, data.check_data(config, 32).warnings) if "no effect" in text]
    assert told == ["class_tokens has no effect beside metadata_file, which has captions and sizes"]


def test_dropout_in_a_dataset_file_works_where_captions_are_encoded_once(tmp_path):
    folder, file = make.folder(tmp_path, "x"), tmp_path / "images.toml"
    file.write_text(f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{folder}'\ncaption_dropout_every_n_epochs = 2\n")
    for script in ("flux_train_network", "anima_train_network"):
        values = {"cache_text_encoder_outputs": True, "network_train_unet_only": True, "dataset_config": str(file)}
        told = [str(warning) for warning in data.check_data(make.config(None, script, **values), 16).warnings]
        assert not [text for text in told if "caption_dropout_every_n_epochs" in text]


def test_a_share_for_validation_that_is_less_than_one_image(tmp_path):
    make.folder(tmp_path, "10_cat")

    def told(share):
        return [str(warning) for warning in data.check_data(make.config(tmp_path, validation_split=share), 32).warnings]

    assert "validation_split = 0.01 of 4 images is less than one image; nothing is validated" in told(0.01)
    assert not any("validation_split" in text for text in told(0.5))


def test_one_image_and_copies_of_one_are_not_held_out(tmp_path):
    folder = make.folder(tmp_path, "10_cat", ((64, 64),))
    (said,) = (
        w
        for w in data.check_data(make.config(tmp_path, validation_split=0.99), 32).warnings
        if "validation_split" in str(w)
    )
    assert str(said).startswith("validation_split = 0.99 of 1 image holds none out")
    (folder / "copy.png").write_bytes((folder / "00.png").read_bytes())
    (said,) = (
        w
        for w in data.check_data(make.config(tmp_path, validation_split=0.5), 32).warnings
        if "validation_split" in str(w)
    )
    assert "copies stay together" in str(said)


def test_a_share_of_everything_leaves_nothing_to_train_on(tmp_path):
    make.folder(tmp_path, "10_cat")
    (said,) = data.check_data(make.config(tmp_path, validation_split=1.0), 32).problems
    assert str(said).startswith("validation_split holds out every image (4 images)") and said.fix["validation_split"]


def test_the_trigger_is_looked_for_in_what_is_trained(tmp_path):
    folder = make.folder(tmp_path, "1_cat")
    template_values = {"metadata_trigger_phrase": "zorb", "caption_prefix": "zorb, "}
    assert not [w for w in data.check_data(make.config(tmp_path, **template_values), 32).warnings if "zorb" in str(w)]
    (folder / "00.txt").write_text("[trigger] on a mat")
    assert not [
        w
        for w in data.check_data(make.config(tmp_path, metadata_trigger_phrase="zorb"), 32).warnings
        if "zorb" in str(w)
    ]
    (unfilled,) = [w for w in data.check_data(make.config(tmp_path), 32).warnings if "[trigger]" in str(w)]
    assert unfilled.option == "metadata_trigger_phrase" and str(folder / "00.png") in str(unfilled)


@pytest.mark.parametrize(
    ("keys", "words"), [("num_repeats = 0", "num_repeats is 0 for all images"), ("is_reg = true", "is_reg makes all")]
)
def test_the_key_that_leaves_no_image_to_train_on_is_named(tmp_path, keys, words):
    folder, file = make.folder(tmp_path), tmp_path / "images.toml"
    file.write_text(f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{folder.as_posix()}'\n{keys}\n")
    (problem,) = data.check_data(make.config(None, dataset_config=str(file)), 32).problems
    assert str(problem).startswith(words)


def test_files_are_named_below_the_folder_that_they_share(tmp_path):
    for place in ("10_cat", "5_dog"):
        make.folder(tmp_path, place, ((64, 64), (200, 64)))
    (said,) = [str(note) for note in data.check_data(make.config(tmp_path), 32).warnings if "cropped" in str(note)]
    cat, dog = (os.path.join(place, "01.png") for place in ("10_cat", "5_dog"))
    assert f": {cat} (68%), {dog} (68%) in {tmp_path}; crop or pad" in said
    assert str(folders.some_files(["/a/1.png"])) == "/a/1.png"  # alone, it is a path to copy
    assert str(folders.some_files(["/a/1.png", "/b/1.png"])) == "/a/1.png, /b/1.png"  # they share nothing


def test_captions_that_another_extension_would_read_are_marked_so_that_the_page_asks(tmp_path):
    """Also if those of another folder are read; not for regularisation images, which need none."""
    lines = ["[[datasets]]", "resolution = 64"]
    for name, ending, more in (("a", ".caption", ""), ("b", ".txt", ""), ("c", ".txt", "is_reg = true")):
        folder = tmp_path / name
        folder.mkdir()
        Image.new("RGB", (64, 64), (9, 90, 200)).save(folder / "0.png")
        (folder / f"0{ending}").write_text("a zorb", "utf-8")
        lines += ["[[datasets.subsets]]", f"image_dir = '{folder}'", more]
    (tmp_path / "sets.toml").write_text("\n".join(lines), "utf-8")
    warnings = data.check_data(
        make.config(None, dataset_config=str(tmp_path / "sets.toml"), caption_extension=".caption"), 32
    ).warnings
    marked = [note for note in warnings if note.code == UNREAD_CAPTIONS]
    assert [note.fix for note in marked] == [{"caption_extension": ".txt"}]
    assert str(tmp_path / "b") in str(marked[0])
