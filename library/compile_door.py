"""The door of a compiled block: eager code around it that makes all blocks of a class look alike to the compiler."""

import functools
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from library.compile_ledger import LEDGER
from library.compile_settings import SETTINGS
from library.memory.blocks import copied, under_its_name

Shape = tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...]


class Inputs(Protocol):
    """What blocks of one class are called with, by position, so that one graph can serve all of them.

    `streams` flow from block to block: all but the first block's carry a gradient. `dynamic` names the dimensions whose
    size depends on the bucket: ((position, dimension), ...). `sizes` says how many graphs each block needs: one, unless
    sizes are compiled one by one. Then `level` tells blocks apart that never see the same sizes.
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


def shape_of(block: nn.Module) -> Shape:
    """What makes blocks of a class need graphs of their own: sizes and types of their weights, and which learn."""
    return tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())


@functools.cache
def with_door(
    cls: type[nn.Module],
    shape: tuple[Any, ...],
    streams: tuple[int, ...],
    dynamic: tuple[tuple[int, int], ...],
    learns: bool,
) -> type[nn.Module]:
    """A subclass whose call runs eager code before the compiled one: it tells the ledger where compiling happens, and
    hands every block the same kind of tensors.

    There is one for each shape of a block and backend, with code of its own, so that its graphs are its own as well:
    SDXL's twelve kinds of ResNet block would otherwise count as recompilations of one and exceed PyTorch's limit of 8.
    """
    kind = cls.__name__

    class Door(cls):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            given = list(args)
            # Text encoders that learn reach blocks that do not, through what these are told besides their streams.
            in_graph = learns or any(isinstance(x, Tensor) and x.requires_grad for x in args)
            for position in streams:
                given[position] = _as_inner(given[position], in_graph)
            for position, dimension in dynamic:
                if position < len(given) and isinstance(given[position], Tensor):
                    torch._dynamo.maybe_mark_dynamic(given[position], dimension)
            SETTINGS.hold()
            with LEDGER.inside(kind):
                return super().__call__(*given, **kwargs)

    Door.forward = copied(cls.forward)
    return under_its_name(Door, cls)


def _as_inner(stream: Tensor, in_graph: bool) -> Tensor:
    """The first block's input looks like every other block's: in one order, and part of the graph of gradients.

    Without this, what stands in front of the first block costs a second graph: strides and requires_grad differ, and
    what comes out of a Linear layer is a view, whose base the graph would be bound to as well.
    Where nothing learns that comes in or is in blocks of the class, asking for a gradient would be work for nothing.
    """
    stream = stream.contiguous(memory_format=torch.channels_last if stream.dim() == 4 else torch.contiguous_format)
    if in_graph and torch.is_grad_enabled() and not stream.requires_grad:
        stream = stream.detach().requires_grad_(True)
    if stream.dim() == 3 and stream._is_view():
        stream = torch.ops.aten._unsafe_view(stream, stream.shape)
    return stream
