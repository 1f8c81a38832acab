"""Frozen matrices stored as int8 with a scale per row: as small as fp8, and more exact.

Rows of trained weights have no far outliers, so 255 even steps fit them better than fp8's three mantissa bits. Products
are computed in the usual dtype, with dequantization fused into a compiled block, or in int8.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from library.compiler.subclass import wanted_type, with_forward
from library.families.stored_weights import ScaledWeight, forget_stored, restore_layer, rotation_matrix, stored_weight
from library.memory import quantization
from library.memory.quantization import int8_matmul, multiplies_in_8_bits


@torch.no_grad()
def quantize_int8_(
    layer: nn.Linear | nn.Conv2d, device: torch.device, multiply: bool = False, rotate: bool = False
) -> None:
    """Store a frozen layer's weight as int8 in place. `device` does the rounding.

    With `multiply` a linear layer also multiplies in int8, if its sizes allow that; with `rotate` it rotates the rows
    of input and weight alike before rounding, which leaves their products unchanged.
    """
    storage, dtype = layer.weight.device, layer.weight.dtype
    in_int8 = multiply and multiplies_in_8_bits(layer)
    if (stored := stored_weight(layer)) and stored.values.dtype == torch.int8:
        _keep_int8(layer, stored, in_int8)
        return
    restore_layer(layer, torch.float32)
    rows = layer.weight.data.to(device).float().flatten(1)
    rotate = rotate and in_int8 and rows.shape[1] % int8_matmul.ROTATION_BLOCK == 0
    if rotate:
        rotation = int8_matmul.hadamard().to(device)
        rows = int8_matmul.rotate_blocks(rows, rotation)
        stored_rotation = rotation.to(storage, dtype if dtype.itemsize > 1 else torch.bfloat16)
        layer.register_buffer("rotation", stored_rotation, persistent=False)
    quantized, scale = int8_matmul.quantize_rows_int8(rows)
    quantized = quantized.reshape(layer.weight.shape)
    order = torch.channels_last if quantized.dim() == 4 else torch.contiguous_format
    layer.weight.data = quantized.to(storage).contiguous(memory_format=order)
    layer.register_buffer("weight_scale", scale[:, 0].to(storage), persistent=False)
    forward = _forward_rotated if rotate else _forward_int8 if in_int8 else _forward_dequantized
    layer.__class__ = with_forward(type(layer), forward)


def _keep_int8(layer: Any, stored: ScaledWeight, in_int8: bool) -> None:
    """Multiply with the unchanged values of a layer's file, rotating its input as they are rotated."""
    forget_stored(layer)
    layer.register_buffer("weight_scale", stored.factors, persistent=False)
    forward = _forward_int8 if in_int8 else _forward_dequantized
    if stored.group:
        rotation = rotation_matrix(stored.group).to(stored.values.device, torch.bfloat16)  # exact: of powers of two
        layer.register_buffer("rotation", rotation, persistent=False)
        forward = _forward_rotated if in_int8 else _forward_rotated_dequantized
    layer.__class__ = with_forward(type(layer), forward)


def _forward_rotated_dequantized(layer: Any, x: Tensor) -> Tensor:
    dtype = wanted_type(x)
    return _forward_dequantized(layer, int8_matmul.rotate_blocks(x.to(dtype), layer.rotation.to(dtype)))


def _forward_rotated(layer: Any, x: Tensor) -> Tensor:
    """x [..., in] -> [..., out]: rotate the input like the weight, then multiply in int8."""
    dtype = wanted_type(x)
    return _forward_int8(layer, int8_matmul.rotate_blocks(x.to(dtype), layer.rotation.to(dtype)))


def _forward_int8(layer: Any, x: Tensor) -> Tensor:
    """x [..., in] -> [..., out], with input and weight in int8."""
    if x.dim() == 2:  # one row per image is bound by reading the weight, which int8 products do not speed up
        return _forward_dequantized(layer, x)
    dtype = wanted_type(x)
    rows = x.to(dtype).flatten(0, -2)
    output = int8_matmul.Int8Product.apply(rows, layer.weight, layer.weight_scale).unflatten(0, x.shape[:-1])
    return output if layer.bias is None else output + layer.bias.to(dtype)


def _forward_dequantized(layer: Any, x: Tensor) -> Tensor:
    """Compute the layer in the compute dtype with the dequantized weight."""
    dtype = wanted_type(x)
    if quantization.is_one_row(x):
        return quantization.multiply_one_row(x.to(dtype), layer.weight, layer.weight_scale, layer.bias)
    scale = layer.weight_scale.view(-1, *[1] * (layer.weight.dim() - 1))
    weight = (layer.weight * scale).to(dtype)
    bias = None if layer.bias is None else layer.bias.to(dtype)
    if isinstance(layer, nn.Linear):
        return F.linear(x.to(dtype), weight, bias)
    return layer._conv_forward(x.to(dtype), weight, bias)
