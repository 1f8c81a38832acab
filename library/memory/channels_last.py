"""Layers that keep images in the memory format channels_last, which makes convolutions fastest."""

import functools

import torch
from torch import Tensor, nn

from library.compiler.subclass import keep_class_name, with_gradient


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
        images, channels, height, width = input.shape
        parts = (images, height * width, self.num_groups, channels // self.num_groups)
        x = input.permute(0, 2, 3, 1).reshape(parts).float()
        variance, mean = torch.var_mean(x, dim=(1, 3), keepdim=True, correction=0)
        x = ((x - mean) * torch.rsqrt(variance + self.eps)).reshape(images, height, width, channels)
        if self.weight is not None:
            x = x * self.weight.float() + self.bias.float()
        output_dtype = torch.float32 if torch.is_autocast_enabled(input.device.type) else input.dtype
        return x.permute(0, 3, 1, 2).to(output_dtype)


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


class LearningGroupNorm(nn.GroupNorm):
    """PyTorch's own, with a workaround for trained weights whose input needs no gradient (see with_gradient)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(with_gradient(input))


def let_norms_learn(denoiser: nn.Module) -> None:
    """Apply the workaround to the trained GroupNorms that are still PyTorch's own."""
    for module in denoiser.modules():
        if type(module) is nn.GroupNorm and any(p.requires_grad for p in module.parameters()):
            module.__class__ = LearningGroupNorm


keep_class_name(LearningGroupNorm, nn.GroupNorm)
keep_class_name(GroupNorm, nn.GroupNorm)
