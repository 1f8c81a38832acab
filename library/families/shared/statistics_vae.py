"""The autoencoder with the statistics of its latents in its file: names in single files, and normalised latents.

Latents here are [B, 32, H / 8, W / 8], normalised. The file, musubi-tuner's caches and the denoisers use squares of 2
by 2, so [B, 128, H / 16, W / 16].
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from library.families import recognition
from library.families.shared import autoencoder, empty_weights, expected_tensors, random_networks, weights
from library.families.shared.part_files import Part, complete
from library.families.shared.tensor_names import inverse, replace_prefix
from library.families.shared.weights import assign
from library.imports import without_optional

EPS = 1e-4  # added to the variance
COUNTED = "bn.num_batches_tracked"


def part(what: str, *files: str) -> Part:
    """Return where a model has this autoencoder; `files` are patterns of its usual names."""
    return Part("vae", what, ("vae", *files), (autoencoder.VAE_MARKER,), expected_tensors.autoencoder_with_statistics)


def load_statistics_vae(what: str, path: Path, dtype: Any, mmap: bool = True) -> nn.Module:
    """Read the autoencoder, single file or diffusers; its statistics stay in float32. `what` describes it in errors."""
    file = weights.open_weights(path, mmap)
    if not any(name.endswith("bn.running_mean") for name in file):
        raise recognition.wrong_kind_error(path, what)
    with complete(path, what):
        tensors = autoencoder.vae_to_diffusers(file)
        kinds = {name: torch.float32 if name.startswith("bn.") else dtype for name in tensors}
        return build_statistics_vae(
            {name: weights.cast_floating(tensor, kinds[name]) for name, tensor in tensors.items()}
        )


def build_statistics_vae(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return the autoencoder with the sizes of its tensors (diffusers names), which are not copied."""
    settings = autoencoder.autoencoder_settings(tensors)
    with empty_weights.empty_weights():
        model = _class()(**settings)
    return assign(model, {COUNTED: torch.zeros((), dtype=torch.long), **tensors})


def empty_statistics_vae(widths: tuple[int, ...], channels: int) -> nn.Module:
    return random_networks.build_on_meta(lambda: _class()(block_out_channels=widths, latent_channels=channels))


def _class() -> Any:
    with without_optional("diffusers"):
        package: Any = importlib.import_module("diffusers")
        return package.AutoencoderKLFlux2


def statistics_vae_to_single(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    places = inverse(autoencoder.INSIDE)
    return {replace_prefix(name, places): tensor for name, tensor in autoencoder.vae_to_single(tensors).items()}


def random_statistics_vae(vae: nn.Module, channels: int) -> tuple[dict[str, Tensor], random_networks.Layout]:
    """Return what random weights of this autoencoder's file are made from: its tensors, and their layout there."""

    def layout(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        indices = torch.arange(4 * channels)
        statistics = {"running_mean": (indices % 5 - 2) / 10, "running_var": 1 + (indices % 3) / 10}
        tensors = random_networks.enlarge_encoder_output(tensors)
        tensors |= {f"bn.{name}": tensor.float() for name, tensor in statistics.items()}
        return statistics_vae_to_single(tensors | {COUNTED: torch.zeros((), dtype=torch.long)})

    return {name: tensor for name, tensor in vae.state_dict().items() if not name.startswith("bn.")}, layout


def normalised_latents(vae: Any, pixels: Tensor) -> Tensor:
    """Pixels [B, 3, H, W] in [-1, 1] -> normalised modes, float32 [B, C, H / 8, W / 8]; not sampled."""
    with torch.no_grad(), torch.autocast(pixels.device.type, enabled=False):
        return normalised(vae, autoencoder.encode(vae, pixels).mode())


def normalised(vae: Any, latents: Tensor) -> Tensor:
    """Encoder output [B, C, h, w] -> latents of about unit size, float32."""
    mean, deviation = statistics(vae, latents.device)
    return pixel_shuffle((pixel_unshuffle(latents.float(), 2) - mean) / deviation, 2)


def denormalised(vae: Any, latents: Tensor) -> Tensor:
    mean, deviation = statistics(vae, latents.device)
    return pixel_shuffle(pixel_unshuffle(latents.float(), 2) * deviation + mean, 2)


def statistics(vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel of the squares [4 C, 1, 1]."""
    values = (tensor.to(device, torch.float32)[:, None, None] for tensor in (vae.bn.running_mean, vae.bn.running_var))
    mean, variance = values
    return mean, (variance + EPS).sqrt()
