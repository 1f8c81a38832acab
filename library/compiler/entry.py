"""Eager prologue of a compiled block: canonicalises strides, requires_grad and dynamic dimensions.

It lets one graph serve every block of a class; without it FLUX.1 needs six graphs instead of two.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from library.compiler import torch_private
from library.compiler.subclass import COMPILED, clone_code, keep_class_name
from library.compiler.torch_settings import THREAD_SETTINGS

Shape = tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...]


def graph_shape(block: nn.Module) -> Shape:
    # What separates graphs within a class.
    return tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())


@functools.cache
def with_canonical_inputs(
    cls: type[nn.Module],
    shape: tuple[Any, ...],
    streams: tuple[int, ...],
    dynamic: tuple[tuple[int, int], ...],
    learns: bool,
    apart: bool = False,
) -> type[nn.Module]:
    """Return a subclass that runs eager code before the compiled block: it notifies the block's log (`_compile_log`)
    and canonicalises the tensors. `apart`: other graphs read the same inputs, and must not see how they are marked.
    """
    kind = cls.__name__

    # Graphs are guarded on strides, views and requires_grad, in which the first block's inputs differ.
    # Why: docs/decisions/2026-11-22-canonical-block-inputs.md
    class CanonicalEntry(cls):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            inputs = list(args)
            # Trained text encoders send gradients through frozen blocks, by the inputs besides their streams.
            side_inputs = (*args, *kwargs.values())
            in_graph = learns or any(isinstance(x, Tensor) and x.requires_grad for x in side_inputs)
            if apart:  # guards of other graphs would see marks, for example on cached RoPE tables
                inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
            for position in streams:
                inputs[position] = _like_inner_block(inputs[position], in_graph)
            for position, dimension in dynamic:
                if position < len(inputs) and isinstance(inputs[position], Tensor):
                    torch_private.mark_dynamic(inputs[position], dimension)
            log = self.__dict__["_compile_log"]
            THREAD_SETTINGS.hold()
            # Without gradients a checkpoint has nothing to recompute, which PyTorch rejects.
            with log.inside(kind), torch.set_grad_enabled(in_graph and torch.is_grad_enabled()):
                return super().__call__(*inputs, **kwargs)

    # One code object per shape and backend: SDXL's twelve kinds of ResNet block would otherwise count as recompilations
    # of one and exceed PyTorch's limit of 8.
    CanonicalEntry.forward = clone_code(cls.forward)
    return keep_class_name(CanonicalEntry, cls, COMPILED)


def _like_inner_block(stream: Tensor, in_graph: bool) -> Tensor:
    """Make the first block's input look like every other block's: same strides, and part of the autograd graph.

    [B, L, C] or [B, C, h, w] -> the same. Otherwise the operations before the first block cost a second graph.
    """
    # Channels last. PyTorch accepts any stride for a dimension of size 1, so all are compared with the usual ones.
    order, strides, step = (0, 2, 3, 1) if stream.dim() == 4 else range(stream.dim()), [0] * stream.dim(), 1
    for dimension in reversed(order):
        strides[dimension], step = step, step * stream.shape[dimension]
    if list(stream.stride()) != strides:
        memory_format = torch.channels_last if stream.dim() == 4 else torch.contiguous_format
        stream = stream.clone(memory_format=memory_format)
    # Skip requires_grad when neither inputs nor blocks are trainable.
    if in_graph and torch.is_grad_enabled() and not stream.requires_grad:
        stream = stream.detach().requires_grad_(True)
    # A Linear layer returns a view, and a graph would be bound to its base.
    return torch_private.without_base(stream) if stream.dim() == 3 else stream
