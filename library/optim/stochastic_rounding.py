"""Stochastic rounding: weights in half precision that keep small updates.

A bfloat16 number has 8 significant bits. An update below 1/512 of a weight would be lost by rounding to nearest, so the
sum is rounded up or down at random: right on average, however small the update.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from library.compiler.torch_private import copy_all
from library.methods.sharding import Rows

LOW = 1 << 16  # range of the bits that bfloat16 drops from a float32
T = TypeVar("T")
HALF = (torch.bfloat16, torch.float16)
UPPER = 1 if sys.byteorder == "little" else 0  # which half of a float32 is its bfloat16
SMALL = 2**18  # most values of a tensor whose kernels take less time than their launches


class StepRNG:
    """Random numbers that depend only on the seed, the step and the weight, so that a resumed run draws the same."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator_for(self, device: torch.device, step: int, number: int) -> torch.Generator:
        """Return the generator of a step for the `number`-th weight."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        text = f"rounding {self._seed} {step} {number}".encode()
        return self._generators[device].manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8]) >> 1)


# Rounding to nearest would drop every update smaller than half a step of the dtype.
# Why: docs/decisions/2026-11-22-stochastic-rounding.md
@torch.no_grad()
def write_rounded(into: Tensor, exact: Tensor, generator: torch.Generator, rows: Rows | None = None) -> None:
    """Write float32 values into a tensor of equal shape, with stochastic rounding to bfloat16, else to the nearest.
    `rows` is the tensor's part of a weight, which is rounded as in the whole.
    """
    # float16 has three more bits, and loss scaling handles its small values, so it is rounded to nearest.
    if into.dtype != torch.bfloat16:
        into.copy_(exact)
        return
    # A scalar has no last dimension to split into halves below.
    if not exact.dim():
        into, exact = into.view(1), exact.view(1)
    # A bfloat16 is the upper half of a float32. Adding a number below 2^16 to the whole carries into that half exactly
    # as often as the lower half is large.
    # Draw for the whole weight, so that rounding does not depend on the number of processes.
    shape = rows.shape if rows else exact.shape
    drawn = torch.empty(shape, dtype=torch.int32, device=exact.device).random_(0, LOW, generator=generator)
    bits = rows.own(drawn) if rows else drawn
    bits += exact.view(torch.int32)
    into.copy_(bits.view(torch.bfloat16).unflatten(-1, (-1, 2))[..., UPPER])
    # The carry can turn a NaN into a number, which would hide it; zero times a NaN brings it back.
    into.add_(exact, alpha=0)


# ---- many tensors at once


@dataclass(frozen=True, slots=True, eq=False)
class Rounding:
    """Float32 values, and the tensor of equal shape that they are rounded into; `rows` as in `write_rounded`."""

    into: Tensor
    exact: Tensor
    rows: Rows | None

    @property
    def joins_others(self) -> bool:
        return self.into.dtype == torch.bfloat16 and self.rows is None and self.exact.numel() <= SMALL


@torch.no_grad()
def widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return all tensors in float32, copied unless they are. Small ones are copied together, a few kernels for all."""
    wide: dict[int, Tensor] = {}
    small = [t for t in tensors if t.dtype == torch.bfloat16 and t.numel() <= SMALL]
    for same in _group_by_device(small, lambda tensor: tensor):
        parts = torch.cat([t.reshape(-1) for t in same]).float().split([t.numel() for t in same])
        wide |= {id(t): part.view(t.shape) for t, part in zip(same, parts, strict=True)}
    return [wide[id(t)] if id(t) in wide else t.float() if t.dtype in HALF else t for t in tensors]


@torch.no_grad()
def write_all_rounded(weights: Sequence[tuple[int, Sequence[Rounding]]], rng: StepRNG, step: int) -> None:
    """Write weights, given by their number with all tensors to round for each, as `write_rounded` does one by one: with
    the same random numbers, but a few kernels for all small tensors together.
    """
    small = [rounding for _, roundings in weights for rounding in roundings if rounding.joins_others]
    groups = [_JoinedRoundings(same) for same in _group_by_device(small, lambda rounding: rounding.exact)]
    draws = {id(rounding): draw for group in groups for rounding, draw in group.draws}
    for number, roundings in weights:
        generator = rng.generator_for(roundings[0].into.device, step, number)
        for rounding in roundings:
            if id(rounding) in draws:
                draws[id(rounding)].random_(0, LOW, generator=generator)
            else:
                write_rounded(rounding.into, rounding.exact, generator, rounding.rows)
    for group in groups:
        group.write()


class _JoinedRoundings:
    """Small tensors of one device that are rounded together: first fill all `draws`, then `write`."""

    def __init__(self, roundings: Sequence[Rounding]) -> None:
        self._roundings = roundings
        self._sizes = [rounding.exact.numel() for rounding in roundings]
        self._bits = torch.empty(sum(self._sizes), dtype=torch.int32, device=roundings[0].exact.device)
        self.draws = [*zip(roundings, self._bits.split(self._sizes), strict=True)]

    def write(self) -> None:
        exact = torch.cat([rounding.exact.reshape(-1) for rounding in self._roundings])
        self._bits += exact.view(torch.int32)
        rounded = self._bits.view(torch.bfloat16)[UPPER::2].contiguous().add_(exact, alpha=0)
        into = [rounding.into for rounding in self._roundings]
        parts = zip(into, rounded.split(self._sizes), strict=True)
        copy_all(into, [part.view(tensor.shape) for tensor, part in parts])


def _group_by_device(items: Iterable[T], tensor_of: Callable[[T], Tensor]) -> list[list[T]]:
    groups: dict[torch.device, list[T]] = {}
    for item in items:
        groups.setdefault(tensor_of(item).device, []).append(item)
    return list(groups.values())
