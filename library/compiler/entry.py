"""Eager prologue of a compiled block: canonicalises strides, requires_grad and dynamic dims.

With it one graph serves every block of a class; without it FLUX.1 needs six graphs instead of two.
"""

import functools
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from library.compiler import torch_private
from library.compiler.subclass import COMPILED, clone_code, keep_class_name
from library.compiler.torch_settings import SETTINGS

Shape = tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...]


class EntryInputs(Protocol):
    """What blocks of one class are called with, by position, so that one graph can serve all of them.

    `streams` flow from block to block: all but the first block's carry a gradient. `dynamic` names the dimensions whose
    size depends on the bucket: ((position, dimension), ...). `sizes` says how many graphs each block needs: one, unless
    sizes are compiled one by one. Then `level` tells blocks apart that never see the same sizes. Blocks that run
    `before_trainable` ones have a graph of their own, as no gradient goes through them.
    """

    @property
    def streams(self) -> tuple[int, ...]:
        """What flows from block to block."""
        ...

    @property
    def dynamic(self) -> tuple[tuple[int, int], ...]:
        """Which sizes vary."""
        ...

    @property
    def sizes(self) -> int:
        """How many of them are compiled one by one."""
        ...

    @property
    def level(self) -> int:
        """Which blocks see the same ones then."""
        ...

    @property
    def before_trainable(self) -> bool:
        """Whether nothing learns in them, nor before them."""
        ...


def shape_of(block: nn.Module) -> Shape:
    """What makes blocks of a class need graphs of their own: sizes and types of their weights, and which learn."""
    return tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())


@functools.cache
def with_canonical_inputs(
    cls: type[nn.Module],
    shape: tuple[Any, ...],
    streams: tuple[int, ...],
    dynamic: tuple[tuple[int, int], ...],
    learns: bool,
) -> type[nn.Module]:
    """A subclass whose call runs eager code before the compiled one: it tells the log of the block (`_compile_log`)
    where compiling happens, and hands every block the same kind of tensors.

    There is one for each shape of a block and backend, with code of its own, so that its graphs are its own as well:
    SDXL's twelve kinds of ResNet block would otherwise count as recompilations of one and exceed PyTorch's limit of 8.
    """
    kind = cls.__name__

    # Why: docs/decisions/2026-11-22-canonical-block-inputs.md
    class CanonicalEntry(cls):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            given = list(args)
            # Text encoders that learn reach blocks that do not, through what these get besides their streams.
            side_inputs = (*args, *kwargs.values())
            in_graph = learns or any(isinstance(x, Tensor) and x.requires_grad for x in side_inputs)
            for position in streams:
                given[position] = _like_inner_block(given[position], in_graph)
            for position, dimension in dynamic:
                if position < len(given) and isinstance(given[position], Tensor):
                    torch_private.mark_dynamic(given[position], dimension)
            log = self.__dict__["_compile_log"]
            if log.on_call:
                log.on_call(self, given, kwargs)
            SETTINGS.hold()
            # Where no gradient goes through a block there is nothing to recompute either, which PyTorch would refuse.
            with log.inside(kind), torch.set_grad_enabled(in_graph and torch.is_grad_enabled()):
                return super().__call__(*given, **kwargs)

    CanonicalEntry.forward = clone_code(cls.forward)
    return keep_class_name(CanonicalEntry, cls, COMPILED)


def _like_inner_block(stream: Tensor, in_graph: bool) -> Tensor:
    """Make the first block's input look like every other block's: in one order, and part of the graph of gradients.

    [B, L, C] or [B, C, h, w] -> the same. Without this, what stands before the first block costs a second graph.
    """
    # Channels last, with the usual strides also where a size is 1, for which PyTorch takes any.
    order, strides, step = (0, 2, 3, 1) if stream.dim() == 4 else range(stream.dim()), [0] * stream.dim(), 1
    for dimension in reversed(order):
        strides[dimension], step = step, step * stream.shape[dimension]
    if list(stream.stride()) != strides:
        kept = torch.channels_last if stream.dim() == 4 else torch.contiguous_format
        stream = stream.clone(memory_format=kept)
    # Where nothing learns that comes in or is in blocks of the class, asking for a gradient would be work for nothing.
    if in_graph and torch.is_grad_enabled() and not stream.requires_grad:
        stream = stream.detach().requires_grad_(True)
    # What comes out of a Linear layer is a view, whose base the graph would be bound to.
    return torch_private.without_base(stream) if stream.dim() == 3 else stream
