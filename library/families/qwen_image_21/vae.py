"""Qwen-Image-2.1's VAE for single images with transparency: AutoencoderKLQwenImage21, sized by its tensors.

Latents here are [B, 16, H / 8, W / 8], as of other models; the file and the denoiser use squares of 2 by 2, so [B, 64,
H / 16, W / 16].
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from library.families import recognition
from library.families.qwen_image_21.facts import QWEN_21_VAE, recognise_qwen_21_part
from library.families.qwen_image_21.vae_names import plain_qwen_21_vae_names, plain_qwen_21_vae_shape
from library.families.shared import random_networks, vae_memory, weights
from library.families.shared.part_files import complete
from library.families.shared.qwen_vae import ImageVAE, latent_statistics
from library.families.shared.vae_tiles import decode_outer, encode_outer
from library.families.shared.weights import assign
from library.imports import without_optional


class Qwen21VAE(ImageVAE):
    """A VAE of single frames with an alpha channel: opaque when encoded, laid on white when decoded."""

    def __init__(self, network: Any):
        super().__init__(network)
        self.config.latent_channels //= 4

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> the means of the posterior [B, 16, H / 8, W / 8]."""
        posterior = self.network.encode(opaque(pixels)[:, :, None]).latent_dist
        return pixel_shuffle(posterior.mode()[:, :, 0], 2)

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Means as returned by `encode` -> pixels [B, 3, H, W], in a tuple of one."""
        return (on_white(self.network.decode(pixel_unshuffle(latents, 2)[:, :, None], return_dict=False)[0][:, :, 0]),)

    def decode_tiled(self, latents: Tensor) -> Tensor:
        """Decode one image [1, 16, h, w] in tiles, with the result of the whole image [1, 3, 8 h, 8 w]."""
        decoder = self.network.decoder
        hidden = decoder.conv_in(self.network.post_quant_conv(pixel_unshuffle(latents, 2)[:, :, None]))
        first, *others = decoder.up_blocks
        hidden = first(decoder.mid_block(hidden), first_chunk=True)[:, :, 0]
        outer = [
            (functools.partial(block, first_chunk=True), len(block.resnets), block.upsampler is not None)
            for block in others
        ]
        return on_white(decode_outer(decoder, hidden, outer))

    def encode_tiled(self, pixels: Tensor) -> Tensor:
        """Encode one image [1, 3, H, W] in tiles, with the result of the whole image [1, 16, H / 8, W / 8]."""
        encoder = self.network.encoder
        *blocks, last = encoder.down_blocks
        hidden = encode_outer(encoder, opaque(pixels), [(block, len(block.resnets), True) for block in blocks])
        hidden = encoder.norm_out(encoder.mid_block(last(hidden)))
        moments = self.network.quant_conv(encoder.conv_out(encoder.nonlinearity(hidden)))
        return pixel_shuffle(moments.chunk(2, dim=1)[0][:, :, 0], 2)


def opaque(pixels: Tensor) -> Tensor:
    """Pixels [B, 3, H, W] -> [B, 4, H, W]."""
    return torch.cat((pixels, torch.ones_like(pixels[:, :1])), dim=1)


def on_white(pixels: Tensor) -> Tensor:
    """Pixels [B, 4, H, W] in [-1, 1] -> [B, 3, H, W]."""
    share = (pixels[:, 3:] + 1) / 2
    return pixels[:, :3] * share + 1 - share


def qwen_21_latents(vae: Any, pixels: Tensor) -> Tensor:
    """Pixels [B, 3, H, W] in [-1, 1] -> normalised means, float32 [B, 16, H / 8, W / 8]; not sampled."""
    with torch.no_grad(), torch.autocast(pixels.device.type, enabled=False):
        means = vae_memory.encode(vae, pixels.to(vae.device, vae.dtype))
    mean, std = latent_statistics(vae, means.device)
    return pixel_shuffle((pixel_unshuffle(means.float(), 2) - mean) / std, 2)


def denormalise_qwen_21(vae: Any, latents: Tensor) -> Tensor:
    mean, std = latent_statistics(vae, latents.device)
    return pixel_shuffle(pixel_unshuffle(latents, 2) * std + mean, 2)


def load_qwen_21_vae(path: Path, dtype: torch.dtype, mmap: bool = True) -> Qwen21VAE:
    """Read a VAE, single file or diffusers. Raises ConfigError."""
    file = weights.open_weights(path, mmap)
    if not recognise_qwen_21_part(file.shapes()):
        raise recognition.wrong_kind_error(path, QWEN_21_VAE)
    with complete(path, QWEN_21_VAE):
        tensors = {
            plain: weights.cast_floating(file[name], dtype) for plain, name in plain_qwen_21_vae_names(file).items()
        }
        return build_qwen_21_vae(
            {name: tensor.view(plain_qwen_21_vae_shape(tuple(tensor.shape))) for name, tensor in tensors.items()}
        )


def build_qwen_21_vae(tensors: Mapping[str, Tensor]) -> Qwen21VAE:
    """Return the VAE with the sizes of its tensors (diffusers' names), which are not copied."""
    base = tensors["encoder.conv_in.weight"].shape[0]
    levels = len({name.split(".")[2] for name in tensors if name.startswith("encoder.down_blocks.")})
    resnets = len({name.split(".")[4] for name in tensors if name.startswith("encoder.down_blocks.0.resnets.")})
    last = f"resnets.{resnets - 1}.conv2.weight"
    widths = tuple(tensors[f"encoder.down_blocks.{n}.{last}"].shape[0] // base for n in range(levels))
    decoder_base = tensors["decoder.conv_out.weight"].shape[1] // widths[0]
    vae = empty_qwen_21_vae(
        (base, decoder_base),
        widths,
        resnets,
        tensors["decoder.conv_in.weight"].shape[1],
        [f"encoder.down_blocks.{n}.downsampler.time_conv.weight" in tensors for n in range(levels - 1)],
    )
    assign(vae.network, tensors)
    return vae.eval().requires_grad_(False)


def empty_qwen_21_vae(
    bases: tuple[int, int], widths: tuple[int, ...], resnets: int, channels: int, over_time: list[bool]
) -> Qwen21VAE:
    """Return a VAE on the meta device; `widths` of its levels are multiples of the `bases` of encoder and decoder."""
    with without_optional("diffusers"):
        from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import AutoencoderKLQwenImage21

    network: Any = AutoencoderKLQwenImage21
    module = random_networks.build_on_meta(
        lambda: network(
            base_dim=bases[0],
            decoder_base_dim=bases[1],
            z_dim=channels,
            dim_mult=list(widths),
            num_res_blocks=resnets,
            temperal_downsample=over_time,
        )
    )
    return Qwen21VAE(module)
