"""Caches and images from strangers: a damaged or malicious one is no cache and no image, in one sentence, and costs
neither a traceback nor the memory of several.
"""

import contextlib
import json
import os
import struct
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from library.config.problems import ConfigError
from library.curation import similar_images, thumbs, trash
from library.data import caches, held_out, image_files, orientation, pixels, stamps, uniform
from library.data.buckets import BucketFit
from library.train.saving import state_files

VAE = {"exact": "y", "type": "float32", "marks": [1.0]}
GOOD = {"resized": [64, 64], "interpolation": "", "vae": VAE, "image": None}
STAMPS = {
    "deep": "[" * 100_000,
    "deep tables": '{"vae":' * 50_000,
    "an endless number": f'{{"vae": {{"type": "float16", "marks": [{"9" * 4000}]}}}}',
    "infinite": json.dumps({**GOOD, "vae": {"type": "float16", "marks": [1e999]}}),
    "other types": json.dumps({**GOOD, "vae": {"type": [], "marks": {}}, "image": {}, "controls": 5}),
    "twice": '{"a": 1, "a": 2}',
    "nothing": "null",
    "a text": '"x"',
    "half a character": '{"vae": "\\ud800"}',
    "no JSON": "{",
}
HEADS = {
    "a shape that is a number": "{'descr': '<f4', 'fortran_order': False, 'shape': 7, }",
    "a shape that is a truth": "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 8, 8), }",
    "a negative shape": "{'descr': '<f4', 'fortran_order': False, 'shape': (-4, 8, 8), }",
    "an endless shape": f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'9' * 5000}, 8, 8), }}",
    "a record": "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (4, 8, 8), }",
    "an object": "{'descr': '|O', 'fortran_order': False, 'shape': (4, 8, 8), }",
    "a text of gigabytes": "{'descr': '<U1000000000', 'fortran_order': False, 'shape': (1,), }",
    "a key that is a list": "{[]: 1}",
    "deep": "(" * 3000,
    "signs": "-" * 5000 + "1",
    "a text without end": "'''",
    "a list without end": "[",
    "NUL": "\0",
    "nothing": "",
}
ARRAYS = {
    "a number": np.array(3),
    "a text": np.array("x"),
    "texts": np.zeros(2, "U5"),
    "empty": np.zeros(0),
    "complex": np.array([1j]),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "too many": np.zeros((9, 9)),
}
NAMES = ("latents", "made_from", "original_size", "crop_ltrb", "alpha_mask", "pool2", "caption")


def npy(head):
    text = head.encode("latin-1")
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(1024)


def npz(path, **entries):
    """An archive of good arrays, of which some are exchanged for others, or for the bytes of a file."""
    good = {
        "latents": np.zeros((4, 8, 8), np.float32),
        "original_size": np.array([64, 64]),
        "crop_ltrb": np.array([0.0, 0.0, 64.0, 64.0]),
        "pool2": np.zeros(4, np.float32),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**good, **entries}.items():
            with archive.open(f"{name}.npy", "w") as file:
                file.write(content) if isinstance(content, bytes) else np.lib.format.write_array(file, content)
    return path


def use(path):
    """Do with a file whatever is done with caches; the only errors are those that its readers expect."""
    entry = caches.LatentEntry("", (64, 64), BucketFit((64, 64), (64, 64)), str(path), "")
    stamp = {"caption": "x", "encoders": VAE, "options": {"alpha_mask": True}}
    caches.latents_are_good(entry, VAE)
    caches.has_size(entry)
    caches._arrays_of_other_sizes(replace(entry, tail="_8x8"))
    caches.text_is_good(str(path), {"pool2": None}, [], stamp)
    for read in (lambda: caches.read_latents(entry), lambda: caches.read_text_cache(str(path), ["pool2"])):
        try:
            read()
        except caches.BROKEN as error:
            assert str(caches.unreadable_cache(path, error)).startswith(str(path))


def test_a_good_cache_is_used(tmp_path):
    path = npz(tmp_path / "a.npz", made_from=np.array(json.dumps(GOOD)))
    assert caches.latents_are_good(caches.LatentEntry("", (64, 64), BucketFit((64, 64), (64, 64)), str(path), ""), VAE)


@pytest.mark.parametrize("stamp", STAMPS)
def test_no_cache_fails_at_its_provenance(tmp_path, stamp):
    use(npz(tmp_path / "a.npz", made_from=np.array(STAMPS[stamp])))
    save_file(
        {"latents_1x8x8_float32": np.zeros((4, 1, 8, 8), np.float32)},
        tmp_path / "a.safetensors",
        {"made_from": STAMPS[stamp]},
    )
    use(tmp_path / "a.safetensors")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", [*HEADS, *ARRAYS])
