"""Qwen-Image's VAE for single images: AutoencoderKLQwenImage without the frame dimension, sized by its tensors."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from library.families.shared import expected_tensors, qwen_vae_names, random_networks, vae_memory, weights
from library.families.shared.part_files import Part, complete
from library.families.shared.weights import assign
from library.imports import without_optional


def part(what: str, file: str) -> Part:
    return Part("vae", what, ("vae", file), (qwen_vae_names.DIFFUSERS_MARK,), expected_tensors.video_autoencoder)


class ImageVAE(nn.Module):
    """A video VAE that encodes and decodes single frames."""

    def __init__(self, network: Any):
        super().__init__()
        self.network = network
        self.config = SimpleNamespace(latent_channels=network.config.z_dim)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> the means [B, 16, H / 8, W / 8] of the posterior."""
        return self.network.encode(pixels[:, :, None]).latent_dist.mode()[:, :, 0]

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Means as returned by `encode` -> pixels [B, 3, H, W], in a tuple of one."""
        return (self.network.decode(latents[:, :, None], return_dict=False)[0][:, :, 0],)


def latents(vae: Any, pixels: Tensor) -> Tensor:
    """Pixels [B, 3, H, W] in [-1, 1] -> normalised means of an ImageVAE, float32 [B, 16, H / 8, W / 8]; not sampled."""
    with torch.no_grad(), torch.autocast(pixels.device.type, enabled=False):
        means = vae_memory.encode(vae, pixels.to(vae.device, vae.dtype)).float()
        mean, std = latent_statistics(vae, means.device)
        return (means - mean) / std


def denormalise_qwen(vae: Any, latents: Tensor) -> Tensor:
    mean, std = latent_statistics(vae, latents.device)
    return latents * std + mean


def latent_statistics(vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel of the encoder's output [C, 1, 1], as diffusers has them."""
    config = vae.network.config
    mean, std = (torch.tensor(values, device=device) for values in (config.latents_mean, config.latents_std))
    return mean[: config.z_dim, None, None], std[: config.z_dim, None, None]


def load_qwen_vae(path: Path, dtype: torch.dtype, mmap: bool = True) -> ImageVAE:
    """Read a VAE, single file or diffusers. Raises ConfigError."""
    file = weights.open_weights(path, mmap)
    with complete(path, "a VAE"):
        return build_qwen_vae(
            {
                plain: weights.cast_floating(file[name], dtype)
                for plain, name in qwen_vae_names.plain_qwen_vae_names(file).items()
            }
        )


def build_qwen_vae(tensors: Mapping[str, Tensor]) -> ImageVAE:
    """Return the VAE with the sizes of its tensors (diffusers' names), which are not copied."""
    steps = sorted({int(name.split(".")[2]) for name in tensors if name.startswith("encoder.down_blocks.")})
    downsamplers = {
        n: f"encoder.down_blocks.{n}" for n in steps if f"encoder.down_blocks.{n}.resample.1.weight" in tensors
    }
    base = tensors["encoder.conv_in.weight"].shape[0]
    resnets = min(downsamplers)  # per level; a downsampler follows them
    widths = [tensors[f"encoder.down_blocks.{n}.conv2.weight"].shape[0] for n in steps if n % (resnets + 1) == 0]
    return assign_to(
        empty_qwen_vae(
            base,
            tuple(width // base for width in widths),
            resnets,
            tensors["decoder.conv_in.weight"].shape[1],
            [f"{name}.time_conv.weight" in tensors for name in downsamplers.values()],
        ),
        tensors,
    )


def assign_to(vae: ImageVAE, tensors: Mapping[str, Tensor]) -> ImageVAE:
    assign(vae.network, tensors)
    return vae.eval().requires_grad_(False)


def empty_qwen_vae(base: int, widths: tuple[int, ...], resnets: int, channels: int, over_time: list[bool]) -> ImageVAE:
    """Return a VAE on the meta device; `widths` of its levels are multiples of `base`."""
    with without_optional("diffusers"):
        from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage

    network: Any = AutoencoderKLQwenImage
    module = random_networks.build_on_meta(
        lambda: network(
            base_dim=base, z_dim=channels, dim_mult=list(widths), num_res_blocks=resnets, temperal_downsample=over_time
        )
    )
    return ImageVAE(module)
