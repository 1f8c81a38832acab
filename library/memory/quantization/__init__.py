"""Linear weights stored in 8 bits, and matrix products computed with them."""

import torch
from torch import Tensor, nn

ALIGNED = 16  # fp8 hardware requires row lengths in this multiple; int8 rows then start at 16-byte boundaries


def multiplies_in_8_bits(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and not (layer.in_features % ALIGNED or layer.out_features % ALIGNED)


def is_one_row(x: Tensor) -> bool:
    """Return whether x [rows, in] has one row, inside a compiled graph."""
    # In eager mode the summands would take memory.
    return torch.compiler.is_compiling() and x.dim() == 2 and x.shape[0] == 1


# Such a product takes as long as reading the matrix. Dequantized to 16 bits for PyTorch's own product, the matrix is
# read, written and read again, five bytes per value. In a compiled graph the summing kernel reads it directly.
# Why: docs/decisions/2026-11-23-one-row-is-read-in-8-bits.md
def multiply_one_row(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [1, in], 8-bit weight [out, in], its scale per row [out], bias [out] -> [1, out] in x's dtype."""
    output = ((x.float() * weight.float()).sum(-1) * scale)[None]
    return (output if bias is None else output + bias.float()).to(x.dtype)
