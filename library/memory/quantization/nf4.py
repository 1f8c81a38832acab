"""Frozen matrices in 4 bits: NormalFloat (nf4) with a scale for 64 values, whose scales have 8 bits (2305.14314).

bitsandbytes rounds and restores them. Its layer breaks a compiled graph, so only its operators are used, inside
operators that multiply at once: a graph that saw the restored matrix would keep it for the backward pass, in 16 bits.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from library.compiler.subclass import FOUR_BIT, wanted_type, with_forward
from library.families.stored_weights import restore_layer

VALUES_OF_A_SCALE = 64
SCALES_OF_A_SCALE = 256
BYTES = 0.5 + 1 / VALUES_OF_A_SCALE + 4 / (VALUES_OF_A_SCALE * SCALES_OF_A_SCALE)  # of a value
# Buffers of a layer: scales in 8 bits, the scales and the mean that restore these, and the numbers of those 8 bits.
BUFFERS = ("weight_scale", "scale_of_scales", "mean_of_scales", "scale_code")


def fits_nf4(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and layer.in_features % 2 == 0  # two values of a row share a byte


@torch.no_grad()
def quantize_nf4_(layer: nn.Linear, device: torch.device) -> None:
    """Store a frozen layer's weight in 4 bits in place. `device` does the rounding."""
    # It offers to install a package that only its own layers would use.
    logging.getLogger("bitsandbytes.backends").setLevel(logging.ERROR)
    from bitsandbytes import functional  # takes a second, so import it only when needed

    restore_layer(layer, torch.float32)
    storage, weight = layer.weight.device, layer.weight.data.to(device)
    if weight.dtype.itemsize == 1:  # of a file in fp8
        weight = weight.to(torch.bfloat16)
    rounded: Any = functional.quantize_4bit(  # declares members as optional that are there
        weight.contiguous(), blocksize=VALUES_OF_A_SCALE, compress_statistics=True, quant_type="nf4"
    )
    packed, state = rounded
    layer.weight.data = packed.view(layer.out_features, -1).to(storage)
    scales = (state.absmax, state.state2.absmax, state.offset, state.state2.code)
    for name, values in zip(BUFFERS, scales, strict=True):
        layer.register_buffer(name, values.to(storage), persistent=False)
    layer.__class__ = with_forward(type(layer), _forward_nf4, FOUR_BIT)


def _forward_nf4(layer: Any, x: Tensor) -> Tensor:
    """x [..., in] -> [..., out] in the compute dtype, with the restored weight."""
    dtype = wanted_type(x)
    output = _Nf4Product.apply(x.to(dtype), layer.weight, *(getattr(layer, name) for name in BUFFERS))
    return output if layer.bias is None else output + layer.bias.to(dtype)


class _Nf4Product(torch.autograd.Function):
    """x [..., in], weight [out, in / 2] and its scales -> [..., out]; a gradient for x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weight: Tensor) -> Tensor:
        ctx.save_for_backward(*weight)
        return torch.ops.kohya.nf4_product(x, *weight, False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return torch.ops.kohya.nf4_product(gradients[0], *ctx.saved_tensors, True), *[None] * (1 + len(BUFFERS))


@torch.library.custom_op("kohya::nf4_product", mutates_args=())
def nf4_product(  # noqa: PLR0913 - the parts of a weight
    x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor, mean: Tensor, code: Tensor, backward: bool
) -> Tensor:
    """Multiply x [..., in] by a transposed weight, or a gradient [..., out] by the weight itself."""
    weight = restore_nf4(packed, scales, outer, mean, code, x.dtype)
    return x @ (weight if backward else weight.t())


@nf4_product.register_fake
def _(  # noqa: PLR0913
    x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor, mean: Tensor, code: Tensor, backward: bool
) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[1] * 2 if backward else packed.shape[0]))


def restore_nf4(  # noqa: PLR0913
    packed: Tensor, scales: Tensor, outer: Tensor, mean: Tensor, code: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the weight [out, in]."""
    restore_scales = torch.ops.bitsandbytes.dequantize_blockwise.default
    scales = restore_scales(scales, outer, code, SCALES_OF_A_SCALE, torch.float32) + mean
    shape = (packed.shape[0], packed.shape[1] * 2)
    restore = torch.ops.bitsandbytes.dequantize_4bit.default
    return restore(packed, scales, VALUES_OF_A_SCALE, "nf4", shape, dtype)
