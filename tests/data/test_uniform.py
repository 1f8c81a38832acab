"""Remarks about images that are rarely meant: of a single colour, and copies."""

import shutil

import numpy as np
import pytest
from PIL import Image

from library import data
from library.data import pixels
from tests.data import make


def remarks(folder, **options):
    check = data.check_data(make.config(folder, **options), 32)
    assert not check.problems
    return [str(warning) for warning in check.warnings if "single colour" in str(warning) or "copies" in str(warning)]


FORMATS = [suffix for suffix in (".png", ".jpg", ".webp", ".bmp", ".avif") if suffix in pixels.extensions()]
PLAIN = {
    "black": lambda: Image.new("RGB", (512, 384)),
    "white": lambda: Image.new("RGB", (640, 640), "white"),
    "colour": lambda: Image.new("RGB", (333, 500), (200, 30, 90)),
    "small": lambda: Image.new("RGB", (64, 64), "blue"),
    "grey": lambda: Image.new("L", (512, 512), 40),
}


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("kind", PLAIN)
def test_an_image_of_one_colour_is_remarked(tmp_path, kind, suffix):
    if suffix == ".bmp":
        pytest.skip("has no compression, by which such images are told cheaply")
    folder = make.folder(tmp_path, "10_cat")
    PLAIN[kind]().save(folder / f"plain{suffix}")
    (folder / "plain.txt").write_text("a cat")
    (said,) = remarks(tmp_path)
    assert said.startswith("1 image of a single colour: ") and f"plain{suffix}" in said


def test_drawings_of_few_colours_and_transparent_ones_are_not_remarked(tmp_path):
    folder = make.folder(tmp_path, "10_cat")
    drawing = Image.new("RGB", (512, 512), "white")
    drawing.paste("black", (100, 100, 110, 110))
    drawing.save(folder / "drawing.png")
    mask = Image.new("L", (512, 512), 0)
    mask.paste(255, (0, 0, 256, 512))
    cut = Image.new("RGB", (512, 512), "red")
    cut.putalpha(mask)
    cut.save(folder / "cut.png")
    for name in ("drawing", "cut"):
        (folder / f"{name}.txt").write_text("a cat")
    assert remarks(tmp_path) == []


@pytest.mark.parametrize(("copies", "is_remarked"), [(0, False), (2, False), (3, True), (9, True)])
def test_many_copies_are_remarked_and_few_are_not(tmp_path, copies, is_remarked):
    folder = make.folder(tmp_path, "10_cat")
    first = sorted(folder.glob("*.png"))[0]
    for number in range(copies):
        shutil.copyfile(first, folder / f"copy{number}.png")
        (folder / f"copy{number}.txt").write_text("a cat")
    said = remarks(tmp_path)
    assert [f"{copies} images with the same content as others" in text for text in said] == [True] * is_remarked


def test_images_of_one_size_in_bytes_are_compared_by_content(tmp_path):
    folder = make.folder(tmp_path, "10_cat")
    for number in range(6):
        noise = np.random.default_rng(number).integers(0, 255, (40, 40, 3), np.uint8)
        Image.fromarray(noise).save(folder / f"noise{number}.bmp")
        (folder / f"noise{number}.txt").write_text("a cat")
    assert remarks(tmp_path) == []


def test_regularisation_images_are_not_counted(tmp_path):
    make.folder(tmp_path / "learned", "10_cat")
    folder = make.folder(tmp_path / "reg", "1_cat")
    for number in range(4):
        Image.new("RGB", (128, 128)).save(folder / f"plain{number}.png")
    assert remarks(tmp_path / "learned", reg_data_dir=str(tmp_path / "reg")) == []
