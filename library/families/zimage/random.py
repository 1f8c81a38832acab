"""Z-Image's networks with random weights: full-size, or tiny ones in the real file formats, for tests and demo."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.shared import autoencoder, diffusers_layers, language_model, random_networks, random_tokenizers
from library.families.shared.diffusers_layers import LayerSizes
from library.families.shared.random_networks import (
    DemoTables,
    InputShapes,
    RandomNetworks,
    Tensors,
    enlarge_encoder_output,
    prefixed,
)
from library.families.shared.random_sizes import QWEN3_4B, LanguageModelSizes
from library.families.shared.tensor_names import count_list_blocks
from library.families.zimage import keys
from library.families.zimage.checkpoint import LENGTH_MULTIPLE, SKIPPED_LAYERS
from library.families.zimage.family import ZImageFamily
from library.families.zimage.model import ZImage, ZImageShape

VOCABULARY = 151936  # size of the published vocabulary, with spare rows


@dataclass(frozen=True)
class ZImageSizes(LanguageModelSizes):
    """Widths and depths. The width of the denoiser is a multiple of its heads, that of a head of 16."""

    hidden: int = 96
    head: int = 32
    mlp: int = 256
    time: tuple[int, int] = (1024, 96)
    blocks: int = 3
    refiners: int = 1
    text: int = 64
    text_layers: int = 3
    vae_widths: tuple[int, ...] = (32, 32, 32, 32)
    channels: int = 16
    resolutions: tuple[int, ...] = (64, 128)


TINY = ZImageSizes()
FULL = ZImageSizes(
    hidden=3840,
    head=128,
    mlp=10240,
    time=(1024, 256),
    blocks=30,
    refiners=2,
    **QWEN3_4B,
    vae_widths=(128, 256, 512, 512),
    resolutions=(512, 1024),
)


def zimage_shape(sizes: ZImageSizes) -> ZImageShape:
    """Return the denoiser's sizes."""
    return ZImageShape(
        in_channels=4 * sizes.channels,
        text_channels=sizes.text,
        hidden=sizes.hidden,
        head=sizes.head,
        mlp=sizes.mlp,
        time=sizes.time,
        layers=sizes.blocks,
        noise_refiners=sizes.refiners,
        context_refiners=sizes.refiners,
    )


def make_networks(sizes: ZImageSizes = TINY, words: int = VOCABULARY, skipped: int = SKIPPED_LAYERS) -> RandomNetworks:
    """Return the networks of these sizes, for a tokenizer with `words` tokens."""
    return RandomNetworks(
        lambda: random_networks.build_on_meta(lambda: ZImage(zimage_shape(sizes))),
        {"text_encoder": lambda: language_model.empty_qwen3(skipped, **sizes.text_settings(words))},
        lambda: random_networks.random_autoencoder(sizes.vae_widths, sizes.channels, autoencoder.FLUX[0], False),
        sizes.resolutions,
    )


def input_shapes(family: ZImageFamily, denoiser: ZImage) -> InputShapes:
    """Return this denoiser's inputs for one image with a caption of usual length."""
    length, sizes = 2 * LENGTH_MULTIPLE, denoiser.sizes
    text = {"llm_embed": (length, sizes.text_channels), "llm_mask": (length,)}
    return InputShapes(sizes.in_channels // 4, text)


def write_random_model(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, sizes: ZImageSizes = TINY
) -> dict[str, Path]:
    """Write the three files of a tiny model, in ComfyUI's layouts, and its tokenizer into a folder.

    Returns paths by part: zimage, text_encoder, vae (all .safetensors) and tokenizer (a folder).
    """
    places = {"tokenizer": folder / "tokenizer"}
    words = random_tokenizers.qwen_tokenizer(places["tokenizer"])
    networks = make_networks(sizes, VOCABULARY if sizes == FULL else words, skipped=0)
    text = networks.encoders["text_encoder"]().state_dict()
    parts = {
        "zimage": ("z_image_tiny", networks.denoiser().state_dict(), _zimage_single_file),
        "text_encoder": ("qwen_3_tiny", text, prefixed("model.")),
        "vae": (
            "ae",
            networks.vae().state_dict(),
            lambda tensors: autoencoder.vae_to_single(enlarge_encoder_output(tensors)),
        ),
    }
    return places | random_networks.write_files(folder, parts, seed, dtype)


def _zimage_single_file(tensors: Tensors) -> Tensors:
    tensors["cap_embedder.0.weight"] += 1  # a norm, despite its name
    return keys.zimage_to_single(tensors)


def demo_tables(models: Mapping[str, Path]) -> DemoTables:
    """Return the tables of a demo TOML for this model; `models` are the files written by `write_random_model`."""
    return {
        "model": [
            ("pretrained_model_name_or_path", str(models["zimage"]), "real: z_image_bf16.safetensors"),
            ("text_encoder", str(models["text_encoder"]), "real: qwen_3_4b.safetensors"),
            ("vae", str(models["vae"]), "real: ae.safetensors"),
            ("model_version", "base", "turbo for Z-Image Turbo"),
        ],
        "noise": [("timestep_sampling", "shift", ""), ("discrete_flow_shift", 2.0, "")],
    }


def convert_for_diffusers(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, LayerSizes]:
    """Return a LoRA file's adapters by diffusers' names, and the layer sizes of diffusers' model."""
    shapes = diffusers_layers.stored_shapes(config)
    (hidden, tokens), head = shapes["x_embedder.weight"], shapes["layers.0.attention.q_norm.weight"][0]
    return diffusers_layers.convert_with_mixin(
        tensors,
        "ZImageTransformer2DModel",
        "ZImageLoraLoaderMixin",
        dim=hidden,
        n_layers=count_list_blocks(shapes, "layers"),
        n_refiner_layers=count_list_blocks(shapes, "noise_refiner"),
        n_heads=hidden // head,
        n_kv_heads=hidden // head,
        in_channels=tokens // 4,
        cap_feat_dim=shapes["cap_embedder.1.weight"][1],
        axes_lens=[2, 2, 2],
        axes_dims=[head // 4, 3 * head // 8, 3 * head // 8],
    )
