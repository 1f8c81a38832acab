"""Second pictures of an item: reference images, and what is around a mask; found, cut, cached, in batches."""

import json
import os
import shutil
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from safetensors.torch import load_file, safe_open, save_file

from library import data
from library.config.problems import ConfigError
from library.config.run_config import ControlUse
from library.data import encoding
from library.data.control_pixels import random_mask
from library.data.loading import Batches, latent_area
from library.families.base import LatentCache, TextCache
from tests.data import make

MUSUBI = LatentCache("_fk.safetensors", keyed_by_size=True, architecture="flux_kontext", numbers_controls=False)
DISK = {"cache_latents_to_disk": True}


class Family(make.Family):
    """The fake family, which takes control images as it takes others, without noise."""

    def control_latents(self, parts, pixels):
        return self.latents(parts, pixels, [torch.Generator()] * len(pixels))


@pytest.fixture
def use(monkeypatch):
    """A function: what the trained model is shown besides noise and words."""

    def change(**values):
        cls = type(make.config(None))
        monkeypatch.setattr(cls, "control_images", property(lambda _: ControlUse(**values)))

    return change


def toml(tmp_path, more="", top="", controls=True):
    text = f"[[datasets]]\nresolution = 64\n{top}\n[[datasets.subsets]]\nimage_dir = '{tmp_path / 'images'}'\n{more}\n"
    text += f"control_directory = '{tmp_path / 'second'}'\n" if controls else ""
    (tmp_path / "d.toml").write_text(text)
    return make.config(None, dataset_config=str(tmp_path / "d.toml"), **DISK)


@pytest.fixture
def pairs(tmp_path, use):
    """Two images with a reference each, of another shape, and one with two."""
    use(least=1, most=2)
    make.folder(tmp_path, "images", ((64, 64), (64, 64), (64, 64)))
    make.picture(tmp_path / "second" / "00.webp", (128, 64), seed=10)
    make.picture(tmp_path / "second" / "01_0000.png", (160, 160), seed=11)
    for number in (10, 2):
        make.picture(tmp_path / "second" / f"02_{number}.png", (80, 48), seed=12 + number)
    return tmp_path


def encoded(config, family=None):
    images, family, run = data.scan(config), family or Family(MUSUBI), make.Run()
    encoding.encode_missing_caches(images, family, make.parts(), config, run, run.phase)
    return images, family


def names(image):
    return [os.path.basename(control.path) for control in image.controls]


def cuts(image):
    return [(control.fit.resized, control.fit.bucket) for control in image.controls]


def test_references_are_found_by_name_and_cut_as_the_subset_says(pairs):
    first, second, third = data.scan(toml(pairs)).items
    assert [names(image) for image in (first, second, third)] == [
        ["00.webp"],
        ["01_0000.png"],
        ["02_2.png", "02_10.png"],
    ]
    assert cuts(first) == [((128, 64), (64, 64))] and cuts(third)[0] == ((107, 64), (64, 64))

    first, second, third = data.scan(toml(pairs, "no_resize_control = true")).items
    assert cuts(first) == [((128, 64), (128, 64))] and cuts(second) == [((160, 160), (160, 160))]

    first, second, third = data.scan(toml(pairs, "no_resize_control = true", "control_resolution = 96")).items
    assert cuts(first) == [((128, 64), (128, 64))] and cuts(second) == [((96, 96), (96, 96))]

    first, second, third = data.scan(toml(pairs, "control_resolution = [96, 96]")).items
    (wide, (width, height)) = cuts(third)[0]
    assert cuts(second) == [((96, 96), (96, 96))] and width > height and width * height <= 96 * 96
    assert width % 16 == height % 16 == 0 and wide >= (width, height)


def test_numbered_references_follow_the_plain_one_unless_they_are_named_like_another_image(pairs, use):
    use(least=1, most=3)
    for name in ("00_1.png", "00_2.jpg", "01.png"):  # beside 00.webp and 01_0000.png
        make.picture(pairs / "second" / name, (64, 64), seed=30)
    names_by_image = {image.path[-6:]: names(image) for image in data.scan(toml(pairs)).items}
    assert names_by_image["00.png"] == ["00.webp", "00_1.png", "00_2.jpg"] and names_by_image["01.png"] == [
        "01.png",
        "01_0000.png",
    ]
    make.picture(pairs / "images" / "00_1.png", (64, 64), seed=31)
    first, second, *_ = data.scan(toml(pairs)).items
    assert names(first) == ["00.webp", "00_2.jpg"] and names(second) == ["00_1.png"]


