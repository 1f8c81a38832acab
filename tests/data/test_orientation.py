"""Photos that a camera turned: their EXIF orientation, and everywhere that it is applied, or not."""

import builtins
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from library import data
from library.captioning import writing
from library.config.building import replace_options
from library.config.schema import options_of
from library.curation import sources, thumbs
from library.data import encoding, orientation, pixels
from library.data.loading import Batches
from library.families import config_class
from library.masking import files as masks
from tests.data import make

TURNS = range(1, 9)
SIZE = (80, 48)


def turned(path, turn, size=SIZE, seed=0, **options):
    """A picture with an orientation: stored as it is drawn."""
    return make.picture(path, size, seed, exif=orientation.tag(turn), **options)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".avif"])
@pytest.mark.parametrize("turn", TURNS)
def test_every_orientation_of_every_format_is_that_of_pillow(tmp_path, suffix, turn):
    if suffix not in pixels.extensions():
        pytest.skip("no decoder here")
    path = turned(tmp_path / f"a{suffix}", turn)
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        stored = np.asarray(image.convert("RGB"))
    assert orientation.orientation(path) == turn
    assert np.array_equal(pixels.read_pixels(path, pixels.Decoding(upright=True)), expected)
    assert np.array_equal(pixels.read_pixels(path), stored)
    with Image.open(path) as image:
        upright = orientation.upright(image).convert("RGB")
    assert np.array_equal(np.asarray(orientation.turned_back(upright, turn)), stored)


def test_a_png_may_say_it_behind_its_pixels_and_in_texts(tmp_path):
    path = make.picture(tmp_path / "a.png", SIZE)
    whole = path.read_bytes()
    content = orientation.tag(6).tobytes()[6:]  # without the name that JPEG has in front
    chunk = PngImagePlugin._crc32 and _chunk(b"eXIf", content)
    path.write_bytes(whole[:-12] + chunk + whole[-12:])
    assert orientation.orientation(path) == 6
    texts = PngImagePlugin.PngInfo()
    texts.add_text("parameters", "a cat, steps: 20")
    make.picture(tmp_path / "b.png", SIZE, pnginfo=texts)
    assert orientation.orientation(tmp_path / "b.png") == 1


def _chunk(kind, content):
    import zlib

    return len(content).to_bytes(4) + kind + content + zlib.crc32(kind + content).to_bytes(4)


@pytest.mark.parametrize("content", [b"", b"junk", b"\x89PNG\r\n\x1a\n\xff\xff\xff\xffeXIf"])
def test_what_is_no_image_is_upright(tmp_path, content):
    for suffix in (".png", ".jpg"):
        (tmp_path / f"a{suffix}").write_bytes(content)
        assert orientation.orientation(tmp_path / f"a{suffix}") == 1
    assert orientation.orientation(tmp_path / "nothing.png") == 1


# ---- trainings


@pytest.fixture
def photos(tmp_path):
    """Eight photos, one of each orientation, square and not, in several formats."""
    for turn in TURNS:
        suffix = (".jpg", ".png", ".webp")[turn % 3]
        turned(tmp_path / "set" / "1_cat" / f"{turn}{suffix}", turn, SIZE if turn % 2 else (64, 64), seed=turn)
    return tmp_path / "set"


def of(photos, **values):
    return make.config(photos, enable_bucket=True, resolution="64", bucket_reso_steps=32, min_bucket_reso=32, **values)


def shown(path):
    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def test_sizes_buckets_and_pixels_are_those_that_people_see(photos):
    images = data.scan(of(photos, exif_rotation=True))
    for image in images.items:
        height, width = shown(image.path).shape[:2]
        assert image.size == (width, height) and (image.fit.bucket[0] < image.fit.bucket[1]) is (width < height)
        batch = Batches(replace_items(images, image), of(photos, exif_rotation=True), 0)
        pixels_of_batch = next(iter(batch)).pixels[0]
        expected = pixels.to_tensor(pixels.apply_view(shown(image.path), middle(image)))
        assert np.array_equal(pixels_of_batch.numpy(), expected.numpy())


def replace_items(images, image):
    from dataclasses import replace as changed

    return changed(images, items=[image])


def middle(image):
    from library.data import augment

    return augment.middle(image.fit)


def test_without_the_option_nothing_is_turned_and_each_is_named(photos):
    config = of(photos)
    sizes = {image.path: image.size for image in data.scan(config).items}
    for path, size in sizes.items():
        with Image.open(path) as image:
            assert image.size == size
    (said,) = (warning for warning in data.check_data(config, 32).warnings if "EXIF" in str(warning))
    assert str(said).startswith("7 images turned or mirrored") and said.fix == {"exif_rotation": True}
    assert not any(
        "EXIF" in str(warning) for warning in data.check_data(replace_options(config, exif_rotation=True), 32).warnings
    )


