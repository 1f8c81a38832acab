"""Stochastic rounding: weights in half precision that keep small updates.

A bfloat16 number has 8 significant bits. An update below 1/512 of a weight would be lost by rounding to nearest, so the
sum is rounded up or down at random: right on average, however small the update.
"""

import hashlib
import sys

import torch
from torch import Tensor

from library.methods.sharding import Rows

LOW = 1 << 16  # range of the bits that bfloat16 drops from a float32


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
    upper = 1 if sys.byteorder == "little" else 0
    into.copy_(bits.view(torch.bfloat16).unflatten(-1, (-1, 2))[..., upper])
    # The carry can turn a NaN into a number, which would hide it; zero times a NaN brings it back.
    into.add_(exact, alpha=0)
