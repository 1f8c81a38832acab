"""Products of one row with an 8-bit matrix, such as one image's conditioning in a block's modulation.

Such a product takes as long as reading the matrix. Dequantized to 16 bits for PyTorch's own product, the matrix is
read, written and read again, five bytes per value. In a compiled graph the summing kernel reads it directly.
"""

import torch
from torch import Tensor


def is_one_row(x: Tensor) -> bool:
    """Return whether x [rows, in] has one row, inside a compiled graph."""
    # In eager mode the summands would take memory.
    return torch.compiler.is_compiling() and x.dim() == 2 and x.shape[0] == 1


# Why: docs/decisions/2026-11-23-one-row-is-read-in-8-bits.md
def multiplied(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [1, in], 8-bit weight [out, in], its scale per row [out], bias [out] -> [1, out] in x's dtype."""
    output = ((x.float() * weight.float()).sum(-1) * scale)[None]
    return (output if bias is None else output + bias.float()).to(x.dtype)
