"""Transparent pictures and their ground, and pictures that lose much of themselves to the crop."""

import numpy as np
import pytest
from PIL import Image

from library import data
from library.config.building import replace_options, working_fix
from library.data import encoding, pixels
from library.data.pixels import Decoding
from tests.data import make

WHITE = Decoding(ground="white")
RED = (200, 10, 10)


def cut_out(path, mode="RGBA", size=(64, 64)):
    """A red picture whose left half is transparent, in one of the ways that files have for it."""
    alpha = np.full(size[::-1], 255, np.uint8)
    alpha[:, : size[0] // 2] = 0
    picture = Image.new("RGB", size, RED)
    path.parent.mkdir(parents=True, exist_ok=True)
    if mode in ("RGBA", "LA"):
        picture = picture.convert(mode)
        picture.putalpha(Image.fromarray(alpha))
        picture.save(path)
    elif mode == "P":
        indexed = Image.fromarray((alpha // 255).astype(np.uint8), "P")
        indexed.putpalette([*RED, *RED])
        indexed.save(path, transparency=0)
    else:
        picture.paste((1, 2, 3), (0, 0, size[0] // 2, size[1]))
        picture.save(path, transparency=(1, 2, 3))
    return path


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_transparent_areas_are_of_the_ground(tmp_path, mode):
    path = cut_out(tmp_path / "a.png", mode)
    stored, filled = pixels.read_pixels(path), pixels.read_pixels(path, WHITE)
    assert (filled[:, :32] == 255).all() and np.array_equal(filled[:, 32:], stored[:, 32:])
    assert not (stored[:, :32] == 255).all()
    assert (pixels.read_pixels(path, Decoding(ground="gray"))[:, :32] == 128).all()
    both = pixels.read_pixels(path, WHITE, alpha=True)
    assert np.array_equal(both[:, :, :3], filled) and (both[0, :, 3] == [0] * 32 + [255] * 32).all()


def test_what_is_opaque_has_no_ground(tmp_path):
    path = make.picture(tmp_path / "a.png")
    assert np.array_equal(pixels.read_pixels(path, WHITE), pixels.read_pixels(path))


def test_caches_of_another_ground_are_made_anew_and_those_of_opaque_images_stay(tmp_path):
    cut_out(tmp_path / "1_cat" / "a.png")
    make.picture(tmp_path / "1_cat" / "b.png")

    def count(ground):
        config = make.config(tmp_path, cache_latents_to_disk=True, transparent_background=ground)
        family, images, run = make.Family(), data.scan(config), make.Run()
        encoding.encode_missing_caches(images, family, make.parts(), config, run, run.phase)
        return len(family.seen)

    assert [count(ground) for ground in (None, "white", "white", "black", None)] == [2, 1, 0, 1, 1]


def said(config, word):
    return [warning for warning in data.check_data(config, 32).warnings if word in str(warning)]


def test_hidden_colours_are_counted(tmp_path):
    cut_out(tmp_path / "1_cat" / "a.png")
    make.picture(tmp_path / "1_cat" / "b.png")
    opaque = Image.new("RGBA", (64, 64), (*RED, 255))  # a channel that hides nothing
    opaque.save(tmp_path / "1_cat" / "c.png")
    config = make.config(tmp_path)
    (warning,) = said(config, "transparent areas")
    assert str(warning).startswith("1 image with") and "a.png" in str(warning)
    assert working_fix(warning, config) == {"transparent_background": "white"}
    (tmp_path / "1_cat" / "a.png").unlink()
    (tmp_path / "1_cat" / "c.png").unlink()
    (vain,) = said(replace_options(config, transparent_background="white"), "transparent_background")
    assert "has no effect" in str(vain)
    cut_out(tmp_path / "1_cat" / "a.png")
    for values in ({"transparent_background": "black"}, {"alpha_mask": True}):
        assert not said(replace_options(config, **values), "transparent areas")


def test_hidden_colours_of_references_are_counted_apart(tmp_path):
    make.picture(tmp_path / "in" / "1_cat" / "a.png")
    config = make.config(
        tmp_path / "in", "flux_2_train_network", control_directory=str(tmp_path / "shown"), cache_latents=True
    )
    cut_out(tmp_path / "shown" / "a.png")
    (warning,) = said(config, "transparent areas")
    assert str(warning).startswith("1 image shown to the model with transparent areas") and "shown" in str(warning)
    assert working_fix(warning, config) == {"transparent_background": "white"}
    assert not said(replace_options(config, transparent_background="white"), "transparent")
    make.picture(tmp_path / "shown" / "a.png")
    assert not said(config, "transparent")
    (vain,) = said(replace_options(config, transparent_background="white"), "transparent_background")
    assert "has no effect" in str(vain)


def test_of_many_a_part_is_decoded(tmp_path):
    for number in range(130):
        cut_out(tmp_path / "1_cat" / f"{number}.png", size=(32, 32))
    (warning,) = said(make.config(tmp_path, enable_bucket=False), "transparent areas")
    assert str(warning).startswith("65 images of 65 that were looked at with transparent areas")


def test_images_that_lose_much_to_the_crop_are_counted_with_the_worst_first(tmp_path):
    make.picture(tmp_path / "1_cat" / "fits.png", (70, 64))
    make.picture(tmp_path / "1_cat" / "wide.png", (128, 64))
    make.picture(tmp_path / "1_cat" / "thin.png", (1024, 64))
    config = make.config(tmp_path)
    (warning,) = said(config, "cropped")
    assert str(warning).startswith("2 images cropped by more than 20%")
    assert str(warning).index("thin.png (94%)") < str(warning).index("wide.png (50%)")
    assert not said(replace_options(config, random_crop=True), "cropped")


def test_a_model_that_paints_learns_what_transparency_hides(tmp_path, monkeypatch):
    from library.config.run_config import ControlUse

    cut_out(tmp_path / "1_cat" / "a.png")
    config = make.config(tmp_path, transparent_background="white", alpha_mask=True)
    assert data.scan(config).items[0].how == WHITE
    monkeypatch.setattr(type(config), "control_images", ControlUse(inpaints=True))
    (image,) = data.scan(config).items
    assert image.how == image.controls[0].how == Decoding()
