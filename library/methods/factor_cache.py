"""Cast and scale the factors of all adapters of a network once per pass.

Otherwise every layer casts both of its factors and scales in between, in each pass and again when blocks recompute:
thousands of small kernels in a step of SDXL. Here a pass begins with a few kernels for all layers, and its backward
pass ends with the same for their gradients. They are fewest where the factors share one buffer.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from library.compiler import flat_memory, torch_private
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

    # Why: docs/decisions/2026-11-29-factors-in-one-buffer.md
    def gather(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Move all factors into one buffer, those of one group and strength together, so that few kernels serve all.

        Call it with the optimizer's groups once the factors are on their device. Only their addresses change.
        """
        numbers = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        factors = [pair for adapter in self.adapters for pair in adapter.with_strength(adapter.factors())]
        factors.sort(key=lambda pair: (numbers.get(id(pair[0]), -1), -1.0 if pair[1] is None else pair[1]))
        flat_memory.move_together([factor for factor, _ in factors])

    def prepare(self, *_: Any) -> None:
        """Cast and scale all factors, and assign them to the adapters for the pass that begins."""
        first = self.adapters[0].lora_down.weight
        self.multiplier = self.multiplier.to(first.device)
        # Without autocast, layers compute in the dtype of their factors.
        cast = torch.is_autocast_enabled(first.device.type)
        dtype = torch.get_autocast_dtype(first.device.type) if cast else first.dtype
        jobs: dict[Any, list[tuple[Tensor, float | None]]] = {_CastAndScale.apply: [], _cast_and_scale: []}
        factors_by_adapter = [adapter.factors() for adapter in self.adapters]
        for adapter, factors in zip(self.adapters, factors_by_adapter, strict=True):
            # Frozen factors, and those with learning rate 0, need no gradient.
            for factor, strength in adapter.with_strength(factors):
                jobs[_CastAndScale.apply if factor.requires_grad else _cast_and_scale].append((factor, strength))
        cached: dict[int, Tensor] = {}
        for make, factors_and_strengths in jobs.items():
            if factors_and_strengths:
                factors_of_job = [factor for factor, _ in factors_and_strengths]
                scaled = make(dtype, [s for _, s in factors_and_strengths], self.multiplier.clone(), *factors_of_job)
                cached.update(zip(map(id, factors_of_job), scaled, strict=True))
        for adapter, factors in zip(self.adapters, factors_by_adapter, strict=True):
            adapter.cached_factors = tuple(cached[id(factor)] for factor in factors)


class _CastAndScale(torch.autograd.Function):
    """Trained factors -> cast and scaled factors, all at once."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, strengths: Sequence[float | None], multiplier: Tensor, *factors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # None for factors of layers that the loss does not depend on, not zeros
        ctx.factors, ctx.cast_to, ctx.strengths, ctx.multiplier = factors, dtype, strengths, multiplier
        return tuple(_cast_and_scale(dtype, strengths, multiplier, *factors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        present = [(f, s, g) for f, s, g in zip(ctx.factors, ctx.strengths, gradients, strict=True) if g is not None]
        # They lie as their factors do, for the optimizer.
        cast = flat_memory.like([factor for factor, _, _ in present])
        if present:  # PyTorch refuses empty lists
            pairs = zip((gradient for _, _, gradient in present), cast, strict=True)
            torch_private.foreach_copy_(cast, [_in_order_of(to, gradient) for gradient, to in pairs])
        # The chain rule: what the factor was multiplied with in forward multiplies its gradient.
        if scaled_in(ctx.cast_to):
            _scale_(cast, [strength for _, strength, _ in present], ctx.multiplier)
        results = iter(cast)
        return None, None, None, *(None if g is None else next(results) for g in gradients)


def _cast_and_scale(
    dtype: torch.dtype, strengths: Sequence[float | None], multiplier: Tensor, *factors: Tensor
) -> Sequence[Tensor]:
    """Scale factors, and cast them afterwards, so that they are rounded once."""
    with torch.no_grad():
        if not scaled_in(dtype):
            strengths = [None] * len(factors)
        runs = flat_memory.find_runs(factors, kinds=strengths)
        scaled = _scaled([run.flat[0] for run in runs], [strengths[run.members[0]] for run in runs], multiplier)
        return flat_memory.split(runs, _cast_copies(scaled, dtype), factors)


def _scaled(tensors: Sequence[Tensor], strengths: Sequence[float | None], multiplier: Tensor) -> Sequence[Tensor]:
    """Multiply tensors that have a scale by it and the multiplier; return the others unchanged."""
    scales = [s for s in strengths if s is not None]
    if not scales:
        return tensors
    scaled = torch_private.foreach_mul([t for t, s in zip(tensors, strengths, strict=True) if s is not None], scales)
    torch_private.foreach_mul_(scaled, multiplier)
    results = iter(scaled)
    return [t if s is None else next(results) for t, s in zip(tensors, strengths, strict=True)]


def _in_order_of(like: Tensor, values: Tensor) -> Tensor:
    """Return the values in the order of `like` in memory: with one in another order PyTorch copies a list singly."""
    return values if values.stride() == like.stride() else torch.empty_like(like, dtype=values.dtype).copy_(values)


def _scale_(tensors: Sequence[Tensor], strengths: Sequence[float | None], multiplier: Tensor) -> None:
    """Multiply tensors that have a scale by it and the multiplier, in place."""
    runs = flat_memory.find_runs(tensors, kinds=strengths)
    scaled = [(run.flat[0], s) for run in runs if (s := strengths[run.members[0]]) is not None]
    if scaled:
        torch_private.foreach_mul_([tensor for tensor, _ in scaled], [s for _, s in scaled])
        torch_private.foreach_mul_([tensor for tensor, _ in scaled], multiplier)


def _cast_copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Return copies in this dtype, each with memory of its own."""
    copies = [torch.empty_like(t, dtype=dtype) for t in tensors]
    torch_private.foreach_copy_(copies, list(tensors))
    return copies
