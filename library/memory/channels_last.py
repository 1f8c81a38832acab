"""Layers that keep images in the memory format channels_last, which makes convolutions fastest."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from library.compiler.subclass import keep_class_name, wanted_type, with_gradient


# Inductor assumes the strides of the first image size for all, so a layer that loses channels_last fails at the second.
# Why: docs/decisions/2026-11-20-channels-last-in-compiled-blocks.md
class GroupNorm(nn.GroupNorm):
    """PyTorch's group norm with the same values, but an output that is channels last in memory.

    PyTorch's own returns contiguous memory on CUDA. Inductor then converts it again for the next convolution, and
    applies the strides of the first image size to all sizes (torch 2.11 with dynamic sizes).
    """

    def forward(self, input: Tensor) -> Tensor:
        """[B, C, h, w] -> the same, in float32 under autocast, like PyTorch's own on a GPU."""
        if input.dim() != 4:
            return super().forward(input)
        output_dtype = torch.float32 if torch.is_autocast_enabled(input.device.type) else input.dtype
        return _normalised(self, input).to(output_dtype)


def _normalised(norm: nn.GroupNorm, images: Tensor) -> Tensor:
    """[B, C, h, w] -> float32 of the same shape, channels last."""
    number, channels, height, width = images.shape
    parts = (number, height * width, norm.num_groups, channels // norm.num_groups)
    x = images.permute(0, 2, 3, 1).reshape(parts).float()
    variance, mean = torch.var_mean(x, dim=(1, 3), keepdim=True, correction=0)
    x = ((x - mean) * torch.rsqrt(variance + norm.eps)).reshape(number, height, width, channels)
    if norm.weight is not None:
        x = x * norm.weight.float() + norm.bias.float()
    return x.permute(0, 3, 1, 2)


@functools.cache
def _with_channels_last(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a convolution class that converts its input, as diffusers passes a shortcut channels first in training."""

    class ChannelsLastInput(cls):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.contiguous(memory_format=torch.channels_last))

    return keep_class_name(ChannelsLastInput, cls)


def keep_channels_last(block: nn.Module) -> None:
    """Replace the classes of GroupNorms and shortcuts in a block before it is traced."""
    for name, module in block.named_modules():
        if type(module) is nn.GroupNorm:
            module.__class__ = GroupNorm
        elif name.endswith("conv_shortcut"):
            module.__class__ = _with_channels_last(type(module))


# Why: docs/decisions/2026-11-29-norms-between-blocks.md
class TokenNorm(nn.GroupNorm):
    """The norm of images that become tokens: PyTorch's own, and in compiled code one whose output is channels last.

    Its images are then tokens without a copy, and in the dtype in which the layer behind it computes.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[B, C, h, w] -> the same."""
        if not torch.compiler.is_compiling():
            return super().forward(with_gradient(input) if self.weight.requires_grad else input)
        return _normalised(self, input).to(wanted_type(input))


def compile_on_its_own(block: nn.Module) -> None:
    """Replace the class of a block that is a norm itself, before it is compiled. It computes the same until then."""
    if type(block) is nn.GroupNorm:
        block.__class__ = TokenNorm


@functools.cache
def with_images_last(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of diffusers' Transformer2DModel whose tokens become images without a copy."""

    class ImagesLast(cls):
        def _get_output_for_continuous_inputs(  # noqa: PLR0913 - diffusers' own arguments
            self, hidden_states: Tensor, residual: Tensor, batch_size: int, height: int, width: int, inner_dim: int
        ) -> Tensor:
            layer: Any = self.proj_out
            if self.use_linear_projection:
                return _as_images(layer(hidden_states), height, width) + residual
            return layer(_as_images(hidden_states, height, width)) + residual

    return keep_class_name(ImagesLast, cls)


def _as_images(tokens: Tensor, height: int, width: int) -> Tensor:
    """[B, h w, C] -> [B, C, h, w], channels last."""
    return tokens.unflatten(1, (height, width)).permute(0, 3, 1, 2)


class LearningGroupNorm(nn.GroupNorm):
    """PyTorch's group norm, with a workaround for trained weights whose input needs no gradient (see with_gradient)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(with_gradient(input))


def let_norms_learn(denoiser: nn.Module) -> None:
    """Apply the workaround to the trained GroupNorms that are still PyTorch's own."""
    for module in denoiser.modules():
        if type(module) is nn.GroupNorm and any(p.requires_grad for p in module.parameters()):
            module.__class__ = LearningGroupNorm


keep_class_name(LearningGroupNorm, nn.GroupNorm)
keep_class_name(GroupNorm, nn.GroupNorm)
keep_class_name(TokenNorm, nn.GroupNorm)
