"""FLUX 3's networks with random weights: full-size, or tiny ones in the real file formats, for tests and demo."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.flux_3 import text_encoder
from library.families.flux_3.family import Flux3Family
from library.families.flux_3.keys import canonical_flux_3_path
from library.families.flux_3.model import Flux3, Flux3Shape
from library.families.shared import diffusers_layers, qwen3_vl, random_networks, random_tokenizers, statistics_vae
from library.families.shared.diffusers_layers import LayerSizes
from library.families.shared.lora_names import matrices
from library.families.shared.random_networks import DemoTables, InputShapes, RandomNetworks, prefixed
from library.families.shared.random_sizes import QWEN3_4B, LanguageModelSizes

PUBLISHED_WORDS = 151936  # size of the published vocabulary, with spare rows
VISION = 64  # width of the only tensor of a vision encoder in the tiny file


@dataclass(frozen=True)
class Flux3Sizes(LanguageModelSizes):
    """Widths and depths. The width of the denoiser is a multiple of its heads, that of a head of 8."""

    hidden: int = 64
    head: int = 32
    mode_blocks: int = 1  # of each kind of tokens
    joint_blocks: int = 4
    distilled: bool = False
    text: int = 40
    text_layers: int = 9
    vae_widths: tuple[int, ...] = (32, 32, 32, 32)
    channels: int = 32
    resolutions: tuple[int, ...] = (64, 128)


TINY = Flux3Sizes()
FULL = Flux3Sizes(
    hidden=3072,
    head=128,
    mode_blocks=5,
    joint_blocks=28,
    **QWEN3_4B,
    vae_widths=(128, 256, 512, 512),
    resolutions=(512, 1024),
)


def flux_3_shape(sizes: Flux3Sizes) -> Flux3Shape:
    """Return the denoiser's sizes."""
    return Flux3Shape(
        in_channels=4 * sizes.channels,
        text_channels=text_encoder.TAPS * sizes.text,
        hidden=sizes.hidden,
        head=sizes.head,
        mlp=3 * sizes.hidden,
        mode_blocks=sizes.mode_blocks,
        joint_blocks=sizes.joint_blocks,
        distilled=sizes.distilled,
    )


def make_networks(sizes: Flux3Sizes = TINY, words: int = PUBLISHED_WORDS, whole: bool = False) -> RandomNetworks:
    """Return the networks of these sizes, for a tokenizer with `words` tokens; with `whole`, also the last layers of
    the text encoder, which files have and nothing reads.
    """
    skipped = 0 if whole else text_encoder.unread_layers(sizes.text_layers)
    return RandomNetworks(
        lambda: random_networks.build_on_meta(lambda: Flux3(flux_3_shape(sizes))),
        {"text_encoder": lambda: qwen3_vl.empty_qwen3_vl(skipped, **sizes.text_settings(words))},
        lambda: statistics_vae.empty_statistics_vae(sizes.vae_widths, sizes.channels),
        sizes.resolutions,
    )


def adopt_denoiser(family: Flux3Family, denoiser: Flux3) -> None:
    family.is_distilled = denoiser.sizes.distilled


def input_shapes(family: Flux3Family, denoiser: Flux3) -> InputShapes:
    """Return this denoiser's inputs for one image with a caption of usual length."""
    length, sizes = 2 * text_encoder.WINDOW, denoiser.sizes
    return InputShapes(sizes.in_channels // 4, {"ctx_vec": (length, sizes.text_channels), "ctx_mask": (length,)})


def write_random_model(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, sizes: Flux3Sizes = TINY
) -> dict[str, Path]:
    """Write the three files of a tiny model, in the original's layouts, and its tokenizer into a folder.

    Returns paths by part: flux_3, text_encoder, vae (all .safetensors) and tokenizer (a folder).
    """
    places = {"tokenizer": folder / "tokenizer"}
    words = random_tokenizers.qwen_tokenizer(places["tokenizer"])
    words = PUBLISHED_WORDS if replace(sizes, distilled=False) == FULL else words
    networks = make_networks(sizes, words, whole=True)
    text = {f"model.{name}": tensor for name, tensor in networks.encoders["text_encoder"]().state_dict().items()}
    parts = {
        "flux_3": ("flux3_tiny", networks.denoiser().state_dict(), prefixed("")),
        "text_encoder": (
            "qwen3vl_tiny",
            text | {qwen3_vl.VISION_MARK: torch.empty(VISION, device="meta")},
            prefixed(""),
        ),
        "vae": ("flux2-vae", *statistics_vae.random_statistics_vae(networks.vae(), sizes.channels)),
    }
    return places | random_networks.write_files(folder, parts, seed, dtype)


def demo_tables(models: Mapping[str, Path]) -> DemoTables:
    """Return the tables of a demo TOML for this model; `models` are the files written by `write_random_model`."""
    return {
        "model": [
            ("pretrained_model_name_or_path", str(models["flux_3"]), "real: flux3_image_klein_base_bf16.safetensors"),
            ("text_encoder", str(models["text_encoder"]), "real: qwen3vl_4b_bf16.safetensors"),
            ("vae", str(models["vae"]), "real: flux2-vae.safetensors"),
        ],
        "noise": [("timestep_sampling", "shift", ""), ("discrete_flow_shift", 3.0, "")],
    }


def diffusers_settings(sizes: Flux3Shape) -> dict[str, Any]:
    """Return the arguments of diffusers' transformer of these sizes."""
    return {
        "in_channels": sizes.in_channels,
        "cond_in_channels": sizes.in_channels,
        "num_layers": sizes.mode_blocks,
        "num_single_layers": sizes.joint_blocks,
        "attention_head_dim": sizes.head,
        "num_attention_heads": sizes.hidden // sizes.head,
        "joint_attention_dim": sizes.text_channels,
        "mlp_ratio": sizes.mlp / sizes.hidden,
        "axes_dims_rope": sizes.axes,
        "flow_map": sizes.distilled,
    }


def convert_for_diffusers(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, LayerSizes]:
    """Return a LoRA file's adapters by diffusers' names, and the layer sizes of diffusers' model.

    diffusers requires dotted model paths, which `kohya tools convert --to comfy` writes.
    """
    stored = diffusers_layers.stored_shapes(config)
    named = diffusers_layers.with_dotted_paths(tensors, matrices(stored, ""))
    sizes = Flux3Shape.of({canonical_flux_3_path(name): shape for name, shape in stored.items()})
    return diffusers_layers.convert_with_mixin(
        named, "Flux3Transformer2DModel", "Flux3LoraLoaderMixin", **diffusers_settings(sizes)
    )
