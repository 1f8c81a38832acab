"""Encode and decode one picture in tiles: bands of rows, with the result of the whole picture.

Each layer reads a few rows beyond its tile, and its result is cropped to the tile, so there are no seams to blend. The
middle of a VAE, whose attention sees the whole picture, is small and runs at once.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

TILE_VALUES = 512 * 512 * 128  # values of a layer's widest input or output in a tile
Layer = Callable[..., Tensor]  # tiles [1, C, h, W] of its inputs -> a tile [1, D, h * up // down, W * up // down]


@dataclass(frozen=True)
class Reach:
    """The rows that a layer reads beyond a tile on both sides, how it changes the size, and its values in memory."""

    channels: int  # most values at one position of the input
    halo: int = 1  # a multiple of `down`
    up: int = 1
    down: int = 1

    def rows(self, width: int) -> int:
        """Return the number of rows of a tile of this width."""
        fitting = TILE_VALUES // (self.channels * width)
        # A smaller tile would spend more on the rows around it than on its own.
        return max(fitting // self.down * self.down, 2 * self.halo, self.down)


class Activations:
    """The activations [1, C, H, W] of a picture, stored row by row as [H, C, W], with the statistics of a channel.

    `rows` may be on the host; tiles are taken from it to `device`, and no copy waits for the device.
    """

    def __init__(self, rows: Tensor, device: torch.device):
        self.rows, self.device = rows, device
        self._means, self._variances = torch.zeros(2, rows.shape[1], device=device)
        self._stored = 0  # number of rows that the statistics are of

    @classmethod
    def of(cls, values: Tensor) -> "Activations":
        """Store activations [1, C, H, W] on their device."""
        activations = cls(torch.empty_like(values[0].permute(1, 0, 2)).contiguous(), values.device)
        activations.put(0, values)
        return activations

    def put(self, top: int, tile: Tensor) -> None:
        """Store a tile [1, C, h, W] from row `top`."""
        height = tile.shape[-2]
        self.rows[top : top + height].copy_(tile[0].permute(1, 0, 2).contiguous(), non_blocking=self.rows.is_pinned())
        variance, mean = torch.var_mean(tile[0].float(), dim=(1, 2), correction=0)
        self._stored += height
        share, distance = height / self._stored, mean - self._means
        self._means += share * distance
        # Parallel variance of Chan et al.: no large squares whose difference would be inexact.
        self._variances += share * (variance - self._variances + (1 - share) * distance.square())

    def take(self, start: int, end: int) -> Tensor:
        return self.rows[start:end].to(self.device, non_blocking=True).permute(1, 0, 2).contiguous()[None]

    def whole(self) -> Tensor:
        return self.take(0, len(self.rows))

    def normalise(self, norm: nn.GroupNorm, tile: Tensor) -> Tensor:
        """Apply a GroupNorm to a tile with the statistics of the whole picture."""
        means, variances = (values.view(norm.num_groups, -1) for values in (self._means, self._variances))
        mean = means.mean(dim=1, keepdim=True)
        variance = (variances + (means - mean).square()).mean(dim=1, keepdim=True)
        mean, variance = (values.expand_as(means).flatten() for values in (mean, variance))
        weight, bias = norm.weight.float(), norm.bias.float()
        # Given statistics make it a batch norm in evaluation mode, which computes 16-bit tiles in float32, too.
        return functional.batch_norm(tile, mean, variance, weight, bias, training=False, eps=norm.eps)


# Why: docs/decisions/2026-11-28-vae-tiles-are-exact.md
def in_tiles(layer: Layer, inputs: Sequence[Activations], reach: Reach, on_host: bool = True) -> Activations:
    """Run a layer tile by tile over inputs of equal height. The result is stored on the host, or else on the device."""
    device, height, width = inputs[0].device, len(inputs[0].rows), inputs[0].rows.shape[-1]
    output: Activations | None = None
    step = reach.rows(width)
    for top in range(0, height, step):
        bottom = min(top + step, height)
        start, end = max(top - reach.halo, 0), min(bottom + reach.halo, height)
        tile = layer(*(values.take(start, end) for values in inputs))
        first, last = ((row - start) * reach.up // reach.down for row in (top, bottom))
        if output is None:
            shape = height * reach.up // reach.down, tile.shape[1], tile.shape[-1]
            output = Activations(_empty(shape, tile, on_host), device)
        output.put(top * reach.up // reach.down, tile[..., first:last, :])
    assert output is not None  # a picture has rows
    return output


def _empty(shape: tuple[int, ...], like: Tensor, on_host: bool) -> Tensor:
    if not on_host:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    if like.device.type == "cuda":
        # Copies from and to pinned memory do not wait for the device. The system may limit it.
        with contextlib.suppress(RuntimeError):
            return torch.empty(shape, dtype=like.dtype, pin_memory=True)
    return torch.empty(shape, dtype=like.dtype)


@torch.no_grad()
def decode_in_tiles(vae: Any, latents: Tensor) -> Tensor:
    """Input of the decoder [1, C, h, w] -> pixels [1, 3, 8 h, 8 w]; `vae` is an AutoencoderKL or an ImageVAE."""
    if own := getattr(vae, "decode_tiled", None):
        return own(latents)
    if network := getattr(vae, "network", None):
        return _decode_qwen(network, latents)
    decoder = vae.decoder
    hidden = latents if vae.post_quant_conv is None else vae.post_quant_conv(latents)
    values = Activations.of(decoder.mid_block(decoder.conv_in(hidden)))
    for block in decoder.up_blocks:
        values = _resnets(block.resnets, values)
        for upsampler in block.upsamplers or ():
            values = in_tiles(upsampler, [values], Reach(channels=4 * upsampler.channels, up=2))

    def last(tile: Tensor) -> Tensor:
        return decoder.conv_out(decoder.conv_act(values.normalise(decoder.conv_norm_out, tile)))

    return in_tiles(last, [values], Reach(channels=decoder.conv_out.in_channels), on_host=False).whole()


@torch.no_grad()
def encode_in_tiles(vae: Any, pixels: Tensor) -> Tensor:
    """Pixels [1, 3, H, W] -> the posterior's means and log variances of an AutoencoderKL [1, 2 C, H / 8, W / 8], or the
    means of an ImageVAE [1, C, H / 8, W / 8].
    """
    if own := getattr(vae, "encode_tiled", None):
        return own(pixels)
    if network := getattr(vae, "network", None):
        return _encode_qwen(network, pixels)
    encoder = vae.encoder
    values = in_tiles(encoder.conv_in, [Activations.of(pixels)], Reach(channels=encoder.conv_in.out_channels))
    *blocks, last = encoder.down_blocks
    for block in blocks:
        values = _resnets(block.resnets, values)
        for downsampler in block.downsamplers:
            values = in_tiles(downsampler, [values], Reach(channels=downsampler.channels, halo=2, down=2))
    hidden = encoder.mid_block(last(values.whole()))
    moments = encoder.conv_out(encoder.conv_act(encoder.conv_norm_out(hidden)))
    return moments if vae.quant_conv is None else vae.quant_conv(moments)


def _resnets(resnets: Iterable[Any], values: Activations) -> Activations:
    for resnet in resnets:
        values = _resnet(resnet, values)
    return values


def _resnet(resnet: Any, values: Activations) -> Activations:
    """Run diffusers' ResnetBlock2D in two layers, since its second norm needs all of the first one's output."""
    reach = Reach(channels=max(resnet.in_channels, resnet.out_channels))

    def first(tile: Tensor) -> Tensor:
        return resnet.conv1(resnet.nonlinearity(values.normalise(resnet.norm1, tile)))

    hidden = in_tiles(first, [values], reach)

    def second(tile: Tensor, shortcut: Tensor) -> Tensor:
        if resnet.conv_shortcut is not None:
            shortcut = resnet.conv_shortcut(shortcut)
        return shortcut + resnet.conv2(resnet.nonlinearity(hidden.normalise(resnet.norm2, tile)))

    return in_tiles(second, [hidden, values], reach)


def _decode_qwen(network: Any, latents: Tensor) -> Tensor:
    """Decode with an AutoencoderKLQwenImage."""
    decoder = network.decoder
    hidden = decoder.up_blocks[0](decoder.mid_block(decoder.conv_in(network.post_quant_conv(latents[:, :, None]))))
    outer = [(block, len(block.resnets), block.upsamplers is not None) for block in decoder.up_blocks[1:]]
    return decode_outer(decoder, hidden[:, :, 0], outer)


def decode_outer(decoder: Any, hidden: Tensor, blocks: Sequence[tuple[Layer, int, bool]]) -> Tensor:
    """Run the outer blocks of a decoder of single frames on [1, C, h, w]; its norms see one position, so that all of
    them are one layer. `blocks` have the number of their resnets, and whether they double the size.
    """

    def outer(tile: Tensor) -> Tensor:
        tile = tile[:, :, None]
        for block, _, _ in blocks:
            tile = block(tile)
        return decoder.conv_out(decoder.nonlinearity(decoder.norm_out(tile)))[:, :, 0]

    halo, up = 1, 1
    for _, resnets, doubles in reversed(blocks):
        if doubles:
            halo, up = (halo + 2) // 2, 2 * up
        halo += 2 * resnets
    reach = Reach(channels=hidden.shape[1] * up**2, halo=halo, up=up)
    return in_tiles(outer, [Activations.of(hidden)], reach, on_host=False).whole().clamp(-1, 1)


def _encode_qwen(network: Any, pixels: Tensor) -> Tensor:
    encoder = network.encoder
    layers = [(layer, hasattr(layer, "resample")) for layer in encoder.down_blocks]  # and whether it halves the size
    last = max(number for number, (_, halves) in enumerate(layers) if halves) + 1
    hidden = encode_outer(encoder, pixels, [(layer, int(not halves), halves) for layer, halves in layers[:last]])
    for layer, _ in layers[last:]:
        hidden = layer(hidden)
    moments = encoder.conv_out(encoder.nonlinearity(encoder.norm_out(encoder.mid_block(hidden))))
    return network.quant_conv(moments).chunk(2, dim=1)[0][:, :, 0]


def encode_outer(encoder: Any, pixels: Tensor, blocks: Sequence[tuple[Layer, int, bool]]) -> Tensor:
    """Run the first layer and the outer blocks of an encoder of single frames on [1, C, H, W] -> [1, D, 1, h, w], as
    `decode_outer` does. `blocks` have the number of their resnets, and whether they halve the size.
    """

    def outer(tile: Tensor) -> Tensor:
        tile = encoder.conv_in(tile[:, :, None])
        for block, _, _ in blocks:
            tile = block(tile)
        return tile[:, :, 0]

    halo, down = 0, 1
    for _, resnets, halves in reversed(blocks):
        if halves:
            halo, down = 2 * halo + 2, 2 * down
        halo += 2 * resnets
    halo = -(-(halo + 1) // down) * down
    reach = Reach(channels=2 * encoder.conv_in.out_channels, halo=halo, down=down)
    return in_tiles(outer, [Activations.of(pixels)], reach, on_host=False).whole()[:, :, None]
