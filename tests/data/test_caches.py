"""Caches on disk and in memory: kohya's names and keys, upstream's files read, stale ones noticed, none ever torn."""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from library import data
from library.config.problems import ConfigError
from library.data import cache_files, caches, encoding
from library.data.batch import padded
from library.data.loading import Batches
from library.data.ordering import Draw
from library.families.base import LatentCache, TextCache
from library.train.step.loss import with_text_length
from tests import fork_server
from tests.data import make
from tests.training import wait_for

DISK = {"cache_latents_to_disk": True}
MUSUBI = LatentCache("_zi.safetensors", keyed_by_size=True, architecture="z_image")
TEXT = {"cache_text_encoder_outputs_to_disk": True, "network_train_unet_only": True}


def encoded(config, family=None, parts=None, run=None):
    """Scan and encode; returns the images and the family, which knows what it was asked for."""
    family = family or make.Family()
    images = data.scan(config)
    run = run or make.Run()
    encoding.encode_missing_caches(images, family, parts or make.parts(), config, run, run.phase)
    return images, family


def counts(config, family=None, parts=None):
    """How many images and captions had to be encoded."""
    _, family = encoded(config, family, parts)
    return sum(len(pixels) for pixels in family.seen), len(family.read)


@pytest.fixture
def folder(tmp_path):
    return make.folder(tmp_path, "1_cat", ((64, 64), (80, 64), (64, 80)))


@pytest.fixture
def config(folder):
    return make.config(folder.parent, **DISK, **TEXT)


def test_sdxl_files_have_the_names_and_keys_of_sd_scripts(folder, config):
    encoded(config)
    names = sorted(path.name for path in folder.glob("*.npz"))
    assert names[:4] == ["00_0064x0064_sdxl.npz", "00_te_outputs.npz", "01_0080x0064_sdxl.npz", "01_te_outputs.npz"]
    with np.load(folder / names[2]) as npz:
        assert npz["latents"].shape == (4, 8, 8) and npz["latents"].dtype == np.float32
        assert npz["original_size"].tolist() == [80, 64]
        assert npz["crop_ltrb"].tolist() == pytest.approx([0, 6, 64, 57.2])
        assert set(npz.files) == {"latents", "original_size", "crop_ltrb", "made_from"}
    with np.load(folder / names[1]) as npz:
        assert npz["hidden"].shape == (3, 1) and npz["pool"].dtype == np.float32, "bfloat16 is kept as float32"


def test_flux_files_hold_several_sizes(folder):
    family = make.Family(make.FLUX)
    for size in ("64", "128"):
        encoded(make.config(folder.parent, resolution=size, **DISK), family)
    with np.load(folder / "00_0064x0064_flux.npz") as npz:
        assert {"latents_8x8", "latents_16x16", "crop_ltrb_8x8", "original_size_16x16"} <= set(npz.files)
    assert counts(make.config(folder.parent, resolution="64", **DISK), make.Family(make.FLUX)) == (0, 0)


def test_mirrored_latents_and_masks(tmp_path):
    make.picture(tmp_path / "1_cat" / "a.png", (64, 64), mode="RGBA")
    config = make.config(tmp_path, flip_aug=True, alpha_mask=True, caption_extension=".txt", **DISK)
    images, _ = encoded(config)
    arrays = images.latents.load(images.items[0])
    assert np.allclose(arrays["latents_flipped"], arrays["latents"][..., ::-1], atol=1e-6)
    assert arrays["alpha_mask"].shape == (64, 64) and 0 <= arrays["alpha_mask"].min() < arrays["alpha_mask"].max() <= 1


def test_pixels_reach_the_vae_scaled_cut_and_between_minus_one_and_one(folder, config):
    from library.data import augment, pixels

    images, family = encoded(config)
    image = images.items[1]
    picture = pixels.resize_pixels(pixels.read_pixels(image.path), image.fit.resized)
    assert image.fit.resized == (80, 64)
    assert torch.equal(family.seen[1][0], pixels.to_tensor(pixels.apply_view(picture, augment.middle(image.fit))))
    grey = pixels.to_tensor(np.array([[[0, 51, 255]]], np.uint8)).flatten().tolist()
    assert grey == pytest.approx([-1, -0.6, 1]) and family.seen[1].min() < -0.2


def test_a_second_run_encodes_nothing(config):
    assert counts(config) == (3, 3)
    assert counts(config) == (0, 0)


def test_an_interrupted_run_goes_on_where_it_stopped(folder, config):
    encoded(config)
    (folder / "01_0080x0064_sdxl.npz").unlink()
    (folder / "02_te_outputs.npz").unlink()
    assert counts(config) == (1, 1)


