"""Frozen matrices kept as 8-bit integers, each row with a scale of its own: as small as fp8, and more exact.

Rows of trained weights have no far outliers, so that 255 even steps fit them better than fp8's three bits of mantissa.
Products are computed in the usual type; inside a compiled block the way back is part of the graph.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from library.compiler.subclass import wanted_type, with_forward

LARGEST = 127
TINY = 1e-12  # the scale of a row of zeros


@torch.no_grad()
def quantize_int8_(layer: nn.Linear | nn.Conv2d, device: torch.device) -> None:
    """Keep a frozen layer's weight as integers, where it is. `device` does the rounding."""
    here = layer.weight.device
    rows = layer.weight.data.to(device).float().flatten(1)
    scale = rows.abs().amax(1, keepdim=True).clamp(min=TINY) / LARGEST
    few = (rows / scale).round().to(torch.int8).reshape(layer.weight.shape)
    order = torch.channels_last if few.dim() == 4 else torch.contiguous_format
    layer.weight.data = few.to(here).contiguous(memory_format=order)
    layer.register_buffer("weight_scale", scale[:, 0].to(here), persistent=False)
    layer.__class__ = with_forward(type(layer), _answer)


def _answer(layer: Any, x: Tensor) -> Tensor:
    dtype = wanted_type(x)
    scale = layer.weight_scale.view(-1, *[1] * (layer.weight.dim() - 1))
    weight = (layer.weight * scale).to(dtype)
    bias = None if layer.bias is None else layer.bias.to(dtype)
    if isinstance(layer, nn.Linear):
        return F.linear(x.to(dtype), weight, bias)
    return layer._conv_forward(x.to(dtype), weight, bias)
