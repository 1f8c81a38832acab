"""Products of frozen matrices in int8 (W8A8), which GPUs from RTX 20 on multiply faster than 16 bits.

A weight is stored as in `int8.py`: W = s * Q, Q in int8, s [out, 1] a scale per row. In the forward pass each row of
the input gets a scale r from its largest value, and x W^T = r (X Q^T) s^T, where X Q^T is summed in integers. The
gradient of the input is g W = (g * s^T) Q: the weight's scale lies along the summed dimension, so it is multiplied into
g before its rows are rounded. A GPU multiplies int8 fast only if both matrices are contiguous along the summed
dimension, so the backward pass transposes Q first, which a compiled block does as fast as a copy.
"""

from typing import Any

import torch
from torch import Tensor

from library.compiler import torch_private
from library.families.stored_weights import rotate_groups

INT8_MAX = 127
MIN_SCALE = 1e-12  # the scale of a row of zeros
ROTATION_BLOCK = 64  # values of a row that are rotated together


# cuBLASLt writes int32, which another kernel would have to read and scale.
# Why: docs/decisions/2026-11-22-int8-products-by-one-kernel.md
def supports_int8(device: torch.device) -> bool:
    """Return whether int8 products run on a device: an NVIDIA GPU from RTX 20 on, with Triton."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (7, 5) and torch_private.has_triton()


def quantize_rows_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [m, k] to int8; return them and the float32 scale of each row [m, 1] that restores it."""
    scale = rows.abs().amax(-1, keepdim=True).float().clamp(min=MIN_SCALE) / INT8_MAX
    return (rows.float() / scale).round().to(torch.int8), scale


def hadamard() -> Tensor:
    """Return the orthogonal and symmetric matrix [ROTATION_BLOCK, ROTATION_BLOCK] of +-1/8, by Sylvester's
    construction.
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < ROTATION_BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / ROTATION_BLOCK**0.5


def rotate_blocks(rows: Tensor, rotation: Tensor) -> Tensor:
    """Multiply each group of values of rows [..., n] by a Hadamard matrix, which spreads outliers and so reduces the
    rounding error.
    """
    return rotate_groups(rows, rotation)


class Int8Product(torch.autograd.Function):
    """x [rows, in], weight [out, in] in int8, its scale [out] -> [rows, out] in x's type; a gradient for x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """Round each row of x, and multiply."""
        ctx.save_for_backward(weight, scale)
        quantized, rows = quantize_rows_int8(x)
        return torch.ops.kohya.int8_product(quantized, weight, rows, scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Multiply the weight's scale into the gradient, round its rows, and multiply."""
        weight, scale = ctx.saved_tensors
        quantized, rows = quantize_rows_int8(gradients[0].float() * scale)
        transposed = weight.t().contiguous()
        return torch.ops.kohya.int8_product(quantized, transposed, rows, None, gradients[0].dtype), None, None


# A custom operator, which compiled graphs call unchanged: the same kernel and values, compiled or not.
@torch.library.custom_op("kohya::int8_product", mutates_args=())
def int8_product(left: Tensor, weight: Tensor, rows: Tensor, columns: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply left [m, k], int8 with scales `rows` [m, 1], by a transposed weight [n, k], int8 -> [m, n] in `dtype`.

    `columns` [n] are the scales of the weight's rows, None if they are 1.
    """
    scaled = torch_private.int_mm(left, weight.t()).float() * rows
    return (scaled if columns is None else scaled * columns).to(dtype)


@int8_product.register_fake
def _(left: Tensor, weight: Tensor, rows: Tensor, columns: Tensor | None, dtype: torch.dtype) -> Tensor:
    return left.new_empty((left.shape[0], weight.shape[0]), dtype=dtype)


@int8_product.register_kernel("cuda")
def _(left: Tensor, weight: Tensor, rows: Tensor, columns: Tensor | None, dtype: torch.dtype) -> Tensor:
    from library.memory.quantization import int8_triton as kernels  # PyTorch includes Triton only for GPUs

    return kernels.multiply(left, weight, rows, columns, dtype)
