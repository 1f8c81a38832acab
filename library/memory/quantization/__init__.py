"""Weights of linear layers stored in 8 bits, and matrix products computed in them."""

from torch import nn

ALIGNED = 16  # fp8 hardware multiplies rows of such lengths only; rows of int8 then begin where a GPU reads 16 bytes


def multiplies_in_8_bits(layer: nn.Module) -> bool:
    """Whether a layer's matrix has a size that can be multiplied in fp8 or int8."""
    return isinstance(layer, nn.Linear) and not (layer.in_features % ALIGNED or layer.out_features % ALIGNED)
