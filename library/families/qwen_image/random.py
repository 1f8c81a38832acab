"""Qwen-Image's networks with random weights: full-size, or tiny ones in the real file formats, for tests and demo."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.qwen_image import pictures, text_encoder
from library.families.qwen_image.facts import INDEX
from library.families.qwen_image.family import QwenFamily
from library.families.qwen_image.model import QwenImage, QwenShape
from library.families.shared import diffusers_layers, random_networks, random_tokenizers
from library.families.shared.diffusers_layers import LayerSizes
from library.families.shared.random_networks import DemoTables, InputShapes, RandomNetworks
from library.families.shared.random_sizes import FULL_QWEN_VAE, LanguageModelSizes, QwenVaeSizes
from library.families.shared.tensor_names import count_list_blocks

VOCABULARY = 152064  # size of the published vocabulary, with spare rows


@dataclass(frozen=True)
class QwenSizes(LanguageModelSizes, QwenVaeSizes):
    """Widths and depths. Widths of the text encoder are multiples of 128 (heads)."""

    hidden: int = 64
    head: int = 32
    blocks: int = 3
    text: int = 128
    resolutions: tuple[int, ...] = (64, 128)
    vision: int = 0  # width of the vision encoder, a multiple of 80 (heads); 0: none
    vision_mlp: int = 96
    vision_layers: int = 2
    still_references: bool = False  # as Qwen-Image-Edit-2511


TINY = QwenSizes()
FULL = QwenSizes(
    hidden=3072,
    head=128,
    blocks=60,
    text=3584,
    text_layers=28,
    text_mlp=18944,
    text_heads=28,
    text_groups=4,
    resolutions=(512, 1024, 1328),
    **FULL_QWEN_VAE,
)


VARIANTS = {"qwen_image_edit": replace(TINY, vision=80, still_references=True)}
FULL_VISION = {"vision": 1280, "vision_mlp": 3420, "vision_layers": 32}


def model_sizes(config: Any, full: bool) -> QwenSizes:
    """Return the sizes of the variant that a config names."""
    variant = config.model.variant
    if not variant.template:
        return FULL if full else TINY
    sizes = replace(FULL, **FULL_VISION) if full else replace(TINY, vision=80)
    return replace(sizes, still_references=variant.still_references)


def make_networks(sizes: QwenSizes = TINY, words: int = VOCABULARY) -> RandomNetworks:
    """Return the networks of these sizes, for a tokenizer with `words` tokens."""
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
    language = sizes.text_settings(words)
    if not sizes.vision:
        return text_encoder.empty_qwen_encoder(language)
    vision = {"depth": sizes.vision_layers, "hidden_size": sizes.vision, "intermediate_size": sizes.vision_mlp}
    return pictures.empty_vision_model(language, vision)


def input_shapes(family: QwenFamily, denoiser: QwenImage) -> InputShapes:
    """Return this denoiser's inputs for one image with a caption of usual length."""
    sizes, variant = denoiser.sizes, family.variant
    width, height = pictures.seen_size((1024, 1024), variant.condition_area or 1)
    num_references = variant.control_images.least
    multiple, tokens_of_references = text_encoder.LENGTH_MULTIPLE, num_references * width * height // pictures.TOKEN**2
    length = (3 + tokens_of_references // multiple) * multiple
    text = {"vl_embed": (length, sizes.text_channels), "vl_mask": (length,)}
    return InputShapes(sizes.in_channels // 4, text, references=num_references)


def write_random_model(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, sizes: QwenSizes = TINY
) -> dict[str, Path]:
    """Write the three files of a tiny model, in ComfyUI's layouts, and its tokenizer into a folder.

    Returns paths by part: qwen_image, text_encoder, vae (all .safetensors) and tokenizer (a folder).
    """
    places = {"tokenizer": folder / "tokenizer"}
    words = random_tokenizers.qwen_tokenizer(places["tokenizer"], sizes.vision > 0)
    networks = make_networks(sizes, VOCABULARY if sizes.blocks == FULL.blocks else words)
    text = networks.encoders["text_encoder"]().state_dict()
    mark = {INDEX: torch.zeros(0)} if sizes.still_references else {}
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
    return name if name.startswith(pictures.VISION) else f"model.{name.removeprefix('language.')}"


def demo_tables(models: Mapping[str, Path]) -> DemoTables:
    """Return the tables of a demo TOML for this model; `models` are the files written by `write_random_model`.

    {references} is replaced by the folder of reference images.
    """
    edit = "edit" in models["qwen_image"].name
    real = f"real: qwen_image_{'edit_2511_' if edit else ''}bf16.safetensors"
    control_line = ("control_directory", "{references}", "real: other images of the same names; here grey ones")
    return {
        "model": [
            ("pretrained_model_name_or_path", str(models["qwen_image"]), real),
            *([("model_version", "edit-2511", "")] if edit else []),
            ("text_encoder", str(models["text_encoder"]), "real: qwen_2.5_vl_7b.safetensors"),
            ("vae", str(models["vae"]), "real: qwen_image_vae.safetensors"),
        ],
        "noise": [("timestep_sampling", "qwen_shift", "")],
        **({"data": [control_line]} if edit else {}),
    }


def convert_for_diffusers(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, LayerSizes]:
    """Return a LoRA file's adapters by diffusers' names, and the layer sizes of diffusers' model."""
    shapes = diffusers_layers.stored_shapes(config)
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return diffusers_layers.convert_with_mixin(
        tensors,
        "QwenImageTransformer2DModel",
        "QwenImageLoraLoaderMixin",
        in_channels=shapes["img_in.weight"][1],
        out_channels=shapes["proj_out.weight"][0] // 4,
        num_layers=count_list_blocks(shapes, "transformer_blocks"),
        attention_head_dim=head,
        num_attention_heads=shapes["img_in.weight"][0] // head,
        joint_attention_dim=shapes["txt_in.weight"][1],
    )
