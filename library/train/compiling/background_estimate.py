"""Estimates for compiling beside the run: how long it takes, and how much GPU memory it needs."""

from collections.abc import Iterable

from torch import nn

from library.compiler.block_calls import BlockCall

BYTES_PER_GIB = 2**30
FASTEST_STEP = 0.1  # seconds; no eager step that was measured took less (SDXL recorded at batch 1 on an H200)
LOAD_SECONDS = 1.0  # time to load a graph from the cache into this process
SLOWDOWN = 2.0  # compiling beside a training takes this many times as long (FLUX.1 on an H200: 42 s instead of 20)
CONTEXT_BYTES = 1.5 * BYTES_PER_GIB  # GPU memory of an idle process with its libraries
BLOCK_COPIES = 3  # of the largest block: its weights, their gradients, and inductor's trials
KEPT_ACTIVATIONS = 80  # values kept by a pass over a block per value of its largest input
OTHER_SIZES = 0.6  # memory of all other recorded sizes, relative to the first


def speed_of(processes: int) -> float:
    """Return the speedup of compiling by this number of processes: seven took 30 s for SDXL's graphs on an H200."""
    return (processes + 1) / 2


def bytes_to_compile(calls: Iterable[BlockCall], denoiser: nn.Module) -> float:
    """Return the GPU memory of a process that compiles these calls of blocks."""

    def bytes_of(call: BlockCall) -> int:
        weights = sum(p.nbytes for p in denoiser.get_submodule(call.path).parameters())
        return BLOCK_COPIES * weights + KEPT_ACTIVATIONS * call.largest_tensor

    return CONTEXT_BYTES + max(map(bytes_of, calls))


def lack_of_room(needed: float, free: float) -> str:
    """Return why the process does not fit into the GPU's memory, "" if it does."""
    if free >= needed:
        return ""
    needs, leaves = needed / BYTES_PER_GIB, max(free, 0) / BYTES_PER_GIB
    return f"that needs {needs:.1f} GiB of the GPU, and the training leaves {leaves:.1f} GiB"