def test_further_references_are_in_folders_of_their_own(pairs, use):
    use(least=1, most=3)
    for stem in ("00", "02"):
        make.picture(pairs / "third" / f"{stem}.png", (64, 80), seed=20)
    more = f"more_control_directories = ['{pairs / 'third'}']"
    first, second, third = data.scan(toml(pairs, more)).items
    assert [names(image) for image in (first, second, third)] == [
        ["00.webp", "00.png"],
        ["01_0000.png"],
        ["02_2.png", "02_10.png", "02.png"],
    ]
    gone = toml(pairs, more.replace("third", "forth"))
    assert (
        sentences(gone) == f"control_directory: {pairs / 'forth'} does not exist: name the folder of reference images"
    )
    with pytest.raises(ConfigError, match="more_control_directories needs control_directory"):
        data.scan(toml(pairs, more, controls=False))


@pytest.mark.parametrize(
    ("second", "third", "without"),
    [
        (("00", "01", "02"), ("00", "01", "02"), {}),
        (("00", "01", "02"), ("00",), {}),  # a model may be shown fewer
        (("00", "02"), ("00", "02"), {"second": "01"}),
        (("00", "02"), ("00", "01", "02"), {"second": "01"}),  # not the third's in the place of the second's
        (("00",), ("01", "02"), {"second": "01"}),
        ((), ("00", "01", "02"), {"second": "00"}),
    ],
)
def test_a_reference_never_takes_the_place_of_another_folders(tmp_path, use, second, third, without):
    use(least=1, most=3)
    make.folder(tmp_path, "images", ((64, 64),) * 3)
    for folder, stems in (("second", second), ("third", third)):
        (tmp_path / folder).mkdir()
        for stem in stems:
            make.picture(tmp_path / folder / f"{stem}.png", (64, 64))
    config = toml(tmp_path, f"more_control_directories = ['{tmp_path / 'third'}']")
    if not without:
        assert [len(image.controls) for image in data.scan(config).items] == [
            (stem in second) + (stem in third) for stem in ("00", "01", "02")
        ]
    for folder, stem in without.items():
        said = sentences(config)
        assert f"{tmp_path / folder} has no reference image of" in said and f"{stem}.png" in said


