"""FLUX.2's networks with random weights: full-size, or tiny ones in the real file formats, for tests and demo."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.flux_2 import text_encoder
from library.families.flux_2.family import Flux2Family
from library.families.flux_2.keys import TREES
from library.families.flux_2.model import Flux2, Flux2Shape
from library.families.shared import diffusers_layers, language_model, random_networks, random_tokenizers, statistics_vae
from library.families.shared.diffusers_layers import LayerSizes
from library.families.shared.random_networks import DemoTables, InputShapes, RandomNetworks, prefixed
from library.families.shared.random_sizes import QWEN3_4B, LanguageModelSizes

WORDS, DEV_WORDS = 151936, 131072  # sizes of the published vocabularies, with spare rows


@dataclass(frozen=True)
class Flux2Sizes(LanguageModelSizes):
    """Widths and depths. The width of the denoiser is a multiple of its heads, that of a head of 8."""

    hidden: int = 64
    head: int = 32
    double_blocks: int = 2
    single_blocks: int = 4
    guidance: bool = False  # dev
    text_layers: int = 4
    vae_widths: tuple[int, ...] = (32, 32, 32, 32)
    channels: int = 32
    resolutions: tuple[int, ...] = (64, 128)


TINY = Flux2Sizes()
FULL = Flux2Sizes(
    hidden=3072,
    head=128,
    double_blocks=5,
    single_blocks=20,
    **QWEN3_4B,
    vae_widths=(128, 256, 512, 512),
    resolutions=(512, 1024),
)
LARGE = replace(FULL, hidden=4096, double_blocks=8, single_blocks=24, text=4096, text_mlp=12288)
DEV = replace(
    FULL, hidden=6144, double_blocks=8, single_blocks=48, guidance=True, text=5120, text_layers=40, text_mlp=32768
)
FULL_VERSIONS = {"klein-base-9b": LARGE, "klein-9b": LARGE, "dev": DEV}


def model_sizes(config: Any, full: bool) -> Flux2Sizes:
    """Return the sizes of the model that a config names."""
    if full:
        return FULL_VERSIONS.get(config.model.model_version, FULL)
    return replace(TINY, guidance=config.model.model_version == "dev")


def flux_2_shape(sizes: Flux2Sizes) -> Flux2Shape:
    """Return the denoiser's sizes."""
    return Flux2Shape(
        in_channels=4 * sizes.channels,
        text_channels=text_encoder.TAPS * sizes.text,
        hidden=sizes.hidden,
        head=sizes.head,
        mlp=3 * sizes.hidden,
        double_blocks=sizes.double_blocks,
        single_blocks=sizes.single_blocks,
        guidance=sizes.guidance,
    )


def make_networks(sizes: Flux2Sizes = TINY, words: int = 0, whole: bool = False) -> RandomNetworks:
    """Return the networks of these sizes, for a tokenizer with `words` tokens, by default the published one. The text
    encoder is `whole`, or lacks its unused layers.
    """
    skipped = 0 if whole else text_encoder.skipped(sizes.text_layers)
    empty_encoder = language_model.empty_mistral if sizes.guidance else language_model.empty_qwen3
    words = words or (DEV_WORDS if sizes.guidance else WORDS)
    return RandomNetworks(
        lambda: random_networks.build_on_meta(lambda: Flux2(flux_2_shape(sizes))),
        {"text_encoder": lambda: empty_encoder(skipped, **sizes.text_settings(words))},
        lambda: statistics_vae.empty_statistics_vae(sizes.vae_widths, sizes.channels),
        sizes.resolutions,
    )


def adopt_denoiser(family: Flux2Family, denoiser: Flux2) -> None:
    family.sizes = denoiser.sizes


def input_shapes(family: Flux2Family, denoiser: Flux2) -> InputShapes:
    sizes = denoiser.sizes
    return InputShapes(sizes.in_channels // 4, {"ctx_vec": (text_encoder.LENGTH, sizes.text_channels)})


def write_random_model(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, sizes: Flux2Sizes = TINY
) -> dict[str, Path]:
    """Write the three files of a tiny model, in the original's layouts, and its tokenizer into a folder.

    Returns paths by part: flux_2, text_encoder, vae (all .safetensors) and tokenizer (a folder).
    """
    places = {"tokenizer": folder / "tokenizer"}
    make_tokenizer = random_tokenizers.mistral_tokenizer if sizes.guidance else random_tokenizers.qwen_tokenizer
    words = make_tokenizer(places["tokenizer"])
    # Mistral is recognised by its published vocabulary size.
    networks = make_networks(sizes, 0 if sizes.guidance or sizes in (FULL, LARGE) else words, whole=True)
    text = networks.encoders["text_encoder"]().state_dict()
    parts = {
        "flux_2": ("flux-2-tiny", networks.denoiser().state_dict(), prefixed("")),
        "text_encoder": ("mistral_3_tiny" if sizes.guidance else "qwen_3_tiny", text, prefixed("model.")),
        "vae": ("flux2-vae", *statistics_vae.random_statistics_vae(networks.vae(), sizes.channels)),
    }
    return places | random_networks.write_files(folder, parts, seed, dtype)


def demo_tables(models: Mapping[str, Path]) -> DemoTables:
    """Return the tables of a demo TOML for this model; `models` are the files written by `write_random_model`."""
    return {
        "model": [
            ("pretrained_model_name_or_path", str(models["flux_2"]), "real: flux-2-klein-base-4b.safetensors"),
            ("text_encoder", str(models["text_encoder"]), "real: qwen_3_4b.safetensors"),
            ("vae", str(models["vae"]), "real: flux2-vae.safetensors"),
            ("model_version", "klein-base-4b", ""),
        ],
        "noise": [("timestep_sampling", "flux2_shift", "")],
    }


def convert_for_diffusers(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, LayerSizes]:
    """Return a LoRA file's adapters by diffusers' names, and the layer sizes of diffusers' model."""
    shapes = diffusers_layers.stored_shapes(config)
    assert not TREES.is_diffusers(shapes)  # write_random_model writes the original layout
    return diffusers_layers.convert_with_mixin(
        tensors, "Flux2Transformer2DModel", "Flux2LoraLoaderMixin", **diffusers_settings(Flux2Shape.of(shapes))
    )


def diffusers_settings(sizes: Flux2Shape) -> dict[str, Any]:
    """Return the arguments of diffusers' class for these sizes."""
    return {
        "in_channels": sizes.in_channels,
        "num_layers": sizes.double_blocks,
        "num_single_layers": sizes.single_blocks,
        "attention_head_dim": sizes.head,
        "num_attention_heads": sizes.hidden // sizes.head,
        "joint_attention_dim": sizes.text_channels,
        "axes_dims_rope": sizes.axes,
        "mlp_ratio": sizes.mlp / sizes.hidden,
        "guidance_embeds": sizes.guidance,
    }
