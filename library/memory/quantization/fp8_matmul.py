"""Products of frozen matrices in fp8, for GPUs that support it (RTX 40, H100 and later).

A weight is stored as float8_e4m3 with a scale per row. In the forward pass each row of the input gets a scale from its
largest value, and so does each row of the gradient in the backward pass; products are summed in float32. Row-wise
scaling is done by PyTorch's `_scaled_mm`; the rest is arithmetic that a compiled block fuses with its neighbours.

With W = s * Q (s [out, 1], Q in 8 bits) the output is x W^T = (x Q^T) * s^T, and the gradient g W = (g * s^T) Q: the
weight's scale is multiplied into g before that is rounded, since hardware can only scale dimensions that are not
summed.

The backward product reads the weight transposed: it is transposed in each step, or stored transposed as well.
"""

from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from library.compiler import torch_private
from library.compiler.subclass import with_forward
from library.families.stored_weights import forget_stored, restore_layer, stored_weight
from library.memory import host_memory, quantization

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max
MIN_SCALE = 1e-12  # the scale of a row of zeros
MAX_ROUNDED = 2**22  # most values to round at once: keeps temporary memory small, without holes between weights


# Row scales are more exact than a plain cast, and a compiled block makes the rounding cheap.
# Why: docs/decisions/2026-11-22-fp8-products-scale-by-row.md
def supports_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9) and torch.version.hip is None


@torch.no_grad()
def quantize_fp8_(layer: nn.Linear, device: torch.device, storage: torch.device) -> None:
    """Store a frozen layer's weight in 8 bits on `storage`, and multiply with it. A weight in fp8 keeps
    its bits, and the scale of its file.
    """
    # Rounding on `device` is a hundred times as fast as on a CPU.
    stored = stored_weight(layer)
    if stored and stored.values.dtype != FP8_DTYPE:
        restore_layer(layer, torch.float32)
        stored = None
    weight = layer.weight.data
    scale = stored.factors.to(storage) if stored else torch.ones(layer.out_features, device=storage)
    forget_stored(layer)
    if weight.dtype == FP8_DTYPE:
        layer.weight.data = weight.to(storage)
    else:
        quantized = torch.empty_like(weight, dtype=FP8_DTYPE, device=storage)
        if storage.type != device.type:
            host_memory.touch(quantized.view(torch.uint8))
        number = max(1, MAX_ROUNDED // layer.in_features)
        for first in range(0, layer.out_features, number):
            rows = slice(first, first + number)
            quantized[rows], scale[rows, None] = quantize_rows_fp8(weight[rows].to(device))
        layer.weight.data = quantized
    layer.register_buffer("weight_scale", scale, persistent=False)
    layer.__class__ = with_forward(type(layer), _forward_fp8)


def multiplies_fp8(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a layer's frozen weight is stored for products in fp8."""
    return quantization.multiplies_in_8_bits(layer) and cast(nn.Linear, layer).weight.dtype == FP8_DTYPE


def keep_transposed(layer: nn.Linear) -> None:
    """Store the weight of a layer that multiplies in fp8 a second time, transposed, for the backward pass."""
    layer.register_buffer("transposed_weight", layer.weight.data.t().contiguous(), persistent=False)


def quantize_rows_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [..., n] to 8 bits; return them and the float32 scale of each row [..., 1] that restores it."""
    scale = rows.abs().amax(-1, keepdim=True).float().clamp(min=MIN_SCALE) / FP8_MAX
    return (rows.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE), scale


def _forward_fp8(layer: Any, x: Tensor) -> Tensor:
    """x [..., in] -> [..., out] in bfloat16, with input and weight in 8 bits."""
    if quantization.is_one_row(x):
        return quantization.multiply_one_row(x.to(torch.bfloat16), layer.weight, layer.weight_scale, layer.bias)
    if x.dim() == 2:  # one row per image is bound by reading the weight, which 8-bit products do not speed up
        weight = layer.weight.to(torch.bfloat16) * layer.weight_scale[:, None].to(torch.bfloat16)
        return F.linear(x.to(torch.bfloat16), weight, _bias(layer))
    rows = x.to(torch.bfloat16).flatten(0, -2)
    transposed = getattr(layer, "transposed_weight", None)
    output = _Product.apply(rows, layer.weight, layer.weight_scale, transposed).unflatten(0, x.shape[:-1])
    return output if layer.bias is None else output + _bias(layer)


def _bias(layer: Any) -> Tensor | None:
    return None if layer.bias is None else layer.bias.to(torch.bfloat16)


class _Product(torch.autograd.Function):
    """[rows, in] -> [rows, out], with a gradient for the input only; `transposed` is the weight [in, out] or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, transposed: Tensor | None) -> Tensor:
        ctx.is_transposed = transposed is not None
        ctx.save_for_backward(weight if transposed is None else transposed, scale)
        quantized, rows = quantize_rows_fp8(x)
        return _multiplied(quantized, weight.t(), rows, scale[None])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        weight, scale = ctx.saved_tensors
        quantized, rows = quantize_rows_fp8(gradients[0].float() * scale)
        # The hardware sums along contiguous rows, here those of the transposed weight.
        columns = weight.t() if ctx.is_transposed else weight.t().contiguous().t()
        ones = torch.ones_like(columns[:1], dtype=torch.float32)
        return _multiplied(quantized, columns, rows, ones), None, None, None


def _multiplied(left: Tensor, right: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Multiply left [m, k] (contiguous rows) by right [k, n] (contiguous columns), both in 8 bits; scales [m, 1] and
    [1, n] -> bfloat16 [m, n].
    """
    if left.device.type != "cuda":  # the same sums for tests on a CPU
        return ((left.float() @ right.float()) * rows * columns).to(torch.bfloat16)
    return torch_private.scaled_mm(left, right, rows, columns)
