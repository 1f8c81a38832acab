"""Decoding, resizing and augmenting: the rules of sd-scripts, and images that trip others up."""

from random import Random

import cv2
import numpy as np
import pytest
from PIL import Image

from library.config.problems import ConfigError
from library.data import augment, caches, pixels
from library.data.buckets import BucketFit
from tests.data import make


def test_transparency_is_dropped_and_not_blended(tmp_path):
    Image.new("RGBA", (8, 8), (200, 100, 50, 0)).save(tmp_path / "a.png")
    assert (pixels.read_pixels(tmp_path / "a.png") == (200, 100, 50)).all()
    assert pixels.read_pixels(tmp_path / "a.png", alpha=True).shape == (8, 8, 4)


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "CMYK"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode).save(path)
    assert pixels.read_pixels(path).shape == (8, 8, 3) and pixels.read_pixels(path).min() > 250


def test_grey_of_16_bits_keeps_its_shades(tmp_path):
    Image.fromarray(np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)).save(tmp_path / "a.png")
    shades = pixels.read_pixels(tmp_path / "a.png")[:, :, 0]
    assert shades.min() == 0 and shades.max() == 255 and len(np.unique(shades)) == 64


def test_exif_does_not_turn_the_image(tmp_path):
    turned = Image.Exif()
    turned[274] = 6
    make.picture(tmp_path / "a.jpg", (80, 48), exif=turned)
    assert pixels.read_pixels(tmp_path / "a.jpg").shape == (48, 80, 3)


def test_shrinking_is_by_area_and_growing_by_lanczos(tmp_path):
    picture = pixels.read_pixels(make.picture(tmp_path / "a.png", (60, 40)))
    assert np.array_equal(
        pixels.resize_pixels(picture, (30, 40)), cv2.resize(picture, (30, 40), interpolation=cv2.INTER_AREA)
    )
    lanczos = np.asarray(Image.fromarray(picture).resize((61, 20), Image.Resampling.LANCZOS))
    assert np.array_equal(pixels.resize_pixels(picture, (61, 20)), lanczos)
    for name, number in pixels.RESIZE.items():
        expected = cv2.resize(picture, (70, 70), interpolation=number)
        assert np.array_equal(pixels.resize_pixels(picture, (70, 70), name), expected)
    with pytest.raises(ConfigError, match="resize_interpolation"):
        pixels.resize_pixels(picture, (70, 70), "magic")


def test_opencv_numbers_its_interpolations_as_we_do():
    names = ("INTER_NEAREST_EXACT", "INTER_LINEAR", "INTER_CUBIC", "INTER_AREA")
    ours = (pixels.NEAREST, pixels.BILINEAR, pixels.CUBIC, pixels.AREA)
    assert tuple(getattr(cv2, name) for name in names) == ours


def test_views_show_the_middle_or_any_part():
    fit = BucketFit((64, 64), (90, 64))
    assert augment.middle(fit) == augment.View((90, 64), 13, 0, (64, 64))
    lefts = {augment.anywhere(fit, Random(seed)).left for seed in range(300)}
    assert lefts == set(range(27))


def test_mirroring_turns_left_to_right(tmp_path):
    picture = pixels.read_pixels(make.picture(tmp_path / "a.png", (64, 64)))
    fit = BucketFit((64, 64), (64, 64))
    assert np.array_equal(pixels.apply_view(picture, augment.middle(fit, flip=True)), picture[:, ::-1])


def test_colours_change_a_little_and_for_one_in_three(tmp_path):
    picture = pixels.read_pixels(make.picture(tmp_path / "a.png", (32, 32)))
    variants = [augment.color(picture, Random(seed)) for seed in range(600)]
    changed = [one for one in variants if not np.array_equal(one, picture)]
    assert 150 < len(changed) < 250
    assert all(one.dtype == np.uint8 and one.shape == picture.shape for one in variants)
    assert max(np.abs(one.astype(int) - picture).mean() for one in changed) < 30


@pytest.mark.parametrize("name", ["a.png", "a_1_2_3.png", "a_1_2_3_x.png", "a_1_2_0_3.png"])
def test_names_without_a_face(name):
    assert augment.face_of(name) is None


def test_a_name_with_a_face():
    assert augment.face_of("some/me_too_320_240_80_90.jpg") == (320, 240, 80, 90)


def test_a_missing_file_and_a_broken_one_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.png is missing"):
        pixels.read_pixels(tmp_path / "no.png")
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"a\.png cannot be read"):
        pixels.read_pixels(tmp_path / "a.png")


@pytest.mark.parametrize("suffix", [".png", ".webp", ".bmp", ".avif"])
def test_a_file_that_passes_the_check_can_be_read(tmp_path, suffix):
    """One wrong bit anywhere."""
    if suffix not in pixels.extensions():
        pytest.skip("no decoder here")
    path = make.picture(tmp_path / f"a{suffix}", (96, 96))
    whole, random, damaged = path.read_bytes(), Random(3), 0
    assert pixels.check_file(str(path)) == ""
    for _ in range(60):
        content = bytearray(whole)
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)
        try:
            pixels.read_pixels(path)
        except ConfigError:
            damaged += 1
            assert pixels.check_file(str(path))
    assert damaged or suffix == ".bmp"


def test_a_png_whose_text_alone_is_damaged_can_be_trained(tmp_path):
    path = make.picture(tmp_path / "a.png")
    content = path.read_bytes()
    path.write_bytes(content[:-12] + b"\0\0\0\4tIMEabcd\0\0\0\0" + content[-12:])
    assert pixels.read_pixels(path).shape and pixels.check_file(str(path)) == ""


@pytest.mark.parametrize("name", ["a.png", "a_te_outputs.npz"])
def test_a_folder_that_is_renamed_during_a_training_is_named_instead_of_its_files(tmp_path, name):
    """A cache in it is not made again by a new start, as was said of it."""

    def said(path):
        error = caches.unreadable_cache(path, FileNotFoundError()) if path.suffix == ".npz" else None
        with pytest.raises(ConfigError) as raised:
            raise error or pixels.read_pixels(path)
        return str(raised.value)

    assert said(tmp_path / name).startswith(f"{tmp_path / name} is missing: it was there")
    gone = said(tmp_path / "data" / name)
    assert (
        gone == f"{tmp_path / 'data'} is missing: it was there when the training started; put it back under this name"
    )
