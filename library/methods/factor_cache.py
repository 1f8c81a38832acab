"""Cast and scale the factors of all adapters of a network once per pass.

Otherwise every layer casts both of its factors and scales in between, in each pass and again when blocks recompute:
thousands of small kernels in a step of SDXL. Here a pass begins with a few kernels for all layers, and its backward
pass ends with the same for their gradients.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from library.compiler import torch_private
from library.methods.adapters import Adapter, scaled_in


# Otherwise each layer launches three more kernels per pass, and again when blocks recompute.
# Why: docs/decisions/2026-11-22-lora-factors-cast-once-a-pass.md
class FactorCache:
    """Prepares the factors of all adapters of a network whenever the network is called.

    A layer called directly afterwards uses the factors of the network's last pass.
    """

    def __init__(self, network: nn.Module, adapters: Iterable[Adapter]) -> None:
        self.adapters = list(adapters)
        self.multiplier = torch.ones(())  # a tensor, so that a CUDA graph sees its changes
        network.register_forward_pre_hook(self.prepare)

    def set_multiplier(self, multiplier: float) -> None:
        self.multiplier.fill_(multiplier)

    def prepare(self, *_: Any) -> None:
        """Assign the factors of the pass that begins to every adapter."""
        first = self.adapters[0].lora_down.weight
        self.multiplier = self.multiplier.to(first.device)
        cast = torch.is_autocast_enabled(first.device.type)
        dtype = torch.get_autocast_dtype(first.device.type) if cast else first.dtype
        jobs: dict[Any, list[tuple[Tensor, float | None]]] = {_CastAndScale.apply: [], _cast_and_scale: []}
        learned = [adapter.factors() for adapter in self.adapters]
        for adapter, factors in zip(self.adapters, learned, strict=True):
            # Frozen factors, and those with learning rate 0, need no gradient.
            for factor, strength in adapter.with_strength(factors):
                jobs[_CastAndScale.apply if factor.requires_grad else _cast_and_scale].append((factor, strength))
        made: dict[int, Tensor] = {}
        for make, some in jobs.items():
            if some:
                given = [factor for factor, _ in some]
                scaled = make(dtype, [s for _, s in some], self.multiplier.clone(), *given)
                made.update(zip(map(id, given), scaled, strict=True))
        for adapter, factors in zip(self.adapters, learned, strict=True):
            adapter.cached_factors = tuple(made[id(factor)] for factor in factors)


class _CastAndScale(torch.autograd.Function):
    """Trained factors -> cast and scaled factors, all at once."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, strengths: Sequence[float | None], multiplier: Tensor, *factors: Tensor):
        ctx.set_materialize_grads(False)
        ctx.learned_in, ctx.made_in, ctx.strengths, ctx.multiplier = factors[0].dtype, dtype, strengths, multiplier
        return tuple(_cast_and_scale(dtype, strengths, multiplier, *factors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        arrived = [g for g in gradients if g is not None]
        strengths = [s for s, g in zip(ctx.strengths, gradients, strict=True) if g is not None]
        if not scaled_in(ctx.made_in):
            strengths = [None] * len(arrived)
        done = iter(_scaled(_cast_copies(arrived, ctx.learned_in), strengths, ctx.multiplier) if arrived else ())
        return None, None, None, *(None if g is None else next(done) for g in gradients)


def _cast_and_scale(
    dtype: torch.dtype, strengths: Sequence[float | None], multiplier: Tensor, *factors: Tensor
) -> Sequence[Tensor]:
    """Scale first, then cast: rounded once."""
    with torch.no_grad():
        if not scaled_in(dtype):
            strengths = [None] * len(factors)
        return _cast_copies(_scaled(factors, strengths, multiplier), dtype)


def _scaled(tensors: Sequence[Tensor], strengths: Sequence[float | None], multiplier: Tensor) -> Sequence[Tensor]:
    """Factors that have a scale, times it and the multiplier; the others unchanged."""
    known = [s for s in strengths if s is not None]
    if not known:
        return tensors
    some = torch_private.foreach_mul([t for t, s in zip(tensors, strengths, strict=True) if s is not None], known)
    torch_private.foreach_mul_(some, multiplier)
    done = iter(some)
    return [t if s is None else next(done) for t, s in zip(tensors, strengths, strict=True)]


def _cast_copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Copies in this dtype, each with memory of its own."""
    made = [torch.empty_like(t, dtype=dtype) for t in tensors]
    torch_private.foreach_copy_(made, list(tensors))
    return made
