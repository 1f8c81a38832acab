"""Activation checkpointing: keep a block's inputs, recompute the rest in backward."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from library.compiler import torch_private
from library.compiler.recompute import RecomputeStates
from library.compiler.subclass import keep_class_name
from library.compiler.torch_settings import version


# Why: docs/decisions/2026-11-20-what-is-kept-for-backward.md
# Why: docs/decisions/2026-11-20-checkpoints-ask-every-operation.md
def wrap(
    blocks: Iterable[Sequence[nn.Module]],
    offload: bool = False,
    keep_attention: bool = False,
    around: bool = False,
    own_gradients: bool = False,
) -> None:
    """Make every block recompute in backward, except for the outputs of attention if those are to be kept.

    Checkpointing sits inside the block's forward, so that a compiled block holds one graph for forward and recompute.
    `around` puts it around the block's call instead, so that the graph is of the block's own computation alone. With
    `offload` it is there as well, since the kept inputs wait in host memory, and copies stay out of compiled graphs.
    `own_gradients` says that layers in the blocks bring a gradient of their own.
    """
    if offload or around:
        # Computing a block again has to find the graph of its forward pass, where two would do: PyTorch puts the one
        # that was used last in front, and what two graphs keep may differ (pytorch#166926).
        torch_private.keep_graphs_in_order(True)
    for group in blocks:
        for block in group:
            if offload or around:
                block.__class__ = _offloaded(type(block)) if offload else _checkpointed_outside(type(block))
            else:
                block.__class__ = _checkpointed(type(block), keep_attention, own_gradients)


def _keep_attention(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Attention costs the most time for the least memory: its output is as small as the block's input."""
    keep = "_scaled_dot_product" in str(op)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_nothing(*_: Any, **__: Any) -> CheckpointPolicy:
    """What a plain checkpoint does, asked of every operation by itself."""
    return CheckpointPolicy.PREFER_RECOMPUTE


def _keeping_attention() -> Any:
    return create_selective_checkpoint_contexts(_keep_attention)


def _keeping_nothing() -> Any:
    return create_selective_checkpoint_contexts(_keep_nothing)


# Without a name for what they decide PyTorch keeps no graph with them for the next start. A new policy needs a new one.
_keeping_attention.cache_hash = "outputs of _scaled_dot_product"  # type: ignore[attr-defined]
_keeping_nothing.cache_hash = "nothing"  # type: ignore[attr-defined]


def _keeps_function_outputs() -> bool:
    """Whether compiled checkpoints keep what functions with a gradient of their own answer, such as products in 8 bits.

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

    return keep_class_name(Checkpointed, cls, "checkpointed, attention kept" if keep_attention else "checkpointed")


@functools.cache
def _checkpointed_outside(cls: type[nn.Module]) -> type[nn.Module]:
    class CheckpointedOutside(cls):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return super().__call__(*args, **kwargs)
            how: dict[str, Any] = {"use_reentrant": False}
            states = RecomputeStates.recording
            return checkpoint(super().__call__, *args, **states.options(how) if states else how, **kwargs)

    return keep_class_name(CheckpointedOutside, cls, "checkpointed from outside")


@functools.cache
def _offloaded(cls: type[nn.Module]) -> type[nn.Module]:
    class Offloaded(cls):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return super().__call__(*args, **kwargs)
            call, device, first_args = super().__call__, args[0].device, [args]

            def run(*offloaded: Any) -> Any:
                # Forward uses the tensors it was given; only the recompute copies the offloaded ones back.
                given = (
                    first_args.pop()
                    if first_args
                    else [x.to(device, non_blocking=True) if _is_stream(x) else x for x in offloaded]
                )
                return call(*given, **kwargs)

            return checkpoint(run, *[_offload(x) if _is_stream(x) else x for x in args], use_reentrant=False)

    return keep_class_name(Offloaded, cls, "checkpointed, inputs on the host")


def _is_stream(x: Any) -> bool:
    """Whether an input is passed from block to block, and not shared by all of them: those are offloaded."""
    return isinstance(x, Tensor) and x.requires_grad


def _offload(x: Tensor) -> Tensor:
    """A copy in pinned host memory, made on the compute stream, so that it is ordered before the copy back."""
    if x.device.type == "cpu":
        return x.detach().requires_grad_(True)
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x.detach(), non_blocking=True).requires_grad_(True)