@pytest.mark.parametrize("kept_date", [True, False])
def test_another_image_under_the_same_name_is_encoded_again(folder, config, kept_date):
    encoded(config)
    before = (folder / "00.png").stat()
    make.picture(folder / "00.png", (64, 64), seed=99)
    if kept_date:
        os.utime(folder / "00.png", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert counts(config) == (1, 0)
    assert counts(config) == (0, 0)


def test_another_image_of_the_same_length_is_encoded_again(tmp_path):
    folder = tmp_path / "1_cat"
    for number in range(2):
        make.picture(folder / f"{number}.bmp", (64, 64), seed=number)
    config, before = make.config(tmp_path, **DISK), (folder / "0.bmp").stat()
    encoded(config)
    make.picture(folder / "0.bmp", (64, 64), seed=99)
    os.utime(folder / "0.bmp", ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))
    assert (folder / "0.bmp").stat().st_size == before.st_size
    assert counts(config)[0] == 1
    os.utime(folder / "1.bmp")  # only touched
    assert counts(config)[0] == 0


def test_a_moved_data_set_is_not_encoded_again(folder, config, tmp_path):
    encoded(config)
    shutil.copytree(folder.parent, tmp_path / "moved", copy_function=shutil.copyfile)
    assert counts(make.config(tmp_path / "moved", **DISK, **TEXT)) == (0, 0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"resolution": "128"}, (3, 0)),
        ({"flip_aug": True}, (6, 0)),
        ({"alpha_mask": True}, (3, 0)),
        ({"resize_interpolation": "nearest"}, (3, 0)),
        ({"train_batch_size": 2, "vae_batch_size": 3}, (0, 0)),
        ({"skip_cache_check": True, "resolution": "128"}, (0, 0)),
    ],
)
def test_other_options_that_matter_are_noticed(folder, config, options, expected):
    encoded(config)
    assert counts(make.config(folder.parent, **DISK, **TEXT, **options)) == expected


def test_another_caption_is_noticed_also_with_an_older_date(folder, config):
    encoded(config)
    (folder / "00.txt").write_text("a dog")
    os.utime(folder / "00.txt", (1, 1))
    images, family = encoded(config)
    assert family.read == ["a dog"]
    assert images.text.load(images.items[0])["hidden"].ravel().tolist() == [1, 3, 0]


def test_other_networks_are_noticed(config):
    encoded(config)
    assert counts(config, parts=make.parts(vae=2.0)) == (3, 0)
    assert counts(config, parts=make.parts(vae=2.0, encoder=2.0)) == (0, 3)


def test_other_text_options_are_noticed(folder):
    family = {"options": ("max_token_length",)}
    assert counts(make.config(folder.parent, **TEXT), make.Family(**family)) == (0, 3)
    assert counts(make.config(folder.parent, **TEXT), make.Family(**family)) == (0, 0)
    assert counts(make.config(folder.parent, max_token_length=150, **TEXT), make.Family(**family)) == (0, 3)