def test_metadata_files_name_references_as_musubi_tuner_does(pairs):
    rows = [
        {"image_path": "00.png", "caption": "a", "control_path": str(pairs / "second" / "00.webp")},
        {
            "image_path": "01.png",
            "caption": "b",
            "control_path_1": str(pairs / "second" / "02_10.png"),
            "control_path_0": str(pairs / "second" / "02_2.png"),
        },
    ]
    (pairs / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, second = data.scan(toml(pairs, f"metadata_file = '{pairs / 'm.jsonl'}'", controls=False)).items
    assert names(first) == ["00.webp"] and names(second) == ["02_2.png", "02_10.png"]


def test_rows_of_a_metadata_file_without_references_are_named(pairs):
    rows = [{"image_path": "00.png", "caption": "a"}, {"image_path": "01.png", "control_path": str(pairs / "gone.png")}]
    (pairs / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = sentences(toml(pairs, f"metadata_file = '{pairs / 'm.jsonl'}'", controls=False)).split(" / ")
    assert said[0] == f"the reference image {pairs / 'gone.png'} does not exist"
    assert said[1].startswith(f"control_directory: {pairs / 'm.jsonl'} names no reference image of 1 image: ")
    assert "00.png; write them there as control_path" in said[1] and len(said) == 2


def sentences(config):
    return " / ".join(map(str, data.check_data(config, 16).problems))


@pytest.mark.parametrize(
    ("size", "are_cut"),
    [((65, 131), (True, False, False)), ((1, 1000), (True, False, True)), ((4000, 30), (True, True, True))],
)
def test_references_of_odd_shapes_are_used_or_named(pairs, size, are_cut):
    """Scaled to the target little of them may be left, in their own size they may be too thin."""
    make.picture(pairs / "second" / "00.webp", size, seed=1)
    path = str(pairs / "second" / "00.webp")
    ways = ("", "no_resize_control = true", "control_resolution = 64")
    for more, is_cut in zip(ways, are_cut, strict=True):
        check = data.check_data(toml(pairs, more), 16)
        assert (
            any("shown to the model cropped" in str(note) and "00.webp" in str(note) for note in check.warnings)
            == is_cut
        )
        is_thin = more.startswith("no_resize") and min(size) < 16
        said = f"{path} is {size[0]}x{size[1]}: scaled as the data set says"
        assert [said in str(problem) for problem in check.problems] == [True] * is_thin


def test_what_is_missing_is_reported_before_anything_is_loaded(pairs, use):
    (pairs / "second" / "00.webp").unlink()
    assert f"{pairs / 'second'} has no reference image of 1 image: {pairs / 'images' / '00.png'}; add" in sentences(
        toml(pairs)
    )
    make.picture(pairs / "second" / "00.png", (8, 8))
    small = toml(pairs, "no_resize_control = true")
    assert "00.png is 8x8: scaled as the data set says, less than 16 pixels" in sentences(small)
    (pairs / "second" / "00.png").write_bytes(b"no image")
    assert "00.png cannot be read: replace it" in sentences(small)
    assert sentences(toml(pairs, controls=False)).count("control_directory") == 1
    use(least=1, most=1)
    assert "02.png has 2 reference images, and this model takes 1 at most" in sentences(toml(pairs))
    use()
    assert "control_directory is for models with reference images; SDXL LoRA takes none" in sentences(toml(pairs))
    use(inpaints=True)
    for number in range(3, 30):
        shutil.copy(pairs / "images" / "00.png", pairs / "images" / f"{number:02}.png")
    assert (bare := sentences(toml(pairs, controls=False))).count(
        "there is no mask of what is to be painted for 30 images: "
    ) == 1
    assert "02.png" in bare and f"and 25 more in {pairs / 'images'}; name their folder as conditioning_data_dir" in bare
    crops = "cannot be used with control_directory: switch one of them off"
    use(least=1, most=2)
    assert crops in sentences(toml(pairs, "color_aug = true"))
    (pairs / "second").rename(pairs / "gone")
    said = sentences(toml(pairs))
    assert "second does not exist: name the folder of reference images" in said and "has no reference" not in said


def test_masks_can_be_drawn_where_none_are_and_the_image_is_not_its_own_reference(tmp_path, use):
    """FLUX.1 Fill is shown the image around the mask; it has no size of its own that could be set."""
    use(inpaints=True)
    make.folder(tmp_path, "images", ((64, 64), (160, 64)))
    check = data.check_data(toml(tmp_path, controls=False), 16)
    assert [problem.fix for problem in check.problems] == [{"random_masks": 8}]
    said = [str(note) for note in check.warnings]
    assert any("1 image cropped by more than" in note for note in said) and not any("shown to" in note for note in said)


def test_batches_have_one_size_of_references_and_sizes_count_them(pairs):
    images = data.scan(toml(pairs, "no_resize_control = true", "batch_size = 4"))
    batches = Batches(images, toml(pairs, "no_resize_control = true", "batch_size = 4"), 1)
    sides = {(8, 8, 8, 16): 1, (8, 8, 20, 20): 1, (8, 8, 6, 10, 6, 10): 1}
    assert batches.shapes == sides and batches.kinds() == {(4, *kind): 1 for kind in sides}
    for kind in batches.kinds():
        batch = batches.example(kind)
        assert [tuple(control.shape[-2:]) for control in batch.controls] == [
            (8 * h, 8 * w) for h, w in zip(kind[3::2], kind[4::2], strict=True)
        ]
    assert batches.example((4, 8, 8, 8, 16)).bucket == "64x64+128x64"
    assert latent_area((2, 8, 8, 6, 10)) == 2 * (64 + 60)
    rows = data.summarise_images(images)["buckets"]
    assert [row["references"] for row in rows] == [[[80, 48], [80, 48]], [[128, 64]], [[160, 160]]]


def test_references_are_mirrored_with_their_image_cached_or_not(pairs):
    config = toml(pairs, "flip_aug = true")
    images, family = encoded(config)
    plain = data.scan(config)
    cached = {batch.paths[0]: batch for batch in Batches(images, config, 3)}
    references_seen = set()
    for batch in Batches(plain, config, 3):
        other = cached[batch.paths[0]]
        for pixels, latents in zip(batch.controls, other.controls, strict=True):
            control_latents = family.control_latents(make.parts(), pixels)
            torch.testing.assert_close(control_latents, latents)
            references_seen.add(torch.equal(pixels, pixels.flip(-1)))
    assert references_seen == {False}
    arrays = images.latents.load(images.items[0])
    torch.testing.assert_close(torch.tensor(arrays["control_0_flipped"]), torch.tensor(arrays["control_0"]).flip(-1))


def test_caches_have_musubi_tuners_names_and_keys_and_go_stale_with_the_reference(pairs):
    config = toml(pairs, "no_resize_control = true")
    _, family = encoded(config)
    assert len(family.seen) == 7, "three images, four references"
    file = pairs / "images" / "00_0064x0064_fk.safetensors"
    stored_arrays = load_file(file)
    assert {name: tuple(array.shape) for name, array in stored_arrays.items()} == {
        "latents_1x8x8_float32": (4, 8, 8),
        "latents_control_1x8x16_float32": (4, 8, 16),
    }
    with safe_open(file, "pt") as archive:
        about = archive.metadata()
    assert (about["architecture"], about["width"], about["height"]) == ("flux_kontext", "64", "64")
    several = load_file(pairs / "images" / "02_0064x0064_fk.safetensors")
    assert {"latents_control_0_1x6x10_float32", "latents_control_1_1x6x10_float32"} < set(several)

    save_file(
        {name: array[:, None].contiguous() for name, array in stored_arrays.items()}, file, about
    )  # as it once was here
    assert len(encoded(config)[1].seen) == 0
    make.picture(pairs / "second" / "00.webp", (128, 64), seed=77)
    assert len(encoded(config)[1].seen) == 2

    # A file of musubi-tuner's own says nothing of where it came from, and may hold bfloat16.
    small = {name.replace("float32", "bfloat16"): array.bfloat16() for name, array in load_file(file).items()}
    save_file(small, file, {"architecture": "flux_kontext", "width": "64", "height": "64"})
    images, family = encoded(config)
    assert len(family.seen) == 0
    loaded = images.latents.load(images.items[0])
    assert loaded["control_0"].shape == (4, 8, 16) and loaded["control_0"].dtype == np.float32
    save_file(small, file, {"architecture": "flux_kontext", "width": "72", "height": "64"})
    assert len(encoded(config)[1].seen) == 2, "it was made from an image of another size"


@pytest.mark.parametrize("other", ["second", "third"])
def test_an_image_is_shown_with_the_same_references_at_each_size_where_caches_are_files(pairs, other):
    shutil.copytree(pairs / "second", pairs / "third")
    config, text = toml(pairs), (pairs / "d.toml").read_text()
    (pairs / "d.toml").write_text(text + text.replace("= 64", "= 128").replace("second", other))
    if other == "second":
        assert len(encoded(config)[0].items) == 6
    else:
        with pytest.raises(ConfigError, match="is used with two reference images or masks"):
            encoded(config)


def test_captions_are_kept_under_musubi_tuners_names(pairs):
    family = Family(MUSUBI)
    names = {"hidden": "t5_vec", "pool": "clip_l_pooler"}
    family.text_cache = TextCache("_fk_te.safetensors", ("hidden", "pool"), architecture="flux_kontext", names=names)
    text = {"cache_text_encoder_outputs_to_disk": True, "network_train_unet_only": True}
    config = make.config(None, dataset_config=str(toml(pairs).data.dataset_config), **DISK, **text)
    images, _ = encoded(config, family)
    stored_arrays = load_file(pairs / "images" / "00_fk_te.safetensors")
    assert set(stored_arrays) == {"t5_vec_float32", "clip_l_pooler_float32"}
    assert set(images.text.load(images.items[0])) == {"hidden", "pool"}
    family.read.clear()
    encoded(config, family)
    assert not family.read
    # A file of musubi-tuner's own says which caption it is of, with all of its lines, and nothing else.
    caption = images.items[0].caption
    for told, same in ((caption, True), (f"{caption}\nmore", True), ("another caption", False)):
        save_file(stored_arrays, pairs / "images" / "00_fk_te.safetensors", {"caption1": told})
        encoded(config, family)
        assert bool(family.read) is not same
        family.read.clear()


def masked(tmp_path, use, alpha=False):
    """An image whose left quarter is to be painted."""
    use(inpaints=True)
    make.folder(tmp_path, "images", ((64, 64),))
    mask = Pillow.new("L", (64, 64))
    mask.paste(255, (0, 0, 16, 64))
    mask.paste(100, (16, 0, 20, 64))
    if alpha:
        path = tmp_path / "images" / "00.png"
        picture = Pillow.open(path)
        picture.putalpha(mask)
        picture.save(path)
        return toml(tmp_path, "alpha_mask = true", controls=False)
    (tmp_path / "masks").mkdir()
    mask.save(tmp_path / "masks" / "00.png")
    return toml(tmp_path, f"conditioning_data_dir = '{tmp_path / 'masks'}'\nflip_aug = true", controls=False)


@pytest.mark.parametrize("alpha", [False, True])
def test_masks_say_what_is_painted_and_leave_the_loss_alone(tmp_path, use, alpha):
    config = masked(tmp_path, use, alpha)
    images, family = encoded(config, Family(make.FLUX))
    (cached,), (plain,) = list(Batches(images, config, 4)), list(Batches(data.scan(config), config, 4))
    assert cached.mask is None and plain.mask is None and cached.shape == (8, 8)
    assert torch.equal(cached.paint, plain.paint) and cached.paint.shape == (1, 1, 64, 64)
    assert cached.paint.sum() == 16 * 64, "what is darker than half stays"
    assert torch.equal(plain.controls[0], plain.pixels * (1 - plain.paint))
    torch.testing.assert_close(family.control_latents(make.parts(), plain.controls[0]), cached.controls[0])
    assert next(iter(Batches(images, config, 4).kinds())) == (1, 8, 8), "a mask adds no tokens"
    with np.load(tmp_path / "images" / "00_0064x0064_flux.npz") as npz:
        assert {"latents_8x8", "control_0_8x8"} <= set(npz.files)


def test_another_mask_is_encoded_anew(tmp_path, use):
    config = masked(tmp_path, use)
    encoded(config, Family(make.FLUX))
    assert len(encoded(config, Family(make.FLUX))[1].seen) == 0
    Pillow.new("L", (64, 64), 255).save(tmp_path / "masks" / "00.png")
    assert len(encoded(config, Family(make.FLUX))[1].seen) == 4
    shutil.copy(tmp_path / "images" / "00.png", tmp_path / "masks" / "00.png")
    make.picture(tmp_path / "masks" / "00.png", (80, 64))
    assert "00.png is 80x64, but its image is 64x64" in sentences(config)
    (tmp_path / "masks" / "00.png").write_text("no image", encoding="utf-8")
    assert "00.png cannot be read as an image" in sentences(config)


def test_masks_are_drawn_where_there_are_none_and_each_step_takes_one(tmp_path, use):
    use(inpaints=True, random_masks=3)
    make.folder(tmp_path, "images", ((64, 64), (128, 64)))
    config = toml(tmp_path, "flip_aug = true", "enable_bucket = true\nmin_bucket_reso = 64", controls=False)
    images, family = encoded(config, Family(make.FLUX))
    assert len(family.seen) == 2 * 2 * 4, "the image and three masked ones, as they are and mirrored"
    assert not encoded(config, Family(make.FLUX))[1].seen

    def epochs(images, seed):
        batches = Batches(images, config, seed)
        return [batch for _ in range(12) for batch in batches]

    cached, plain = epochs(images, 5), epochs(data.scan(config), 5)
    masks_seen = set()
    for first, other in zip(cached, plain, strict=True):
        assert torch.equal(first.paint, other.paint) and 0 < first.paint.mean() < 1
        assert torch.equal(other.controls[0], other.pixels * (1 - other.paint))
        torch.testing.assert_close(family.control_latents(make.parts(), other.controls[0]), first.controls[0])
        masks_seen.add(first.paint.numpy().tobytes())
    assert len(masks_seen) == 2 * 2 * 3, "every mask of both, as it is and mirrored"
    paints = [batch.paint for batch in cached]
    assert all(torch.equal(first, batch.paint) for first, batch in zip(paints, epochs(images, 5), strict=True))
    assert not all(first.equal(batch.paint) for first, batch in zip(paints, epochs(images, 6), strict=True))
    later = Batches(images, config, 5)
    later.go_to(6, 1)
    assert torch.equal(next(iter(later)).paint, cached[5 * 2 + 1].paint), "as a training that continues there"

    use(inpaints=True, random_masks=2)
    assert len(encoded(config, Family(make.FLUX))[1].seen) == 2 * 2 * 3


def test_a_cache_is_stale_when_another_kind_of_mask_made_it(tmp_path, use):
    config = masked(tmp_path, use, alpha=True)
    encoded(config, Family(make.FLUX))
    use(inpaints=True, random_masks=1)
    for more in ("", "alpha_mask = true"):
        config = toml(tmp_path, more, controls=False)
        assert len(encoded(config, Family(make.FLUX))[1].seen) == 2
        assert not encoded(config, Family(make.FLUX))[1].seen


def test_random_masks_cover_a_part_of_every_image():
    shares = [random_mask(size, Random(number)).mean() for number in range(100) for size in ((64, 64), (512, 256))]
    assert all(0 < share < 1 for share in shares) and 0.2 < np.mean(shares) < 0.6
