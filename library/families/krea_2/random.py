"""Krea 2's networks with random weights: full-size, or tiny ones in the real file formats, for tests and demo."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.krea_2.checkpoint import TEXT
from library.families.krea_2.family import Krea2Family
from library.families.krea_2.keys import canonical_krea_2_path
from library.families.krea_2.model import Krea2, Krea2Shape, Krea2Stack
from library.families.shared import diffusers_layers, qwen3_vl, random_networks, random_tokenizers
from library.families.shared.diffusers_layers import LayerSizes
from library.families.shared.lora_names import matrices
from library.families.shared.random_networks import DemoTables, InputShapes, RandomNetworks, Tensors
from library.families.shared.random_sizes import FULL_QWEN_VAE, QWEN3_4B, LanguageModelSizes, QwenVaeSizes

QWEN3_VL_WORDS = 151936  # size of the published vocabulary, with spare rows
VISION = 64  # width of the only tensor of a vision encoder in the tiny file


@dataclass(frozen=True)
class Krea2Sizes(LanguageModelSizes, QwenVaeSizes):
    """Widths and depths. The width of the denoiser is a multiple of its heads, that of a head of 16."""

    hidden: int = 64
    head: int = 16
    groups: int = 2  # heads of keys and values
    mlp: int = 128
    blocks: int = 3
    fusion_blocks: int = 1  # of each kind
    fusion_head: int = 16
    fusion_mlp: int = 96
    text_layers: int = 6
    resolutions: tuple[int, ...] = (64, 128)


TINY = Krea2Sizes()
FULL = Krea2Sizes(
    hidden=6144,
    head=128,
    groups=12,
    mlp=16384,
    blocks=28,
    fusion_blocks=2,
    fusion_head=128,
    fusion_mlp=6912,
    **QWEN3_4B,
    resolutions=(512, 1024),
    **FULL_QWEN_VAE,
)


def krea_2_shape(sizes: Krea2Sizes) -> Krea2Shape:
    """Return the denoiser's sizes."""
    return Krea2Shape(
        in_channels=4 * sizes.channels,
        text_layers=len(TEXT.taps(sizes.text_layers)),
        image=Krea2Stack(sizes.hidden, sizes.head, sizes.groups * sizes.head, sizes.mlp),
        text=Krea2Stack(sizes.text, sizes.fusion_head, sizes.text, sizes.fusion_mlp),
        blocks=sizes.blocks,
        layerwise=sizes.fusion_blocks,
        refiners=sizes.fusion_blocks,
    )


def make_networks(sizes: Krea2Sizes = TINY, words: int = QWEN3_VL_WORDS, whole: bool = False) -> RandomNetworks:
    """Return the networks of these sizes, for a tokenizer with `words` tokens; with `whole`, also the last layers of
    the text encoder, which files have and nothing reads.
    """
    skipped = 0 if whole else TEXT.skipped(sizes.text_layers)
    return RandomNetworks(
        lambda: random_networks.build_on_meta(lambda: Krea2(krea_2_shape(sizes))),
        {"text_encoder": lambda: qwen3_vl.empty_qwen3_vl(skipped, **sizes.text_settings(words))},
        sizes.empty_vae,
        sizes.resolutions,
    )


def input_shapes(family: Krea2Family, denoiser: Krea2) -> InputShapes:
    """Return this denoiser's inputs for one image with a caption of usual length."""
    length, sizes = 2 * TEXT.multiple, denoiser.sizes
    text = {"krea2_vl_embed": (length, sizes.text_layers, sizes.text.hidden), "krea2_vl_mask": (length,)}
    return InputShapes(sizes.in_channels // 4, text)


def write_random_model(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, sizes: Krea2Sizes = TINY
) -> dict[str, Path]:
    """Write the three files of a tiny model, in ComfyUI's layouts, and its tokenizer into a folder.

    Returns paths by part: krea_2, text_encoder, vae (all .safetensors) and tokenizer (a folder).
    """
    places = {"tokenizer": folder / "tokenizer"}
    words = random_tokenizers.qwen_tokenizer(places["tokenizer"])
    networks = make_networks(sizes, QWEN3_VL_WORDS if sizes == FULL else words, whole=True)
    text = networks.encoders["text_encoder"]().state_dict() | {qwen3_vl.VISION_MARK: torch.empty(VISION, device="meta")}
    parts = {
        "krea_2": ("krea2_tiny", networks.denoiser().state_dict(), _centred),
        "text_encoder": (
            "qwen3vl_tiny",
            text,
            lambda tensors: {
                name if name.startswith("visual.") else f"model.{name}": tensors[name] for name in tensors
            },
        ),
        "vae": ("qwen_image_vae", *random_networks.qwen_vae_file(networks.vae())),
    }
    return places | random_networks.write_files(folder, parts, seed, dtype)


def _centred(tensors: Tensors) -> Tensors:
    """Store the scales of norms as distances from 1."""
    return {name: tensor - 1 if name.endswith("norm.scale") else tensor for name, tensor in tensors.items()}


def demo_tables(models: Mapping[str, Path]) -> DemoTables:
    """Return the tables of a demo TOML for this model; `models` are the files written by `write_random_model`."""
    return {
        "model": [
            ("pretrained_model_name_or_path", str(models["krea_2"]), "real: krea2_raw_bf16.safetensors"),
            ("text_encoder", str(models["text_encoder"]), "real: qwen3vl_4b_bf16.safetensors"),
            ("vae", str(models["vae"]), "real: qwen_image_vae.safetensors"),
            ("model_version", "raw", "turbo for Krea 2 Turbo"),
        ],
        "noise": [("timestep_sampling", "krea2_shift", "")],
    }


def diffusers_settings(sizes: Krea2Shape) -> dict[str, Any]:
    """Return the arguments of diffusers' transformer of these sizes."""
    image, text = sizes.image, sizes.text
    return {
        "in_channels": sizes.in_channels,
        "num_layers": sizes.blocks,
        "attention_head_dim": image.head,
        "num_attention_heads": image.hidden // image.head,
        "num_key_value_heads": image.key_values // image.head,
        "intermediate_size": image.mlp,
        "text_hidden_dim": text.hidden,
        "num_text_layers": sizes.text_layers,
        "text_num_attention_heads": text.hidden // text.head,
        "text_num_key_value_heads": text.key_values // text.head,
        "text_intermediate_size": text.mlp,
        "num_layerwise_text_blocks": sizes.layerwise,
        "num_refiner_text_blocks": sizes.refiners,
        "axes_dims_rope": sizes.axes,
    }


def convert_for_diffusers(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, LayerSizes]:
    """Return a LoRA file's adapters by diffusers' names, and the layer sizes of diffusers' model.

    diffusers requires dotted model paths, which `kohya tools convert --to comfy` writes.
    """
    stored = diffusers_layers.stored_shapes(config)
    sizes = Krea2Shape.of({canonical_krea_2_path(name): shape for name, shape in stored.items()})
    named = diffusers_layers.with_dotted_paths(tensors, matrices(stored, ""))
    return diffusers_layers.convert_with_mixin(
        named, "Krea2Transformer2DModel", "Krea2LoraLoaderMixin", **diffusers_settings(sizes)
    )