def test_torn_and_foreign_files_are_made_anew(folder, config):
    encoded(config)
    whole = (folder / "00_0064x0064_sdxl.npz").read_bytes()
    (folder / "00_0064x0064_sdxl.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "00_te_outputs.npz").write_bytes(b"")
    np.savez(folder / "01_0080x0064_sdxl.npz", other=np.zeros(3))
    np.savez(folder / "02_te_outputs.npz", hidden=np.array([{"a": "pickle"}], dtype=object), pool=np.zeros(1))
    os.utime(folder / "02_te_outputs.npz", (1, 1))
    assert counts(config) == (2, 2)


# ---- files of upstream


def upstream(folder, size=(8, 8), date=None, **extra):
    """Write latents of 00.png as sd-scripts does."""
    file = folder / "00_0064x0064_sdxl.npz"
    arrays = {
        "latents": np.full((4, *size), 7, np.float32),
        "original_size": [64, 64],
        "crop_ltrb": [0.0, 0.0, 64.0, 64.0],
    }
    np.savez(file, **{**arrays, **extra})
    if date is not None:
        os.utime(file, (date, date))
    return file


def test_latents_of_sd_scripts_are_read(folder, config):
    upstream(folder)
    images, family = encoded(config)
    assert len(family.seen) == 2 and (images.latents.load(images.items[0])["latents"] == 7).all()


@pytest.mark.parametrize(
    "stale", [{"size": (8, 16)}, {"date": 1}, {"crop_ltrb": [8.0, 0.0, 56.0, 64.0]}, {"original_size": [96, 64]}]
)
def test_stale_latents_of_sd_scripts_are_not(folder, config, stale):
    upstream(folder, **stale)
    assert counts(config)[0] == 3


def test_the_old_name_of_sdxl_latents_is_read_until_it_is_stale(folder, config):
    old = upstream(folder).rename(folder / "00.npz")
    images, family = encoded(config)
    assert len(family.seen) == 2 and (images.latents.load(images.items[0])["latents"] == 7).all()
    os.utime(old, (1, 1))
    images, _ = encoded(config)
    assert (images.latents.load(images.items[0])["latents"] != 7).all()


def test_text_of_sd_scripts_is_read_unless_the_caption_is_newer(folder):
    config = make.config(folder.parent, **TEXT)
    for name in ("00", "01"):
        np.savez(folder / f"{name}_te_outputs.npz", hidden=np.full((3, 1), 5, np.float16), pool=np.zeros(1, np.float32))
    os.utime(folder / "01_te_outputs.npz", (1, 1))
    images, family = encoded(config)
    assert family.read == [images.items[1].caption, images.items[2].caption]
    text_arrays = images.text.load(images.items[0])
    assert (text_arrays["hidden"] == 5).all() and text_arrays["hidden"].dtype == np.float32


def test_text_of_sd_scripts_of_unknown_length_is_made_anew(folder):
    np.savez(folder / "00_te_outputs.npz", hidden=np.zeros((3, 1)), pool=np.zeros(1))
    family = {"options": ("max_token_length",)}
    assert counts(make.config(folder.parent, max_token_length=150, **TEXT), make.Family(**family)) == (0, 3)


def test_a_switch_that_sd_scripts_wrote_must_fit(folder):
    config = make.config(folder.parent, "flux_train_network", cache_text_encoder_outputs_to_disk=True)
    arrays = {"hidden": np.zeros((3, 1)), "pool": np.zeros(1)}
    np.savez(folder / "00_te_outputs.npz", **arrays, apply_t5_attn_mask=False)
    np.savez(folder / "01_te_outputs.npz", **arrays, apply_t5_attn_mask=True)
    family = make.Family(options=("apply_t5_attn_mask",))
    assert counts(config, family) == (0, 2)
    with np.load(folder / "02_te_outputs.npz") as npz:
        assert not npz["apply_t5_attn_mask"]


def test_sd_scripts_can_read_ours(folder, config):
    """It loads with pickles off and looks up its keys by name; ours besides are ordinary arrays."""
    encoded(config)
    for file in folder.glob("*.npz"):
        with np.load(file, allow_pickle=False) as npz:
            assert all(npz[key].dtype.kind in "fiuUb" for key in npz.files)


# ---- several processes, sizes, captions


def test_processes_share_the_work_and_find_all_of_it(config):
    families = [make.Family(), make.Family()]
    images = [encoded(config, family, run=make.Run(rank, 2))[0] for rank, family in enumerate(families)]
    assert [len(family.seen) for family in families] == [2, 1]
    assert [len(family.read) for family in families] == [2, 1]
    for mine in images:
        assert all(mine.latents.load(image)["latents"].shape == (4, 8, 8) for image in mine.items)


@pytest.mark.parametrize("cache", [make.SDXL, make.FLUX, MUSUBI])
def test_one_image_at_two_resolutions(folder, cache, monkeypatch):
    """A file that holds both sizes is replaced while no part of it is mapped, which Windows would refuse."""
    write, maps = cache_files.write_cache_file, Path("/proc/self/maps")

    def write_unmapped(file, *content):
        assert not maps.exists() or file not in maps.read_text()
        write(file, *content)

    monkeypatch.setattr(cache_files, "write_cache_file", write_unmapped)
    dataset = "[[datasets]]\nresolution = {0}\n[[datasets.subsets]]\nimage_dir = '{1}'\n"
    file = folder.parent / "data.toml"
    file.write_text("".join(dataset.format(size, folder) for size in (64, 128)))
    config = make.config(None, dataset_config=str(file), **DISK)
    images, family = encoded(config, make.Family(cache))
    assert {images.latents.load(image)["latents"].shape[-1] for image in images.items} == {8, 16}
    assert len(family.seen) == 6 and counts(config, make.Family(cache)) == (0, 0)


def test_one_image_with_two_captions_cannot_be_on_disk(folder):
    dataset = "[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{0}'\ncaption_extension = '{1}'\n"
    file = folder.parent / "data.toml"
    file.write_text(dataset.format(folder, ".txt") + dataset.format(folder, ".no"))
    with pytest.raises(ConfigError, match="two captions"):
        encoded(make.config(None, dataset_config=str(file), **TEXT))
    memory = {"cache_text_encoder_outputs": True, "network_train_unet_only": True}
    images, family = encoded(make.config(None, dataset_config=str(file), **memory))
    assert len(family.read) == 4, "the empty caption is encoded once"
    assert images.text.load(images.items[-1])["hidden"].ravel().tolist() == [0, 0, 0]


def test_captions_that_are_encoded_once_are_those_of_a_training_without_a_cache(folder):
    (folder / "01.txt").write_text("a {red|blue} cat ||| toy;;;small")
    marks = {"keep_tokens_separator": "|||", "secondary_separator": ";;;", "enable_wildcard": True}
    config = make.config(folder.parent, **TEXT, **marks, caption_prefix="zorb, ")
    _, family = encoded(config)
    captions_read = sorted(family.read)
    assert captions_read[0] in ("zorb, a blue cat, toy,small", "zorb, a red cat, toy,small")
    assert captions_read[1:] == [f"zorb, cat number {i}, sitting, on a mat" for i in (0, 2)]
    assert counts(config) == (0, 0), "the variant is always the same"
    assert counts(make.config(folder.parent, **TEXT))[1] == 3


def test_text_of_sd_scripts_is_not_used_for_captions_that_it_does_not_change(folder):
    np.savez(folder / "00_te_outputs.npz", hidden=np.full((3, 1), 5, np.float16), pool=np.zeros(1, np.float32))
    _, family = encoded(make.config(folder.parent, **TEXT, caption_prefix="zorb"))
    assert len(family.read) == 3


def test_memory_holds_the_same_as_disk(folder, config):
    encoded_images, _ = encoded(config, make.Family(noise=0.1))
    memory = {"cache_latents": True, "cache_text_encoder_outputs": True, "network_train_unet_only": True}
    held, _ = encoded(make.config(folder.parent, vae_batch_size=3, **memory), make.Family(noise=0.1))
    for image in encoded_images.items:
        assert np.array_equal(encoded_images.latents.load(image)["latents"], held.latents.load(image)["latents"])
        assert np.array_equal(encoded_images.text.load(image)["hidden"], held.text.load(image)["hidden"])


def test_validation_images_are_encoded_too(folder):
    images, family = encoded(make.holding_back(make.config(folder.parent, seed=1, **DISK, **TEXT), 0.4))
    assert len(family.seen) == 3 and images.validation.latents.load(images.validation.items[0])


# ---- what goes wrong


def test_nan_names_the_image(folder, config):
    class Broken(make.Family):
        def latents(self, parts, pixels, generator=None):
            return super().latents(parts, pixels, generator) * float("nan")

    with pytest.raises(ConfigError, match=r"00\.png.*NaN"):
        encoded(config, Broken())
    assert not list(folder.glob("*_sdxl.npz"))


def test_an_unreadable_image_is_named(folder, config):
    images = data.scan(config)
    (folder / "01.png").write_bytes((folder / "01.png").read_bytes()[:60])
    with pytest.raises(ConfigError, match=r"01\.png"):
        encoding.encode_missing_caches(images, make.Family(), make.parts(), config, make.Run(), print)


def test_missing_networks_are_missed_only_when_needed(config):
    none = make.parts()
    none.vae, none.encoders = None, {}
    with pytest.raises(ConfigError, match="VAE"):
        encoded(config, parts=none)
    encoded(config)
    assert counts(config, parts=none) == (0, 0)


def test_a_full_disk_is_noticed_before_work(folder, config, monkeypatch):
    monkeypatch.setattr("library.files.free_space", lambda path: 100)
    with pytest.raises(ConfigError, match="space"):
        encoded(config)


def test_networks_end_up_on_the_host_and_progress_is_reported(config):
    run, parts = make.Run(), make.parts()
    encoded(config, parts=parts, run=run)
    assert parts.vae.weight.device.type == "cpu"
    assert ("caching latents", 3, 3) in run.told and ("caching captions", 3, 3) in run.told


KILLED = """
import sys, time
from pathlib import Path
from library import data
from library.data import encoding
from tests import fork_server
from tests.data import make
from tests.training import wait_for
config = make.config(Path(sys.argv[1]), cache_latents_to_disk=True)
images = data.scan(config)
Path(sys.argv[1], "go").touch()
encoding.encode_missing_caches(images, make.Family(), make.parts(), config, make.Run(), print)
"""


def test_kill_at_any_moment_leaves_no_torn_file(tmp_path):
    folder = make.folder(tmp_path, "1_cat", ((64, 64),) * 150, captions=False)
    config = make.config(tmp_path, **DISK)
    for wait in (0.0, 0.05, 0.15):
        process = fork_server.start(["-c", KILLED, str(tmp_path)])
        wait_for(lambda process=process: (tmp_path / "go").exists() or process.poll() is not None)
        time.sleep(wait)
        process.kill()
        assert "Traceback" not in process.communicate()[0]
        (tmp_path / "go").unlink()
        for file in folder.glob("[0-9]*.npz"):
            with np.load(file) as npz:
                assert npz["latents"].shape == (4, 8, 8) and json.loads(str(npz[caches.MADE_FROM]))
    done = len(list(folder.glob("[0-9]*.npz")))
    assert counts(config)[0] == 150 - done


class Ragged(make.Family):
    """A token for each word; captions are padded to the longest that is encoded with them."""

    def __init__(self):
        super().__init__()
        self.text_cache = TextCache("_te_outputs.npz", ("hidden", "own"), mask="own")

    def text(self, parts, captions, encoders=None):
        self.read += captions
        words = [caption.split() for caption in captions]
        longest = max(map(len, words))
        lengths = [[float(len(word)) for word in own] + [7.0] * (longest - len(own)) for own in words]
        mask = [[1] * len(own) + [0] * (longest - len(own)) for own in words]
        return {"hidden": torch.tensor(lengths)[:, :, None], "own": torch.tensor(mask)}


@pytest.mark.parametrize("disk", [True, False])
def test_captions_of_any_length_are_kept_without_padding(folder, disk):
    for number, caption in enumerate(("a", "a bbb cc", "dd ee")):
        (folder / f"{number:02}.txt").write_text(caption)
    values = {**TEXT, "caption_extension": ".txt", "cache_text_encoder_outputs": True}
    values |= {"cache_text_encoder_outputs_to_disk": disk, "train_batch_size": 3}
    images, family = encoded(make.config(folder.parent, **values), Ragged())
    arrays = [images.text.load(image) for image in images.items]
    assert [array["hidden"][:, 0].tolist() for array in arrays] == [[1.0], [1.0, 3.0, 2.0], [2.0, 2.0]]
    assert [array["own"].tolist() for array in arrays] == [[1], [1, 1, 1], [1, 1]]
    if disk:
        with np.load(folder / "01_te_outputs.npz") as npz:
            assert set(npz.files) == {"hidden", "made_from"} and npz["hidden"].shape == (3, 1)
        again = Ragged()
        encoded(make.config(folder.parent, **values), again)
        assert len(family.read) == 3 and not again.read
    batch = padded(arrays)
    assert batch["own"].tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 0]] and batch["hidden"][0, 1:].sum() == 0
    assert with_text_length(batch["own"], 5).tolist()[2] == [1, 1, 0, 0, 0] and with_text_length(
        batch["own"], 2
    ).shape == (3, 2)


