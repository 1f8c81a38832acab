"""Qwen-Image-2.1 with random weights: full-size networks, or tiny ones in the real file formats, for tests and demo."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.qwen_image_21 import text_encoder
from library.families.qwen_image_21.facts import CHANNELS
from library.families.qwen_image_21.family import EMBED, MASK, Qwen21Family
from library.families.qwen_image_21.keys import qwen_21_sources, qwen_21_to_single
from library.families.qwen_image_21.model import Qwen21Shape, QwenImage21
from library.families.qwen_image_21.vae import empty_qwen_21_vae
from library.families.qwen_image_21.vae_names import qwen_21_vae_to_single
from library.families.shared import diffusers_layers, random_networks, random_tokenizers
from library.families.shared.diffusers_layers import LayerSizes
from library.families.shared.random_networks import DemoTables, InputShapes, RandomNetworks, Tensors
from library.families.shared.random_sizes import LanguageModelSizes

QWEN_21_WORD_COUNT = 151936  # size of the published vocabulary, with spare rows


@dataclass(frozen=True)
class Qwen21Sizes(LanguageModelSizes):
    """Widths and depths. The width of the denoiser is a multiple of its heads."""

    text: int = 64  # not the width of other encoders of this kind
    hidden: int = 64
    head: int = 32
    mlp_ratio: int = 3
    blocks: int = 3
    vision: int = 32
    vision_mlp: int = 48
    vision_layers: int = 2
    vision_taps: int = 1
    vision_places: int = 16  # of the table of positions, a square
    vae: tuple[int, int] = (4, 8)  # of encoder and decoder
    vae_widths: tuple[int, ...] = (1, 2, 2, 2, 2)
    vae_resnets: int = 1
    resolutions: tuple[int, ...] = (64, 128)

    @property
    def vision_settings(self) -> dict[str, int]:
        """Return the settings of the vision encoder."""
        return {
            "depth": self.vision_layers,
            "hidden_size": self.vision,
            "intermediate_size": self.vision_mlp,
            "num_position_embeddings": self.vision_places,
            "taps": self.vision_taps,
        }


TINY = Qwen21Sizes()
FULL = Qwen21Sizes(
    hidden=4096,
    head=128,
    blocks=32,
    text=4096,
    text_layers=36,
    text_mlp=12288,
    text_heads=32,
    text_groups=8,
    vision=1152,
    vision_mlp=4304,
    vision_layers=27,
    vision_taps=3,
    vision_places=2304,
    vae=(96, 144),
    vae_widths=(1, 2, 4, 8, 8),
    vae_resnets=2,
    resolutions=(512, 1024),
)


def qwen_21_shape(sizes: Qwen21Sizes) -> Qwen21Shape:
    """Return the denoiser's sizes."""
    return Qwen21Shape(
        in_channels=CHANNELS,
        text_channels=sizes.text,
        hidden=sizes.hidden,
        head=sizes.head,
        mlp=sizes.mlp_ratio * sizes.hidden,
        blocks=sizes.blocks,
    )


def make_networks(sizes: Qwen21Sizes = TINY, words: int = QWEN_21_WORD_COUNT) -> RandomNetworks:
    """Return the networks of these sizes, for a tokenizer with `words` tokens."""
    return RandomNetworks(
        lambda: random_networks.build_on_meta(lambda: QwenImage21(qwen_21_shape(sizes))),
        {"text_encoder": lambda: text_encoder.empty_qwen_21_encoder(sizes.text_settings(words), sizes.vision_settings)},
        lambda: empty_qwen_21_vae(sizes.vae, sizes.vae_widths, sizes.vae_resnets, CHANNELS, [False, True, True, True]),
        sizes.resolutions,
    )


