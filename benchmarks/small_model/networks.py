"""Write untrained files of the small models in their families' formats, with tokenizers for every word of the
captions."""

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.small_model import data
from library.families.flux import random as flux_random
from library.families.sdxl import keys as sdxl_keys
from library.families.sdxl import random as sdxl_random
from library.families.shared import autoencoder, clip, random_networks, random_tokenizers
from library.files import write_atomic

# With matrices in fp8 and the autoencoder in bf16 each family takes at most 16 MB.
VAE_WIDTHS = (32, 64, 64, 64)
FLUX = flux_random.FluxSizes(
    hidden=256,
    head=32,
    double_blocks=2,
    single_blocks=4,
    clip_l=64,
    clip_layers=2,
    t5xxl=128,
    t5_layers=2,
    t5_heads=4,
    t5_head=32,
    t5_mlp=256,
    vae=VAE_WIDTHS,
)
SDXL = sdxl_random.SdxlSizes(unet=(64, 96, 128), depth=(0, 1, 1), vae=VAE_WIDTHS, clip_l=64, clip_g=128)
SEED = 1
CLIP_PIECES = re.compile(r"[^\W\d_]+|\d|[^\s\w]+")  # splits words as CLIP's tokenizer does


@dataclass(frozen=True)
class LatentScale:
    """Scale, shift and channels of the VAE's latents, in which the two models differ."""

    vae: Callable[[], Any]
    scale: float
    shift: float


AUTOENCODERS = {
    "flux": LatentScale(
        lambda: random_networks.random_autoencoder(FLUX.vae, 16, 0.3611, quant_convs=False), 0.3611, 0.1159
    ),
    "sdxl": LatentScale(
        lambda: random_networks.random_autoencoder(SDXL.vae, 4, 0.13025, quant_convs=True), 0.13025, 0.0
    ),
}


def write_flux(folder: Path, vae: Mapping[str, Tensor], names: list[str]) -> None:
    """Write the denoiser, both text encoders, this autoencoder and the tokenizers."""
    captions = list(data.captions_of(names))
    words = random_tokenizers.clip_tokenizer(folder / "tokenizer", None, sentences=split_for_clip(captions))
    t5_words = random_tokenizers.t5_tokenizer(folder / "tokenizer_2", captions)
    networks = flux_random.make_networks(FLUX, words, t5_words)
    weights = {"flux1-dev": random_of(networks.denoiser().state_dict(), SEED)}
    zero(weights["flux1-dev"], "final_layer.linear.weight", "modulation.lin.weight", ".lin.weight")
    weights["clip_l"] = random_of(clip.clip_tensors(networks.encoders["clip_l"]()), SEED + 1)
    t5 = random_of(networks.encoders["t5xxl"]().state_dict(), SEED + 2)
    del t5["encoder.embed_tokens.weight"]
    weights["t5xxl"] = keep_words(t5)
    weights["ae"] = autoencoder.vae_to_single(dict(vae))
    for stem, tensors in weights.items():
        write_file(folder / f"{stem}.safetensors", tensors)


def write_sdxl(folder: Path, vae: Mapping[str, Tensor], names: list[str]) -> None:
    """Write one file with all networks, and both tokenizers."""
    captions = split_for_clip(list(data.captions_of(names)))
    words = random_tokenizers.clip_tokenizer(folder / "tokenizer", None, sentences=captions)
    random_tokenizers.clip_tokenizer(folder / "tokenizer_2", None, pad="!", sentences=captions)
    networks = sdxl_random.make_networks(SDXL, words)
    parts = {"denoiser": random_of(networks.denoiser().state_dict(), SEED), "vae": dict(vae)}
    zero(parts["denoiser"], "conv_out.weight", ".proj_out.weight", ".conv2.weight")
    for number, (part, make) in enumerate(networks.encoders.items(), 1):
        parts[part] = random_of(clip.clip_tensors(make()), SEED + number)
    file = {
        name: tensor
        for part, tensors in parts.items()
        for name, tensor in sdxl_keys.SDXL_FILE.to_single(part, tensors).items()
    }
    file[sdxl_keys.LOGIT_SCALE] = torch.tensor(sdxl_keys.FULL_LOGIT_SCALE)
    write_file(folder / "sdxl.safetensors", file)


def split_for_clip(captions: list[str]) -> list[str]:
    return [" ".join(sorted({piece for caption in captions for piece in CLIP_PIECES.findall(caption.lower())}))]


def random_of(named: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return seeded float32 weights for these names and shapes."""
    return random_networks.random_weights(
        [(name, tuple(tensor.shape)) for name, tensor in named.items()], seed, torch.float32
    )


def zero(tensors: dict[str, Tensor], *endings: str) -> None:
    """Set these layers to zero, so that every block begins as the identity (Peebles and Xie, 2022)."""
    for name in tensors:
        if name.endswith(endings):
            tensors[name].zero_()


def keep_words(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keep words distinguishable in T5's untrained output: large embeddings, small additions by its blocks."""
    for name, tensor in tensors.items():
        if name == "shared.weight":
            tensor.div_(tensor.std())
        elif name.endswith((".o.weight", ".wo.weight")):
            tensor.mul_(0.3)
    return tensors


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomic(path, lambda temporary: save_file(contiguous, temporary, {"format": "pt"}))


WRITERS = {"flux": write_flux, "sdxl": write_sdxl}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write an untrained small model.")
    parser.add_argument("family", choices=[*WRITERS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--emoji", type=Path, required=True, help="folder of emoji.zip")
    parser.add_argument("--autoencoder", type=Path, help="a trained one with diffusers' names; default: random weights")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    names = [name for name, _ in data.read_archive(args.emoji / "emoji.zip")]
    vae = (
        load_file(args.autoencoder) if args.autoencoder else random_of(AUTOENCODERS[args.family].vae().state_dict(), 9)
    )
    WRITERS[args.family](args.folder, vae, names)
    print(f"{args.family} in {args.folder}")


if __name__ == "__main__":
    main()
