"""The toy's networks with random weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from library.families.toy.family import PREFIXES, SCALE
from library.families.toy.model import ToyDenoiser
from safetensors.torch import save_file
from torch import nn

from library.config.run_config import RunConfig
from library.families.shared import clip, random_networks, random_tokenizers
from library.families.shared.random_networks import CLIP_WORDS, DemoTables, InputShapes, RandomNetworks
from library.files import write_atomic


@dataclass(frozen=True)
class ToySizes:
    """Widths and depths."""

    width: int = 64
    blocks: int = 3
    resolutions: tuple[int, ...] = (64, 128)


TINY = ToySizes()
FULL = ToySizes(width=128, blocks=6)


def model_sizes(_config: RunConfig, full: bool) -> ToySizes:
    return FULL if full else TINY


def make_networks(sizes: ToySizes = TINY, words: int = CLIP_WORDS) -> RandomNetworks:
    """The networks of these sizes."""
    return RandomNetworks(
        lambda: random_networks.build_on_meta(lambda: ToyDenoiser(sizes.width, sizes.blocks)),
        {"clip_l": lambda: random_networks.clip_encoder(64, 2, words)},
        lambda: random_networks.random_autoencoder((32, 32, 32, 32), 4, SCALE, quant_convs=True),
        sizes.resolutions,
    )


def input_shapes(family: Any, denoiser: nn.Module) -> InputShapes:
    return InputShapes(4, {"words": (77, 64)})


def write_random_model(folder: Path, seed: int = 0) -> dict[str, Path]:
    """Write a tiny checkpoint, and its tokenizer beside it."""
    builders = make_networks(TINY, random_tokenizers.clip_tokenizer(folder / "tokenizer"))
    networks = {"denoiser": builders.denoiser(), "vae": builders.vae(), "clip_l": builders.encoders["clip_l"]()}
    tensors = {}
    for i, (part, network) in enumerate(networks.items()):
        state = clip.clip_tensors(network) if part == "clip_l" else network.state_dict()
        shapes = [(name, tuple(tensor.shape)) for name, tensor in state.items()]
        weights = random_networks.random_weights(shapes, seed * 10 + i, torch.float32)
        tensors |= {PREFIXES[part] + name: tensor for name, tensor in weights.items()}
    path = write_atomic(folder / "toy.safetensors", lambda file: save_file(tensors, file, {"format": "pt"}))
    return {"toy": path, "tokenizer": folder / "tokenizer"}


def demo_tables(models: Mapping[str, Path]) -> DemoTables:
    return {"model": [("pretrained_model_name_or_path", str(models["toy"]), "")]}


def convert_for_diffusers(tensors: dict[str, Any], config: Any) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    raise ValueError("diffusers has no such model")
