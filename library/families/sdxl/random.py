"""SDXL's networks with random weights: full-size, or tiny ones in the real file formats, for tests and demo."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.facts import SmallModel
from library.families.sdxl import keys, model
from library.families.sdxl.family import SdxlFamily
from library.families.shared import clip, random_networks, random_tokenizers, random_unets
from library.families.shared.diffusers_layers import LayerSizes
from library.families.shared.random_networks import CLIP_WORDS, DemoTables, InputShapes, RandomNetworks
from library.families.shared.unet import SIZE_CHANNELS
from library.families.shared.unet_names import Layout


@dataclass(frozen=True)
class SdxlSizes:
    """Widths and depths. Widths are multiples of 32 (the norms' groups), the encoders' of 64 (heads)."""

    unet: tuple[int, ...] = (32, 64, 64)
    depth: tuple[int, ...] = (0, 1, 2)
    vae: tuple[int, ...] = (32, 32, 32, 32)
    clip_l: int = 64
    clip_g: int = 128
    clip_l_layers: int = 2
    clip_g_layers: int = 2
    resolutions: tuple[int, ...] = (64, 128)


TINY = SdxlSizes()
FULL = SdxlSizes(
    unet=(320, 640, 1280),
    depth=(0, 2, 10),
    vae=(128, 256, 512, 512),
    clip_l=768,
    clip_g=1280,
    clip_l_layers=12,
    clip_g_layers=32,
    resolutions=(512, 1024, 2048),
)


def make_networks(sizes: SdxlSizes = TINY, words: int = CLIP_WORDS) -> RandomNetworks:
    """Return the networks of these sizes, for tokenizers with these numbers of tokens."""
    return RandomNetworks(
        lambda: _unet(sizes),
        {
            "clip_l": lambda: random_networks.clip_encoder(sizes.clip_l, sizes.clip_l_layers, words),
            "clip_g": lambda: random_networks.clip_encoder(sizes.clip_g, sizes.clip_g_layers, words, "gelu", True),
        },
        lambda: random_networks.random_autoencoder(sizes.vae, 4, model.CHECKPOINTS.scale, quant_convs=True),
        sizes.resolutions,
    )


def _unet(sizes: SdxlSizes) -> nn.Module:
    others = {
        "cross_attention_dim": sizes.clip_l + sizes.clip_g,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": SIZE_CHANNELS,
        "projection_class_embeddings_input_dim": sizes.clip_g + 6 * SIZE_CHANNELS,
    }
    return random_unets.random_unet(sizes.unet, sizes.depth, None, others)


def adopt_denoiser(family: SdxlFamily, denoiser: nn.Module) -> None:
    family.layout = Layout.of({name: tuple(p.shape) for name, p in denoiser.named_parameters()})


def input_shapes(_: Any, denoiser: Any) -> InputShapes:
    """Return this denoiser's inputs for one image."""
    wide = denoiser.config.cross_attention_dim
    pooled = denoiser.add_embedding.linear_1.in_features - 6 * SIZE_CHANNELS
    first = 768 if wide == 2048 else wide // 3
    states = {"hidden_state1": (clip.LENGTH, first), "hidden_state2": (clip.LENGTH, wide - first)}
    return InputShapes(4, {**states, "pool2": (pooled,)})


def write_random_model(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.float16, sizes: SdxlSizes = TINY
) -> Path:
    """Write `tiny_sdxl.safetensors` (the LDM layout) and its two tokenizers into a folder; returns the file's path."""
    parts = network_tensors(folder, seed, dtype, sizes)
    others = {keys.LOGIT_SCALE: torch.tensor(keys.FULL_LOGIT_SCALE, dtype=dtype)}
    path = folder / "tiny_sdxl.safetensors"
    return random_unets.write_single_file(path, model.CHECKPOINTS, parts, others, "tiny SDXL")


def network_tensors(folder: Path, seed: int, dtype: torch.dtype, sizes: SdxlSizes) -> random_unets.Parts:
    """Return random tensors of every part by diffusers name, and write tokenizers whose vocabularies fit them."""
    folder.mkdir(parents=True, exist_ok=True)
    words = random_tokenizers.clip_tokenizer(folder / "tokenizer")
    random_tokenizers.clip_tokenizer(folder / "tokenizer_2", pad="!")
    # Other programs expect CLIP's vocabulary in a model of full size.
    return random_unets.random_tensors(make_networks(sizes, CLIP_WORDS if sizes == FULL else words), seed, dtype)


def demo_tables(models: Mapping[str, Path]) -> DemoTables:
    """Return the tables of a demo TOML for a model with random weights."""
    return {
        "model": [("pretrained_model_name_or_path", str(models["sdxl"]), "real: sd_xl_base_1.0.safetensors")],
        "compile": [random_unets.COMPILE_BLOCKS_LINE],
    }


SMALL_MODEL = SmallModel(
    files={"sdxl": "sdxl.safetensors"},
    tables=lambda models: demo_tables(models) | {"sample": [("sample_sampler", "euler", "")]},
    prompt="--w 128 --h 128 --s 20 --l 4",
    rank=16,
    alpha=8.0,
    rates={"lora": 3e-3, "finetune": 2e-4},
    steps=500,
)


def convert_for_diffusers(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, LayerSizes]:
    return random_unets.convert_unet_lora(tensors, config, "StableDiffusionXLLoraLoaderMixin")
