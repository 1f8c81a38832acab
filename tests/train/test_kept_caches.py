"""Caches on disk that fit are used as they are: nothing is encoded twice, and no file of sd-scripts is written over."""

import numpy as np
import pytest

from tests.training import LORA_OF_EACH_KIND, config_of, pictures, train, untouched

DISK = {
    "cache_latents": True,
    "cache_latents_to_disk": True,
    "cache_text_encoder_outputs": True,
    "cache_text_encoder_outputs_to_disk": True,
    "max_train_steps": 1,
}
LENGTH = {"flux_train_network": "t5xxl_max_token_length", "sdxl_train_network": "max_token_length"}


@pytest.fixture
def cached(demo, tmp_path):
    """A function that trains a step on four pictures of its own, with caches beside them."""
    folder = pictures(tmp_path / "pictures")
    return folder, lambda script, number, **more: train(
        config_of(demo, script, train_data_dir=folder, output_dir=tmp_path / str(number), **DISK, **more)
    )


def as_upstream(folder):
    """The caches without what only this trainer writes."""
    for file in folder.rglob("*.npz"):
        with np.load(file) as npz:
            arrays = {name: npz[name] for name in npz.files if not name.startswith("made_from")}
        np.savez(file, **arrays)


@pytest.mark.parametrize("script", LORA_OF_EACH_KIND)
def test_another_precision_encodes_nothing_anew(cached, script):
    folder, once = cached
    once(script, 0, mixed_precision="bf16")
    with untouched(folder):
        once(script, 1, mixed_precision="no")


@pytest.mark.parametrize(("script", "length"), [("flux_train_network", 48), ("sdxl_train_network", 150)])
def test_text_of_sd_scripts_is_used_where_its_length_is_that_of_the_option(cached, script, length):
    folder, once = cached
    once(script, 0, **{LENGTH[script]: length})
    as_upstream(folder)
    with untouched(folder):
        once(script, 1, **{LENGTH[script]: length})
    other = {"flux_train_network": 64, "sdxl_train_network": 225}[script]
    once(script, 2, **{LENGTH[script]: other})
    with untouched(folder):
        once(script, 3, **{LENGTH[script]: other})


def test_a_length_that_is_written_out_is_the_one_that_is_meant_without_it(cached):
    folder, once = cached
    once("flux_train_network", 0, t5xxl_max_token_length=None)
    with untouched(folder):
        once("flux_train_network", 1, t5xxl_max_token_length=512)


def test_text_of_sd_scripts_with_another_mask_is_made_anew(cached):
    folder, once = cached
    once("flux_train_network", 0, t5xxl_max_token_length=48)
    as_upstream(folder)
    once("flux_train_network", 1, t5xxl_max_token_length=48, apply_t5_attn_mask=True)
    for file in folder.rglob("*_flux_te.npz"):
        with np.load(file) as npz:
            assert npz["apply_t5_attn_mask"]
