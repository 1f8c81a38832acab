"""Qwen-Image's networks with random weights: full-size, or tiny ones in the real file formats."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from library.families.qwen_image import pictures, text_encoder
from library.families.qwen_image.facts import INDEX
from library.families.qwen_image.family import QwenFamily
from library.families.qwen_image.model import QwenImage, QwenShape
from library.families.shared import random_networks, random_tokenizers
from library.families.shared.random_networks import InputShapes, RandomNetworks
from library.families.shared.random_sizes import FULL_QWEN_VAE, QwenVaeSizes

VOCABULARY = 152064  # of the published vocabulary, with room


@dataclass(frozen=True)
class QwenSizes(QwenVaeSizes):
    """Widths and depths. Widths of the text encoder are multiples of 128 (heads)."""

    hidden: int = 64
    head: int = 32
    blocks: int = 3
    text: int = 128
    text_layers: int = 2
    text_mlp: int = 128
    text_groups: int = 1
    resolutions: tuple[int, ...] = (64, 128)
    vision: int = 0  # width of what sees pictures in the text encoder, a multiple of 80 (heads); 0: it has none
    vision_mlp: int = 96
    vision_layers: int = 2
    still_references: bool = False  # as Qwen-Image-Edit-2511


TINY = QwenSizes()
TINY_OPTIONS: dict[str, int] = {}
FULL = QwenSizes(
    hidden=3072,
    head=128,
    blocks=60,
    text=3584,
    text_layers=28,
    text_mlp=18944,
    text_groups=4,
    resolutions=(512, 1024, 1328),
    **FULL_QWEN_VAE,
)


VARIANTS = {"qwen_image_edit": replace(TINY, vision=80, still_references=True)}
FULL_VISION = {"vision": 1280, "vision_mlp": 3420, "vision_layers": 32}


def model_sizes(config: Any, full: bool) -> QwenSizes:
    """The sizes of the relative that a config names."""
    variant = config.model.variant
    if not variant.template:
        return FULL if full else TINY
    sizes = replace(FULL, **FULL_VISION) if full else replace(TINY, vision=80)
    return replace(sizes, still_references=variant.still_references)


def make_networks(sizes: QwenSizes = TINY, words: int = VOCABULARY) -> RandomNetworks:
    """The networks of these sizes, for a tokenizer with so many words."""
    shape = QwenShape(
        in_channels=4 * sizes.channels,
        out_channels=4 * sizes.channels,
        text_channels=sizes.text,
        hidden=sizes.hidden,
        head=sizes.head,
        mlp=4 * sizes.hidden,
        blocks=sizes.blocks,
        still_references=sizes.still_references,
    )
    return RandomNetworks(
        lambda: random_networks.build_on_meta(lambda: QwenImage(shape)),
        {"text_encoder": lambda: _text_encoder(sizes, words)},
        sizes.empty_vae,
        sizes.resolutions,
    )


def _text_encoder(sizes: QwenSizes, words: int) -> nn.Module:
    language = (words, sizes.text, sizes.text_mlp, sizes.text_layers, sizes.text_groups)
    if not sizes.vision:
        return text_encoder.empty_qwen_encoder(*language)
    return pictures.empty_vision_model(*language, sizes.vision, sizes.vision_mlp, sizes.vision_layers)


def adopt_denoiser(family: QwenFamily, denoiser: nn.Module) -> None:
    """It reads nothing else from headers."""


def input_shapes(family: QwenFamily, denoiser: QwenImage) -> InputShapes:
    """What this denoiser reads, for one image with a caption of usual length."""
    sizes, variant = denoiser.sizes, family.variant
    width, height = pictures.seen_size((1024, 1024), variant.condition_area or 1)
    shown = variant.control_images.least
    length = (
        3 * text_encoder.LENGTH_MULTIPLE
        + shown * width * height // pictures.TOKEN**2 // text_encoder.LENGTH_MULTIPLE * text_encoder.LENGTH_MULTIPLE
    )
    text = {"vl_embed": (length, sizes.text_channels), "vl_mask": (length,)}
    return InputShapes(sizes.in_channels // 4, text, references=shown)


def write_random_model(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, sizes: QwenSizes = TINY
) -> dict[str, Path]:
    """Write the three files of a tiny model, in ComfyUI's layouts, and its tokenizer into a folder.

    Returns paths by part: qwen_image, text_encoder, vae (all .safetensors) and tokenizer (a folder).
    """
    folder = Path(folder)
    places = {"tokenizer": folder / "tokenizer"}
    words = random_tokenizers.qwen_tokenizer(places["tokenizer"], sizes.vision > 0)
    networks = make_networks(sizes, VOCABULARY if sizes.blocks == FULL.blocks else words)
    text, mark = (
        networks.encoders["text_encoder"]().state_dict(),
        {INDEX: torch.zeros(0)} if sizes.still_references else {},
    )
    stem = f"qwen_image{'_edit_2511' if sizes.still_references else ''}_tiny"
    parts = {
        "qwen_image": (stem, networks.denoiser().state_dict(), lambda tensors: tensors | mark),
        "text_encoder": (
            "qwen_2.5_vl_tiny",
            text,
            lambda tensors: {_name_in_single_file(name): tensors[name] for name in tensors},
        ),
        "vae": ("qwen_image_vae", *random_networks.qwen_vae_file(networks.vae())),
    }
    return places | random_networks.write_files(folder, parts, seed, dtype)


def _name_in_single_file(name: str) -> str:
    """The name of a text encoder's tensor in a single file."""
    return name if name.startswith(pictures.VISION) else f"model.{name.removeprefix('language.')}"
