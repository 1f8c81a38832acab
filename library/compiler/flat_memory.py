"""Many small tensors one after another in one buffer, so that one kernel serves all of them.

The layout is checked by the tensors' addresses at every use, so code that moves a tensor elsewhere, such as `.to()`,
need not know about it: that tensor is then handled individually.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from library.compiler import torch_private

ALIGNED = 64  # elements; matrix products of half precision want 16 bytes, and a CPU's 64


@dataclass(frozen=True, slots=True)
class Run:
    """Tensors that lie one after another, each beginning at a multiple of ALIGNED elements after the first."""

    members: list[int]  # their indices, by address
    flat: list[Tensor]  # one-dimensional, padding included; for one member the tensor itself


def find_runs(*lists: Sequence[Tensor], kinds: Sequence[Any] = ()) -> list[Run]:
    """Return the longest runs of the first list whose tensors lie alike in all other lists, and are of one kind;
    `kinds` has the kind of each tensor.

    `flat` has one tensor per list. Runs come in the order of their first member in the list. Memory between two
    tensors is changed with them, so it must be padding of `lay_out`.
    """
    spans = [[_span(tensor) for tensor in tensors] for tensors in lists]
    begins = [*zip(*([begin for begin, _ in of_list] for of_list in spans), strict=True)]
    ends = [*zip(*([end for _, end in of_list] for of_list in spans), strict=True)]

    def follows(n: int, last: int) -> bool:
        if begins[n] != ends[last] or (kinds and kinds[n] != kinds[last]):
            return False
        first, *others = (tensors[n] for tensors in lists)
        alike = all(other.dtype == first.dtype and other.stride() == first.stride() for other in others)
        return alike and first.dtype == lists[0][last].dtype

    chains: list[list[int]] = []
    for n in sorted(range(len(begins)), key=begins.__getitem__):
        if chains and follows(n, chains[-1][-1]):
            chains[-1].append(n)
        else:
            chains.append([n])
    runs = sorted((members for chain in chains for members in _within_storages(lists, chain)), key=min)
    return [Run(members, [_flat_tensor(tensors, members) for tensors in lists]) for members in runs]


def split(runs: Sequence[Run], flat: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of flat tensors, one for each run of `tensors`, in the shapes and order of `tensors`."""
    parts = list(tensors)
    for run, whole in zip(runs, flat, strict=True):
        members = [tensors[n] for n in run.members]
        for n, part in zip(run.members, _parts_of(whole, members) if len(members) > 1 else [whole], strict=True):
            parts[n] = part
    return parts


def lay_out(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return new memory in which tensors like these lie as one run, and the new tensors. Padding is zero."""
    *before, last = [tensor.numel() for tensor in tensors]
    make = torch.zeros if any(size % ALIGNED for size in before) else torch.empty
    flat = make(sum(map(_padded_size, before)) + last, dtype=tensors[0].dtype, device=tensors[0].device)
    return flat, _parts_of(flat, tensors)


def like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return new tensors, not yet filled, that lie as these do."""
    runs = find_runs(tensors)
    members = [[tensors[n] for n in run.members] for run in runs]
    flat = [lay_out(run)[0] if len(run) > 1 else torch.empty_like(run[0]) for run in members]
    return split(runs, flat, tensors)


def copy_(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each tensor into the one at its place in `into`, whole runs at once."""
    pairs = [run.flat for run in find_runs(into, values)]
    if pairs:  # PyTorch rejects empty lists
        torch_private.foreach_copy_([to for to, _ in pairs], [new for _, new in pairs])


@torch.no_grad()
def move_together(parameters: Sequence[Tensor]) -> None:
    """Move parameters into one buffer per dtype and device, in this order. Only their addresses change."""
    by_kind: dict[Any, list[Tensor]] = {}
    for p in parameters:
        if can_lie(p):
            by_kind.setdefault((p.dtype, p.device), []).append(p)
    for members in by_kind.values():
        for p, place in zip(members, lay_out(members)[1], strict=True):
            p.data = place.copy_(p)


def _parts_of(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts, begin = [], flat.storage_offset()
    for tensor in tensors:
        # No views: a compiled graph would be bound to their common base.
        parts.append(flat.as_strided(tensor.shape, tensor.stride(), begin).data)
        begin += _padded_size(tensor.numel())
    return parts


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor begins, and where the next of its run would begin: 0 and -1 if it cannot be in one."""
    begin = tensor.data_ptr() if can_lie(tensor) else 0
    return (begin, begin + _padded_size(tensor.numel()) * tensor.itemsize) if begin else (0, -1)


def _within_storages(lists: Sequence[Sequence[Tensor]], chain: list[int]) -> Iterator[list[int]]:
    """Cut a chain where memory of another tensor begins, which an allocator may have put right behind."""
    while len(chain) > 1:
        inside = chain
        for tensors in lists:
            storage = tensors[chain[0]].untyped_storage()
            end = storage.data_ptr() + storage.nbytes()
            if tensors[inside[-1]].data_ptr() >= end:
                inside = [n for n in inside if tensors[n].data_ptr() < end]
        yield inside
        chain = chain[len(inside) :]
    if chain:
        yield chain


def _flat_tensor(tensors: Sequence[Tensor], members: Sequence[int]) -> Tensor:
    first, last = tensors[members[0]], tensors[members[-1]]
    if len(members) == 1:
        return first
    size = (last.data_ptr() - first.data_ptr()) // first.itemsize + last.numel()
    return first.data.as_strided((size,), (1,), first.storage_offset())


def _padded_size(size: int) -> int:
    return -size % ALIGNED + size


def can_lie(tensor: Tensor) -> bool:
    """Return whether a tensor may be a member of a run."""
    # Fake tensors, from which costs are estimated, have no address.
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
        return False
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