def test_no_cache_fails_at_its_arrays(tmp_path, name, content):
    use(npz(tmp_path / "a.npz", **{name: npy(HEADS[content]) if content in HEADS else ARRAYS[content]}))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_no_cache_fails_at_how_it_is_packed(tmp_path, method):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("latents.npy", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4, 8, 8), }"))
    content = bytearray(path.read_bytes())
    for at in range(len(content)):
        spoilt = content.copy()
        spoilt[at] ^= 0xFF
        path.write_bytes(spoilt)
        use(path)


# ---- pipes and devices


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".png", ".jpg", ".webp", ".avif"])
def test_no_reader_of_data_waits_for_what_is_no_file(tmp_path, suffix, kind):
    path = tmp_path / f"a{suffix}"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    use(path)
    text, now = str(path), (1, 1)
    assert pixels.check_file(text) and not pixels.has_transparency(text)
    assert not pixels.hides_colours(text, *now) and not stamps.same_image(text, [1, 2, "x"])
    assert orientation.orientation(text) == 1 == orientation._of_file(text, 1)
    assert held_out.digest_image(text) and not uniform._is_plain(text)
    assert similar_images.looks(text) is None and similar_images.same_bytes([(text, 1), (text, 1)]) == []
    for read in (pixels.read_pixels, pixels.read_mask, pixels.wide_values, thumbs.thumb):
        with pytest.raises(ConfigError, match="cannot be read as an image|pipe or a device"):
            read(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("name", ["train_state.json", "SHA256SUMS", "optimizer.bin", "model.safetensors"])
def test_no_reader_of_a_state_waits_for_a_pipe(tmp_path, name):
    facts = {"version": state_files.VERSION, "current_step": 1, "checksums": True}
    (tmp_path / "train_state.json").write_text(json.dumps(facts))
    for file in ("optimizer.bin", "model.safetensors"):
        (tmp_path / file).write_bytes(b"x")
    digests = state_files._digests(tmp_path, sorted(os.listdir(tmp_path)))
    text = "".join([f"# {state_files.STEP_KEY} 1\n", *(f"{digest}  {file}\n" for file, digest in digests.items())])
    (tmp_path / "SHA256SUMS").write_text(text + state_files._last_line(text))
    assert state_files.damage(tmp_path) == []
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert any("cannot be resumed" in str(problem) for problem in state_files.damage(tmp_path))
    with pytest.raises(ConfigError, match="pipe or a device"):
        state_files.read_values(tmp_path / name, "cpu")
    with pytest.raises(ConfigError, match="pipe or a device"):
        state_files.read_tensors(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_no_undo_waits_for_a_pipe(tmp_path):
    folder = tmp_path / trash.FOLDER / "20260101-000000-abcd"
    folder.mkdir(parents=True)
    for name in (trash.ABOUT, trash.JOURNAL):
        os.mkfifo(folder / name)
    assert trash.history(tmp_path) == []
    assert [*trash._journal_lines(folder)] == []


# ---- memory


def test_images_with_very_many_pixels_are_decoded_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "MANY_PIXELS", 100)
    held = []

    @contextlib.contextmanager
    def alone():
        held.append(True)
        yield
        held.append(False)

    monkeypatch.setattr(image_files, "_alone", alone())
    for side, times in ((9, []), (20, [True, False])):
        Image.new("RGB", (side, side)).save(tmp_path / f"{side}.png")
        pixels.read_pixels(tmp_path / f"{side}.png")
        assert held == times


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P", "1"])
def test_images_of_one_colour_are_found_in_every_mode(tmp_path, mode):
    path = tmp_path / "a.png"
    Image.new(mode, (32, 32)).save(path)
    assert uniform._is_plain(str(path))
    image = Image.new("RGBA", (32, 32), (9, 9, 9, 255))
    image.putpixel((3, 3), (200, 9, 9, 255))
    image.convert(mode).save(path)
    assert not uniform._is_plain(str(path))


def test_a_colour_that_is_transparent_is_another_colour(tmp_path):
    image = Image.new("RGB", (32, 32), (9, 9, 9))
    image.putpixel((3, 3), (10, 9, 9))
    image.save(tmp_path / "a.png", transparency=(10, 9, 9))
    assert not uniform._is_plain(str(tmp_path / "a.png"))
