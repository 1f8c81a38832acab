"""FLUX.1's networks with random weights: full-size, or tiny ones in the real file formats."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from library.families.flux.family import POOLED, FluxFamily
from library.families.flux.model import Flux, Sizes
from library.families.flux.options import FluxLora, FluxTrain
from library.families.shared import autoencoder, clip, random_networks, random_tokenizers
from library.families.shared.random_networks import (
    CLIP_WORDS,
    T5_WORDS,
    InputShapes,
    Layout,
    RandomNetworks,
    Tensors,
    prefixed,
)


@dataclass(frozen=True)
class FluxSizes:
    """Widths and depths. Widths of CLIP are multiples of 64 (heads), of the autoencoder of 32 (groups)."""

    hidden: int = 64
    head: int = 32
    double_blocks: int = 2
    single_blocks: int = 4
    clip_l: int = 64
    clip_layers: int = 2
    t5xxl: int = 64
    t5_layers: int = 2
    t5_heads: int = 4
    t5_head: int = 16
    t5_mlp: int = 128
    vae: tuple[int, ...] = (32, 32, 32, 32)
    channels: int = 16
    guidance: bool = True  # dev; schnell is without
    inputs: int = 1  # channels that are read, as a multiple of those of latents
    name: str = ""  # of its file, where sizes do not tell which relative it is
    approximator: tuple[int, int, int] | None = None  # of Chroma: channels of its input, width, layers
    resolutions: tuple[int, ...] = (64, 128)


TINY = FluxSizes()
TINY_OPTIONS = {"t5xxl_max_token_length": clip.LENGTH}  # few words, as a tiny model is measured for its parts
FULL = FluxSizes(
    hidden=3072,
    head=128,
    double_blocks=19,
    single_blocks=38,
    clip_l=768,
    clip_layers=12,
    t5xxl=4096,
    t5_layers=24,
    t5_heads=64,
    t5_head=64,
    t5_mlp=10240,
    vae=(128, 256, 512, 512),
    resolutions=(512, 1024, 2048),
)


def _variants(base: FluxSizes, approximator: tuple[int, int, int]) -> dict[str, FluxSizes]:
    return {
        "kontext": replace(base, name="kontext-dev"),
        "fill": replace(base, inputs=6, name="fill-dev"),
        "chroma": replace(base, guidance=False, approximator=approximator),
    }


VARIANTS = _variants(TINY, (64, 64, 2))
FULL_VARIANTS = _variants(FULL, (64, 5120, 5))


def model_sizes(config: FluxLora | FluxTrain, full: bool) -> FluxSizes:
    """The sizes of the relative that a config names."""
    variants = FULL_VARIANTS if full else VARIANTS
    return variants.get(config.model.model_type, FULL if full else TINY)


def make_networks(sizes: FluxSizes = TINY, clip_words: int = CLIP_WORDS, t5_words: int = T5_WORDS) -> RandomNetworks:
    """The networks of these sizes, for tokenizers with so many words."""
    shape = Sizes(
        in_channels=4 * sizes.channels * sizes.inputs,
        out_channels=4 * sizes.channels,
        vector_channels=0 if sizes.approximator else sizes.clip_l,
        text_channels=sizes.t5xxl,
        hidden=sizes.hidden,
        head=sizes.head,
        mlp=4 * sizes.hidden,
        double_blocks=sizes.double_blocks,
        single_blocks=sizes.single_blocks,
        guidance=sizes.guidance and not sizes.approximator,
        approximator=sizes.approximator,
    )
    encoders = {
        "clip_l": lambda: random_networks.clip_encoder(sizes.clip_l, sizes.clip_layers, clip_words),
        "t5xxl": lambda: _t5(sizes, t5_words),
    }
    if sizes.approximator:
        del encoders["clip_l"]
    return RandomNetworks(
        lambda: random_networks.build_on_meta(lambda: Flux(shape)),
        encoders,
        lambda: random_networks.random_autoencoder(sizes.vae, sizes.channels, 0.3611, quant_convs=False),
        sizes.resolutions,
    )


def _t5(sizes: FluxSizes, words: int) -> nn.Module:
    from transformers.models.t5 import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=words,
        d_model=sizes.t5xxl,
        d_kv=sizes.t5_head,
        d_ff=sizes.t5_mlp,
        num_layers=sizes.t5_layers,
        num_heads=sizes.t5_heads,
        feed_forward_proj="gated-gelu",
    )
    module: Any = random_networks.build_on_meta(lambda: T5EncoderModel(config))
    module.encoder.embed_tokens = module.shared
    return module


def adopt_denoiser(family: FluxFamily, denoiser: Flux) -> None:
    """Tell a family what it otherwise reads from the header of its checkpoint."""
    family.is_schnell = denoiser.sizes.is_schnell
    family.depth = (denoiser.sizes.double_blocks, denoiser.sizes.single_blocks)


def input_shapes(family: FluxFamily, denoiser: Flux) -> InputShapes:
    """What this denoiser reads, for one image."""
    length, sizes = min(family.text_length, family.config.model.text_tokens or family.text_length), denoiser.sizes
    text = {"l_pooled": (sizes.vector_channels or POOLED,), "t5_out": (length, sizes.text_channels)}
    text |= {"txt_ids": (length, 3), "t5_attn_mask": (length,)}
    shown = family.variant.control_images
    return InputShapes(sizes.out_channels // 4, text, shown.inpaints, shown.least)


def write_random_model(
    folder: Path, seed: int = 0, guidance: bool = True, dtype: torch.dtype = torch.bfloat16, sizes: FluxSizes = TINY
) -> dict[str, Path]:
    """Write the four files of a tiny dev (schnell without `guidance`) model and its tokenizers into a folder.

    With `sizes` of FULL the text encoders know more words than these tokenizers. Chroma has no CLIP-L.
    Returns paths by part: flux, clip_l, t5xxl, ae (all .safetensors), and the tokenizers' folders.
    """
    folder = Path(folder)
    stem = "tiny-chroma" if sizes.approximator else f"tiny-flux1-{sizes.name or ('dev' if guidance else 'schnell')}"
    makers = [random_tokenizers.clip_tokenizer, random_tokenizers.t5_tokenizer]
    if sizes.approximator:
        del makers[0]
    places = {name: folder / name for name in ("tokenizer", "tokenizer_2")[: len(makers)]}
    found = [make(place) for make, place in zip(makers, places.values(), strict=True)]
    full = sizes in (FULL, *FULL_VARIANTS.values())
    words = (CLIP_WORDS, T5_WORDS) if full else (found[0], found[-1])  # other programs expect the former
    networks = make_networks(replace(sizes, guidance=guidance), *words)
    files = {"clip_l": "clip_l", "t5xxl": "t5xxl_fp16"}
    parts: dict[str, tuple[str, Tensors, Layout]] = {"flux": (stem, networks.denoiser().state_dict(), prefixed(""))}
    for part, make in networks.encoders.items():
        named = clip.clip_tensors(make()) if part == "clip_l" else make().state_dict()
        named = {name: tensor for name, tensor in named.items() if name != "encoder.embed_tokens.weight"}
        parts[part] = (files[part], named, prefixed(""))
    parts["ae"] = (
        "ae",
        networks.vae().state_dict(),
        lambda tensors: autoencoder.vae_to_single(_with_unit_latents(tensors)),
    )
    return places | random_networks.write_files(folder, parts, seed, dtype)


def _with_unit_latents(tensors: Tensors) -> Tensors:
    """Let the random encoder answer like a trained one: latents of about unit size, with nearly no variance."""
    half = tensors["encoder.conv_out.bias"].shape[0] // 2
    tensors["encoder.conv_out.weight"][:half] *= 6
    tensors["encoder.conv_out.weight"][half:] *= 0.1
    tensors["encoder.conv_out.bias"][half:] = -12.0
    return tensors
