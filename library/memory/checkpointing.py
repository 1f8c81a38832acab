"""Activation checkpointing: keep a block's inputs, recompute the rest in backward."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from library.compiler import torch_private
from library.compiler.recompute import RecomputeStates
from library.compiler.subclass import (
    CHECKPOINTED,
    CHECKPOINTED_KEEPING_ATTENTION,
    CHECKPOINTED_OUTSIDE,
    keep_class_name,
)
from library.compiler.torch_settings import version
from library.memory import host_inputs


# Why: docs/decisions/2026-11-20-what-is-kept-for-backward.md
# Why: docs/decisions/2026-11-20-checkpoints-ask-every-operation.md
def wrap(
    blocks: Iterable[Sequence[nn.Module]],
    offload_from: torch.device | None = None,
    keep_attention: bool = False,
    around: bool = False,
    own_gradients: bool = False,
) -> None:
    """Make every block recompute in backward, except for the outputs of attention if those are to be kept.

    Checkpointing sits inside the block's forward, so that a compiled block holds one graph for forward and recompute.
    `around` puts it around the block's call instead, so that the graph is of the block's own computation alone. The
    kept inputs wait in host memory where `offload_from` names the device that they leave. `own_gradients` says that
    layers in the blocks bring a gradient of their own.
    """
    host = host_inputs.HostInputs(offload_from) if offload_from else None
    if around:
        # Computing a block again has to find the graph of its forward pass, where two would do: PyTorch puts the one
        # that was used last in front, and what two graphs keep may differ (pytorch#166926).
        torch_private.keep_graphs_in_order(True)
    for group in blocks:
        for block in group:
            if around:
                block.__class__ = _checkpointed_outside(type(block))
            else:
                block.__class__ = _checkpointed(type(block), keep_attention, own_gradients)
            if host:
                host.offload_inputs_of(block)


def _keep_attention(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Attention costs the most time for the least memory: its output is as small as the block's input."""
    keep = "_scaled_dot_product" in str(op)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_nothing(*_: Any, **__: Any) -> CheckpointPolicy:
    """The policy of a plain checkpoint: recompute every operation."""
    return CheckpointPolicy.PREFER_RECOMPUTE


def _keeping_attention() -> Any:
    return create_selective_checkpoint_contexts(_keep_attention)


def _keeping_nothing() -> Any:
    return create_selective_checkpoint_contexts(_keep_nothing)


# PyTorch caches graphs on disk only if policies have a cache_hash. A changed policy needs another one.
_keeping_attention.cache_hash = "outputs of _scaled_dot_product"  # type: ignore[attr-defined]
_keeping_nothing.cache_hash = "nothing"  # type: ignore[attr-defined]


def _keeps_function_outputs() -> bool:
    """Whether compiled checkpoints keep the outputs of autograd functions, such as 8-bit products.

    PyTorch 2.11 does, which took 15 GB of FLUX.1 per image; 2.13 asks every operation anyway.
    """
    return version() < (2, 13)


@functools.cache
def _checkpointed(cls: type[nn.Module], keep_attention: bool = False, own_gradients: bool = False) -> type[nn.Module]:
    how: dict[str, Any] = {"use_reentrant": False}
    if keep_attention or (own_gradients and _keeps_function_outputs()):
        how["context_fn"] = _keeping_attention if keep_attention else _keeping_nothing
        torch_private.allow_in_place_checkpoints()

    class Checkpointed(cls):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return super().forward(*args, **kwargs)
            if not torch.compiler.is_compiling() and (states := RecomputeStates.recording):
                return checkpoint(super().forward, *args, **states.options(how), **kwargs)
            return checkpoint(super().forward, *args, **how, **kwargs)

    return keep_class_name(Checkpointed, cls, CHECKPOINTED_KEEPING_ATTENTION if keep_attention else CHECKPOINTED)


@functools.cache
def _checkpointed_outside(cls: type[nn.Module]) -> type[nn.Module]:
    class CheckpointedOutside(cls):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return super().__call__(*args, **kwargs)
            how: dict[str, Any] = {"use_reentrant": False}
            states = RecomputeStates.recording
            return checkpoint(super().__call__, *args, **states.options(how) if states else how, **kwargs)

    return keep_class_name(CheckpointedOutside, cls, CHECKPOINTED_OUTSIDE)
