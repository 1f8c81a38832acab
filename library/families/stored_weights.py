"""Weights that stay as their file has them, in 8 bits with scales, from reading until they are stored for a training.

int8 matrices may be rotated ("ConvRot" of ComfyUI): each group of a row's values is multiplied by a regular Hadamard
matrix, which is its own inverse and spreads outliers.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FILE_SCALE, ROTATED = "file_scale", "rotated_by"  # buffer and attribute of a layer whose weight waits as in its file


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A matrix as a file has it, with a factor for each row."""

    values: Tensor  # int8 or float8_e4m3fn [out, in]
    factors: Tensor  # float32 [out]
    group: int = 0  # values of a row that are rotated together; 0 for none

    def row_slice(self, piece: int, pieces: int) -> "ScaledWeight":
        values = self.values.chunk(pieces)[piece].clone()  # a view would keep the other slices in memory
        return ScaledWeight(values, self.factors.chunk(pieces)[piece].clone(), self.group)


def restore(values: Tensor, factors: Tensor, group: int) -> Tensor:
    """Return the weight in float32: `factors` is one, or one of each row, or of each block of a row."""
    factors = factors.float()
    if factors.numel() == 1:
        weight = values.float() * factors.view(())
    else:
        rows = len(values)
        blocks = values.float().view(rows, factors.numel() // rows, -1)
        weight = (blocks * factors.view(rows, -1, 1)).view(values.shape)
    return rotate_groups(weight, rotation_matrix(group).to(weight.device)) if group else weight


def factor_of_each_row(values: Tensor, factors: Tensor) -> Tensor | None:
    """Return factors [out] in float32, None if they belong to blocks."""
    if factors.numel() not in (1, len(values)):
        return None
    return factors.float().reshape(-1).expand(len(values)).contiguous()


@functools.cache
def rotation_matrix(group: int) -> Tensor:
    """Return the regular Hadamard matrix [group, group], orthogonal and symmetric: Kronecker powers of its smallest."""
    smallest = 1 - 2 * torch.eye(4).flip(0)
    matrix = torch.ones(1, 1)
    while len(matrix) < group:
        matrix = torch.kron(matrix, smallest)
    return matrix / group**0.5


def rotate_groups(rows: Tensor, rotation: Tensor) -> Tensor:
    """Multiply each group of values of rows [..., n] by a rotation."""
    return (rows.unflatten(-1, (-1, len(rotation))) @ rotation).flatten(-2)


# ---- layers


def wait_as_stored(model: nn.Module, name: str, weight: ScaledWeight) -> None:
    """Note at the layer of a weight how its values become numbers, until it is stored for a training."""
    layer: Any = model.get_submodule(name.rpartition(".")[0])
    layer.register_buffer(FILE_SCALE, weight.factors.to(weight.values.device), persistent=False)
    setattr(layer, ROTATED, weight.group)


def stored_weight(layer: Any) -> ScaledWeight | None:
    """Return the weight of a layer that waits as in its file; None for any other."""
    if (factors := layer._buffers.get(FILE_SCALE)) is None:
        return None
    return ScaledWeight(layer.weight.data, factors, getattr(layer, ROTATED))


def forget_stored(layer: Any) -> None:
    """Remove the notes of `wait_as_stored`."""
    if layer._buffers.pop(FILE_SCALE, None) is not None:
        layer._non_persistent_buffers_set.discard(FILE_SCALE)
        delattr(layer, ROTATED)


def restore_layer(layer: Any, dtype: torch.dtype) -> None:
    """Give a layer that waits as in its file its numbers in `dtype`; others stay as they are."""
    if weight := stored_weight(layer):
        layer.weight.data = restore(weight.values, weight.factors, weight.group).to(dtype)
        forget_stored(layer)
