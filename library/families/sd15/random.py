"""SD 1.5's networks with random weights: full-size, or tiny ones in the real file formats, for tests and demo."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.sd15 import model
from library.families.sd15.family import Sd15Family
from library.families.shared import clip, random_networks, random_tokenizers, random_unets
from library.families.shared.diffusers_layers import LayerSizes
from library.families.shared.random_networks import CLIP_WORDS, DemoTables, InputShapes, RandomNetworks
from library.families.shared.unet_names import Layout


@dataclass(frozen=True)
class Sd15Sizes:
    """Widths and depths. Widths are multiples of 32 (the norms' groups), the encoder's of 64 (heads)."""

    unet: tuple[int, ...] = (32, 32, 64, 64)
    depth: tuple[int, ...] = (1, 1, 1, 0)
    vae: tuple[int, ...] = (32, 32, 32, 32)
    text: int = 64
    text_layers: int = 3
    resolutions: tuple[int, ...] = (64, 128)


TINY = Sd15Sizes()
FULL = Sd15Sizes(
    unet=(320, 640, 1280, 1280),
    vae=(128, 256, 512, 512),
    text=768,
    text_layers=12,
    resolutions=(512, 768),
)


def make_networks(sizes: Sd15Sizes = TINY, words: int = CLIP_WORDS) -> RandomNetworks:
    """Return the networks of these sizes, for a tokenizer with this number of tokens."""
    return RandomNetworks(
        lambda: _unet(sizes),
        {"clip_l": lambda: random_networks.clip_encoder(sizes.text, sizes.text_layers, words)},
        lambda: random_networks.random_autoencoder(sizes.vae, 4, model.CHECKPOINTS.scale, quant_convs=True),
        sizes.resolutions,
    )


def _unet(sizes: Sd15Sizes) -> nn.Module:
    return random_unets.random_unet(sizes.unet, sizes.depth, model.HEADS, {"cross_attention_dim": sizes.text})


def adopt_denoiser(family: Sd15Family, denoiser: nn.Module) -> None:
    family.layout = Layout.of({name: tuple(p.shape) for name, p in denoiser.named_parameters()})


def input_shapes(_: Any, denoiser: Any) -> InputShapes:
    """Return this denoiser's inputs for one image."""
    return InputShapes(4, {"hidden_state": (clip.LENGTH, denoiser.config.cross_attention_dim)})


def write_random_model(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.float16, sizes: Sd15Sizes = TINY
) -> Path:
    """Write `tiny_sd15.safetensors` (the LDM layout) and its tokenizer into a folder; returns the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    words = random_tokenizers.clip_tokenizer(folder / "tokenizer")
    # Other programs expect CLIP's vocabulary in a model of full size.
    networks = make_networks(sizes, CLIP_WORDS if sizes == FULL else words)
    parts = random_unets.random_tensors(networks, seed, dtype)
    path = folder / "tiny_sd15.safetensors"
    return random_unets.write_single_file(path, model.CHECKPOINTS, parts, {}, "tiny SD 1.5")


def demo_tables(models: Mapping[str, Path]) -> DemoTables:
    """Return the tables of a demo TOML for a model with random weights."""
    return {
        "model": [("pretrained_model_name_or_path", str(models["sd15"]), "real: v1-5-pruned-emaonly.safetensors")],
        "compile": [random_unets.COMPILE_BLOCKS_LINE],
    }


def convert_for_diffusers(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, LayerSizes]:
    return random_unets.convert_unet_lora(tensors, config, "StableDiffusionLoraLoaderMixin")
