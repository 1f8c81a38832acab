"""Linear weights stored in 8 bits, and matrix products computed with them."""

from torch import nn

ALIGNED = 16  # fp8 hardware requires row lengths in this multiple; int8 rows then start at 16-byte boundaries


def multiplies_in_8_bits(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and not (layer.in_features % ALIGNED or layer.out_features % ALIGNED)
