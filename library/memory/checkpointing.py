"""Activation checkpointing: keep a block's inputs, and recompute its activations in the backward pass."""

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
    CHECKPOINTED_UNTIL_COMPILED,
    keep_class_name,
)
from library.compiler.torch_settings import torch_version
from library.memory import host_inputs


# Why: docs/decisions/2026-11-20-what-is-kept-for-backward.md
# Without a policy torch 2.11 keeps the outputs of all autograd functions, 15 GB per image of FLUX.1.
# Why: docs/decisions/2026-11-20-checkpoints-ask-every-operation.md
def checkpoint_blocks(
    blocks: Iterable[Sequence[nn.Module]],
    offload_from: torch.device | None = None,
    keep_attention: bool = False,
    around: bool = False,
    own_gradients: bool = False,
    until_compiled: bool = False,
) -> None:
    """Make every block recompute in backward, except for attention outputs with `keep_attention`.

    The checkpoint is inside the block's forward, so that a compiled block has one graph for forward and recompute. With
    `around` it wraps the block's call instead, so that the graph contains only the block's own computation.
    `offload_from` names the device whose inputs wait in host memory. `own_gradients`: layers in the blocks define their
    own backward. With `until_compiled` only eager blocks do all this: PyTorch decides what a compiled one keeps.
    """
    host = host_inputs.HostInputs(offload_from) if offload_from else None
    if around:
        # Recomputing must pick the graph of the forward pass if two fit: PyTorch prefers the last used one, and two
        # graphs may save different tensors (pytorch#166926).
        torch_private.keep_graphs_in_order(True)
    for group in blocks:
        for block in group:
            if around:
                block.__class__ = _checkpointed_outside(type(block))
            else:
                block.__class__ = _checkpointed(type(block), keep_attention, own_gradients, until_compiled)
            if host:
                host.offload_inputs_of(block)


def _keep_attention(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Attention takes the most time for the least memory: its output is only as large as the block's input.
    keep = "_scaled_dot_product" in str(op)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_nothing(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _keeping_attention() -> Any:
    return create_selective_checkpoint_contexts(_keep_attention)


def _keeping_nothing() -> Any:
    return create_selective_checkpoint_contexts(_keep_nothing)


# PyTorch caches graphs on disk only for policies with a cache_hash; change it together with a policy.
_keeping_attention.cache_hash = "outputs of _scaled_dot_product"  # type: ignore[attr-defined]
_keeping_nothing.cache_hash = "nothing"  # type: ignore[attr-defined]


def _keeps_function_outputs() -> bool:
    # PyTorch 2.11 does, which took 15 GB of FLUX.1 per image; 2.13 consults the policy for every operation.
    return torch_version() < (2, 13)


@functools.cache
def _checkpointed(
    cls: type[nn.Module], keep_attention: bool, own_gradients: bool, until_compiled: bool
) -> type[nn.Module]:
    options: dict[str, Any] = {"use_reentrant": False}
    if keep_attention or (own_gradients and _keeps_function_outputs()):
        options["context_fn"] = _keeping_attention if keep_attention else _keeping_nothing
        torch_private.allow_in_place_checkpoints()

    class Checkpointed(cls):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or (until_compiled and torch.compiler.is_compiling()):
                return super().forward(*args, **kwargs)
            if not torch.compiler.is_compiling() and (states := RecomputeStates.recording):
                return checkpoint(super().forward, *args, **states.options(options), **kwargs)
            return checkpoint(super().forward, *args, **options, **kwargs)

    behaviour = CHECKPOINTED_KEEPING_ATTENTION if keep_attention else CHECKPOINTED
    return keep_class_name(Checkpointed, cls, CHECKPOINTED_UNTIL_COMPILED if until_compiled else behaviour)


@functools.cache
def _checkpointed_outside(cls: type[nn.Module]) -> type[nn.Module]:
    class CheckpointedOutside(cls):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return super().__call__(*args, **kwargs)
            options: dict[str, Any] = {"use_reentrant": False}
            states = RecomputeStates.recording
            return checkpoint(super().__call__, *args, **states.options(options) if states else options, **kwargs)

    return keep_class_name(CheckpointedOutside, cls, CHECKPOINTED_OUTSIDE)