def input_shapes(family: Qwen21Family, denoiser: QwenImage21) -> InputShapes:
    """Return this denoiser's inputs for one image with a caption of usual length."""
    length, sizes = 2 * text_encoder.LENGTH_MULTIPLE, denoiser.sizes
    return InputShapes(sizes.in_channels // 4, {EMBED: (length, sizes.text_channels), MASK: (length,)})


def write_random_model(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, sizes: Qwen21Sizes = TINY
) -> dict[str, Path]:
    """Write the three files of a tiny model, in ComfyUI's layouts, and its tokenizer into a folder.

    Returns paths by part: qwen_image_21, text_encoder, vae (all .safetensors) and tokenizer (a folder).
    """
    places = {"tokenizer": folder / "tokenizer"}
    words = random_tokenizers.qwen_tokenizer(places["tokenizer"], seeing=True)
    networks = make_networks(sizes, QWEN_21_WORD_COUNT if sizes == FULL else words)
    text = networks.encoders["text_encoder"]().state_dict()
    named = {name.removeprefix("language."): tensor for name, tensor in text.items()}
    named["norm.weight"] = torch.empty(sizes.text, device="meta")  # which files have and nothing reads
    vae: Any = networks.vae()
    parts = {
        "qwen_image_21": (
            "qwen_image_2.1_tiny",
            networks.denoiser().state_dict(),
            lambda tensors: qwen_21_to_single(_centred(tensors)),
        ),
        "text_encoder": (
            "qwen3vl_8b_tiny",
            named,
            lambda tensors: {n if n.startswith("visual.") else f"model.{n}": tensor for n, tensor in tensors.items()},
        ),
        "vae": (
            "qwen_image_2.1_vae_tiny",
            vae.network.state_dict(),
            lambda tensors: qwen_21_vae_to_single(random_networks.enlarge_encoder_output(tensors)),
        ),
    }
    return places | random_networks.write_files(folder, parts, seed, dtype)


def _centred(tensors: Tensors) -> Tensors:
    """Store the weight of the text's norm as its distance from 1."""
    return {name: tensor - 1 if name.endswith("text_norm.weight") else tensor for name, tensor in tensors.items()}


def demo_tables(models: Mapping[str, Path]) -> DemoTables:
    """Return the tables of a demo TOML for this model; `models` are the files written by `write_random_model`."""
    return {
        "model": [
            (
                "pretrained_model_name_or_path",
                str(models["qwen_image_21"]),
                "real: qwen_image_2.1_bf16.safetensors",
            ),
            ("text_encoder", str(models["text_encoder"]), "real: qwen3vl_8b_bf16.safetensors"),
            ("vae", str(models["vae"]), "real: qwen_image_2.1_vae_bf16.safetensors"),
            ("model_version", "base", "turbo for Qwen-Image-2.1 Turbo"),
        ],
        "noise": [("timestep_sampling", "qwen_shift", "")],
    }


def diffusers_settings(sizes: Qwen21Shape) -> dict[str, Any]:
    """Return the arguments of diffusers' transformer of these sizes."""
    return {
        "in_channels": sizes.in_channels,
        "out_channels": sizes.in_channels,
        "num_layers": sizes.blocks,
        "attention_head_dim": sizes.head,
        "num_attention_heads": sizes.hidden // sizes.head,
        "context_in_dim": sizes.text_channels,
        "mlp_ratio": sizes.mlp // sizes.hidden,
        "axes_dims_rope": sizes.axes,
    }


def convert_for_diffusers(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, LayerSizes]:
    """Return a LoRA file's adapters by diffusers' names, and the layer sizes of diffusers' model."""
    stored = diffusers_layers.stored_shapes(config)
    shapes = {}
    for name, (key, _, pieces) in qwen_21_sources(stored).items():
        shapes[name] = (stored[key][0] // pieces, *stored[key][1:])
    sizes = Qwen21Shape.of(shapes)
    return diffusers_layers.convert_with_mixin(
        tensors, "QwenImage21Transformer2DModel", "QwenImageLoraLoaderMixin", **diffusers_settings(sizes)
    )
