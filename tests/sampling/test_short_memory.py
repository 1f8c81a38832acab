"""Every family encodes and draws in tiles where the whole image does not fit, with the same latents and pixels."""

import logging

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from PIL import Image

from library import families
from library.families.qwen_image_21.vae import Qwen21VAE
from library.families.shared import vae_memory, vae_tiles
from library.families.shared.qwen_vae import ImageVAE
from library.sampling import generate
from library.sampling.plan import Column
from library.sampling.prompts import Prompt
from tests.sampling.test_sampling import given, quiet  # noqa: F401
from tests.training import shallow  # noqa: F401

SCRIPTS = [families.lora_script(name) for name in families.FAMILIES]
CATS = [Prompt(f"{colour} cat", width=64, height=128, seed=3, sample_steps=1) for colour in ("a black", "a white")]


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def short(monkeypatch):
    """Return a function after which no VAE works on a whole image, and tiles have few rows."""
    vae_memory._did_not_fit.clear()

    def make():
        for vae in (AutoencoderKL, AutoencoderKLFlux2, ImageVAE, Qwen21VAE):
            monkeypatch.setattr(vae, "encode", out_of_memory)
            monkeypatch.setattr(vae, "decode", out_of_memory)
        monkeypatch.setattr(vae_memory, "SMALL", 0)
        monkeypatch.setattr(vae_tiles, "TILE_VALUES", 1)

    return make


@pytest.mark.parametrize("script", SCRIPTS)
def test_tiles_encode_the_same_latents(given, script, short):  # noqa: F811
    family = families.family_for(given(script))
    parts = family.load(torch.float32, torch.float32)
    pixels = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    pixels[:, :, 32:] = 0.5

    def latents():
        return family.latents(parts, pixels, [torch.Generator().manual_seed(number) for number in range(2)])

    whole = latents()
    short()
    assert torch.allclose(latents(), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("script", SCRIPTS)
def test_tiles_show_the_same_images_and_the_log_says_so_once(given, script, short, tmp_path, caplog):  # noqa: F811
    caplog.set_level(logging.WARNING, logger=generate.__name__)

    def drawn(name):
        sheet = generate.generate(given(script), [Column("base", ())], CATS, tmp_path / name, quiet)
        return np.stack([np.asarray(Image.open(file)).astype(int) for row in sheet.files for file in row])

    whole = drawn("whole")
    assert whole.std() > 1 and not [record for record in caplog.records if record.name == generate.__name__]
    short()
    assert np.abs(drawn("tiled") - whole).max() <= 1
    (line,) = [record.getMessage() for record in caplog.records if record.name == generate.__name__]
    assert line == "memory is too short to decode an image at once, so images are decoded in tiles"