@pytest.mark.parametrize("cache", [make.SDXL, make.FLUX])
def test_caches_of_one_way_are_not_taken_for_the_other(photos, cache):
    def encoded(upright):
        config = of(photos, exif_rotation=upright, cache_latents_to_disk=True)
        family, images, run = make.Family(cache), data.scan(config), make.Run()
        encoding.encode_missing_caches(images, family, make.parts(), config, run, run.phase)
        return {image.path: images.latents.load(image)["latents"] for image in images.items}, len(family.seen)

    stored, first = encoded(False)
    encoded_first, second = encoded(True)
    assert (first, second) == (8, 7)  # the photo that is not turned is encoded once
    for path in stored:
        plain = np.array_equal(stored[path], encoded_first[path])
        assert plain is (orientation.orientation(path) == 1), path
    for upright, before in ((False, stored), (True, encoded_first)):  # both are there, and stay valid
        again, count = encoded(upright)
        assert count == 0 and all(np.array_equal(again[path], before[path]) for path in before)


def test_caches_of_a_turned_image_are_not_those_of_one_that_is_named_like_them(tmp_path):
    """Many keep a turned copy beside the photo."""
    turned(tmp_path / "1_cat" / "photo.jpg", 3, seed=1)
    make.picture(tmp_path / "1_cat" / "photo_upright.jpg", SIZE, seed=2)
    config = of(tmp_path, exif_rotation=True, cache_latents_to_disk=True)
    for _ in range(2):
        family, images, run = make.Family(make.SDXL), data.scan(config), make.Run()
        encoding.encode_missing_caches(images, family, make.parts(), config, run, run.phase)
        first, second = (images.latents.load(image)["latents"] for image in images.items)
        assert not np.allclose(first, second)
    assert len(family.seen) == 0
    make.picture(tmp_path / "1_cat" / "photo_upright.jpg", SIZE[::-1], seed=2)
    os.utime(tmp_path / "1_cat" / "photo_upright.jpg", (1e9, 1e9))
    assert [image.size for image in data.scan(config).items] == [SIZE, SIZE[::-1]]


def test_sizes_that_are_remembered_are_those_as_stored(photos):
    stored, upright = of(photos, cache_info=True), of(photos, cache_info=True, exif_rotation=True)
    sizes = [[image.size for image in data.scan(config).items] for config in (stored, upright)]
    assert sizes[0] != sizes[1]
    assert [[image.size for image in data.scan(config).items] for config in (upright, stored)] == sizes[::-1]


def test_metadata_states_sizes_as_stored(photos):
    import json

    names = sorted(path.name for path in (photos / "1_cat").iterdir())
    sizes = {name: Image.open(photos / "1_cat" / name).size for name in names}
    rows = {f"1_cat/{name}": {"caption": "a cat", "image_size": list(size)} for name, size in sizes.items()}
    (photos / "meta.json").write_text(json.dumps(rows))
    config = of(photos, in_json=str(photos / "meta.json"), exif_rotation=True)
    for image in data.scan(config).items:
        assert image.size == shown(image.path).shape[1::-1]


DATASET = """
[[datasets]]
resolution = 64
batch_size = 1
[[datasets.subsets]]
image_dir = '{images}'
caption_extension = ".txt"
{second} = '{folder}'
"""


def described(tmp_path, script, second, **values):
    """A data set file with masks or reference images."""
    options = {"images": (tmp_path / "set" / "1_cat").as_posix(), "folder": (tmp_path / "second").as_posix()}
    (tmp_path / "sets.toml").write_text(DATASET.format(second=second, **options))
    nothing = {"resolution": None, "min_bucket_reso": None, "max_bucket_reso": None, "caption_extension": None}
    return make.config(None, script, **nothing, dataset_config=str(tmp_path / "sets.toml"), **values)


