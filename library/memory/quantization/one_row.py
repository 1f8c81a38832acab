"""One row times a matrix of 8 bits, as where one image's conditioning goes through a block's modulation.

Such a product takes as long as reading the matrix does. Brought back to 16 bits for PyTorch's own product, the matrix
is read, written and read again, five bytes a number. In a compiled graph the kernel that adds up reads it as it is.
"""

import torch
from torch import Tensor


def is_one_row(x: Tensor) -> bool:
    """Whether x [rows, in] has one row, inside of what is compiled; elsewhere its terms would need memory."""
    return torch.compiler.is_compiling() and x.dim() == 2 and x.shape[0] == 1


# Why: docs/decisions/2026-11-23-one-row-is-read-in-8-bits.md
def multiplied(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [1, in], weight [out, in] in 8 bits, the scale of each of its rows [out], bias [out] -> [1, out] as x."""
    output = ((x.float() * weight.float()).sum(-1) * scale)[None]
    return (output if bias is None else output + bias.float()).to(x.dtype)