@pytest.mark.parametrize("cache", [make.SDXL, make.FLUX, MUSUBI], ids=["sdxl", "flux", "musubi"])
def test_masks_are_small_on_the_disk_and_counted_before_anything_is_written(tmp_path, monkeypatch, cache):
    path, size = tmp_path / "1_cat" / "a.png", (512, 512)
    picture = Image.new("RGB", size, (200, 10, 10)).convert("RGBA")
    picture.putalpha(Image.linear_gradient("L").resize(size))
    path.parent.mkdir()
    picture.save(path)
    values = {"resolution": "512", "max_bucket_reso": 512}
    asked = []
    monkeypatch.setattr(encoding, "need_space", lambda file, num_bytes: asked.append(num_bytes))
    loaded = []
    for options in ({"alpha_mask": True, **DISK}, {"alpha_mask": True, "cache_latents": True}, {"alpha_mask": True}):
        config = make.config(tmp_path, **values, **options)
        images, _ = encoded(config, make.Family(cache))
        loaded.append(Batches(images, config, 0).make(Draw(1, 0, (0,))).mask)
    assert all(torch.equal(loaded[0], other) for other in loaded[1:]) and 0 < loaded[0].mean() < 1
    (file,) = (entry for entry in path.parent.iterdir() if entry.suffix in (".npz", ".safetensors"))
    latents = 4 * 4 * 64 * 64
    mask = file.stat().st_size - latents
    assert mask < (512 * 512 / 8 if file.suffix == ".npz" else 512 * 512 * 1.1)
    assert asked[0] >= 4 * 16 * 64 * 64 + 512 * 512
    if file.suffix == ".npz":  # as sd-scripts reads it
        with np.load(file) as npz:
            (name,) = (name for name in npz.files if name.startswith("alpha_mask"))
            assert npz[name].dtype == np.float32 and 0 <= npz[name].min() < npz[name].max() == 1