@pytest.mark.parametrize("upright", [True, False])
def test_masks_turn_with_their_images(tmp_path, upright):
    """Those that are made here are stored as their image, with its orientation."""
    for turn in TURNS:
        path = turned(tmp_path / "set" / "1_cat" / f"{turn}.jpg", turn)
        left_half = np.zeros(shown(path).shape[:2], np.uint8)
        left_half[:, : left_half.shape[1] // 2] = 255
        (tmp_path / "second").mkdir(exist_ok=True)
        (tmp_path / "second" / f"{turn}.png").write_bytes(masks.png(Image.fromarray(left_half), path))
    config = described(tmp_path, "sdxl_train_network", "conditioning_data_dir", masked_loss=True, exif_rotation=upright)
    images = data.scan(config)
    for batch, _ in zip(Batches(images, config, 0), images.items, strict=False):
        mask = batch.mask[0, 0].numpy()
        turn = orientation.orientation(batch.paths[0]) if not upright else 1
        expected = Image.fromarray(np.repeat([[255] * 4 + [0] * 4], 8, 0).astype(np.uint8))
        assert np.array_equal(mask.round(), np.asarray(orientation.turned_back(expected, turn)) / 255), batch.paths


def test_reference_images_turn_by_themselves(tmp_path):
    make.picture(tmp_path / "set" / "1_cat" / "a.png", (64, 64))
    path = turned(tmp_path / "second" / "a.jpg", 6)
    for upright in (False, True):
        config = described(tmp_path, "flux_2_train_network", "control_directory", exif_rotation=upright)
        images = data.scan(config)
        assert images.items[0].controls[0].size == (SIZE[::-1] if upright else SIZE)
        told = [str(warning) for warning in data.check_data(config, 16).warnings if "EXIF" in str(warning)]
        assert bool(told) is not upright and all(str(path) in text for text in told)


# ---- the data set tab, captions and masks


def test_the_data_set_tab_shows_what_is_trained(photos):
    for upright in (False, True):
        collection = sources.scan_sources(of(photos, exif_rotation=upright))
        assert sum(picture.turned for picture in collection.pictures) == 7
        trained = {image.path: (image.size, image.fit) for image in data.scan(collection.config).items}
        assert {picture.path: (picture.size, picture.fit) for picture in collection.pictures} == trained
        for picture in collection.pictures:
            with Image.open(io_of(thumbs.thumb(picture.path, upright=upright))) as small:
                assert small.size == picture.size


def io_of(content):
    import io

    return io.BytesIO(content)


def test_captioners_see_photos_upright(photos):
    for path in sorted((photos / "1_cat").iterdir()):
        assert np.array_equal(np.asarray(writing.rgb(path, [])), shown(path))


@pytest.mark.parametrize("turn", TURNS)
def test_transparency_that_is_written_keeps_the_orientation(tmp_path, turn):
    path = turned(tmp_path / "a.png", turn)
    before, stored = shown(path), pixels.read_pixels(path)
    grey = np.zeros(before.shape[:2], np.uint8)
    grey[:10] = 255
    path.write_bytes(masks.transparent(path, Image.fromarray(grey)))
    assert orientation.orientation(path) == turn and np.array_equal(pixels.read_pixels(path), stored)
    assert np.array_equal(pixels.read_pixels(path, pixels.Decoding(True), alpha=True), np.dstack([before, grey]))


@pytest.mark.parametrize("upright", [True, False])
def test_a_painted_mask_fits_however_it_was_shown(tmp_path, upright):
    path = turned(tmp_path / "set" / "a.jpg", 6)
    size = SIZE[::-1] if upright else SIZE
    painted = np.zeros(size[::-1], np.uint8)
    painted[:, : size[0] // 2] = 255
    content = masks.png(Image.fromarray(painted))
    (tmp_path / "masks").mkdir()
    file = tmp_path / "masks" / "a.png"
    masks.replace_mask(tmp_path / "masks", file, content, size, path, upright)
    assert np.array_equal(pixels.read_mask(file, pixels.Decoding(upright)), painted)
    with Image.open(io_of(masks.mask_overlay(file, 320, upright))) as overlay:
        assert overlay.size == size


def test_presets_and_new_data_sets_turn_and_sd_scripts_files_do_not():
    from kohya_gui.dataset.settings import COUNTING_OPTIONS
    from library.config.formats import read_toml
    from library.families import RUNS

    for path in Path("presets").glob("*/*.toml"):
        assert path.parent.name in ("compile", "recipes") or read_toml(path)["exif_rotation"] is True, path
    assert COUNTING_OPTIONS["exif_rotation"] is True
    assert not any(options_of(config_class(script))["exif_rotation"].default for script in RUNS)


@pytest.mark.parametrize(("suffix", "mode", "most"), [(".jpg", "RGB", 2), (".png", "RGB", 2), (".png", "RGBA", 3)])
def test_the_check_opens_an_image_once_for_its_size_once_for_all_else_and_decodes_few(
    tmp_path, monkeypatch, suffix, mode, most
):
    opened, plain_open = Counter(), builtins.open

    def counting(file, *args, **more):
        opened[str(file)] += str(file).endswith(suffix)
        return plain_open(file, *args, **more)

    (tmp_path / "1_cat").mkdir()
    for number in range(3):
        make.picture(tmp_path / "1_cat" / f"{number}{suffix}", SIZE, number, mode=mode)
        (tmp_path / "1_cat" / f"{number}.txt").write_text("a cat")
    monkeypatch.setattr(builtins, "open", counting)
    data.check_data(make.config(tmp_path, caption_extension=".txt"), 32)
    assert set((+opened).values()) == {most}


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
@pytest.mark.parametrize("turn", TURNS)
def test_an_orientation_that_the_check_has_seen_is_the_same(tmp_path, suffix, turn):
    path = str(turned(tmp_path / f"b{suffix}", turn))
    assert pixels.check_file(path) == "" and orientation.orientation(path) == turn
    assert pixels.has_transparency(path) is False
    make.picture(Path(path), SIZE, mode="RGBA" if suffix == ".png" else "RGB")  # another file in its place
    os.utime(path, ns=(1, 1))
    assert orientation.orientation(path) == 1 and pixels.has_transparency(path) is (suffix == ".png")
