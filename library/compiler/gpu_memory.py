"""How much of a GPU's memory a training may take: all that is free, or less by `gpu_memory_limit`."""

import contextlib
import logging
from collections.abc import Iterator

import torch

logger = logging.getLogger(__name__)

BYTES_PER_GIB = 2**30
CONTEXT_BYTES = int(0.8 * BYTES_PER_GIB)  # memory of a process outside PyTorch's allocator, measured on an H200
_limits: list[tuple[int, torch.device]] = []  # bytes that PyTorch may reserve of a GPU; empty without a limit
_held_allocators: list[torch.device] = []


# Why: docs/decisions/2026-11-28-presets-hold-their-memory.md
@contextlib.contextmanager
def held_to(gib: float | None, device: torch.device, by_allocator: bool = True) -> Iterator[None]:
    """Hold a training to `gib` of a larger GPU within this context; None: to all of it.

    Recordings always keep to it. With `by_allocator` steps do, too: PyTorch frees what it caches, and then raises
    torch.OutOfMemoryError.
    """
    if gib is None or device.type != "cuda":
        yield
        return
    limit = max(int(gib * BYTES_PER_GIB) - CONTEXT_BYTES, 0)
    _limits.append((limit, device))
    if by_allocator:
        _held_allocators.append(device)
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    try:
        yield
    finally:
        _take_all()


def lift() -> bool:
    """Lift the limit, as steps need more memory; return whether there was one."""
    if were_held := bool(_held_allocators):
        logger.warning("Steps or samples need more GPU memory than gpu_memory_limit: the limit is lifted")
        _take_all()
    return were_held


def _take_all() -> None:
    for device in _held_allocators:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    _held_allocators.clear()
    _limits.clear()


def is_held() -> bool:
    return bool(_limits)


def free_memory(device: torch.device | None = None) -> int:
    free = (torch.cuda.mem_get_info(device) if device else torch.cuda.mem_get_info())[0]
    return min([free, *(limit - torch.cuda.memory_reserved(held) for limit, held in _limits)])


def memory_for_tensors(device: torch.device) -> int:
    """Return the bytes available for new tensors, including those that PyTorch has reserved."""
    return free_memory(device) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def free_at_peak(device: torch.device) -> int:
    return free_memory(device) + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)


def lift_for(needed: int) -> bool:
    """Lift the limit if it does not leave `needed` bytes beside existing tensors; return whether it was lifted."""
    short = any(limit - torch.cuda.memory_allocated(device) < needed for limit, device in _limits)
    return short and lift()
