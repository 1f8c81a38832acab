"""Estimates for compiling: whether compiled blocks pay in what is left of a run, and how much GPU memory it needs to
compile beside it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

BYTES_PER_GIB = 2**30
# Share of a step that compiling saves over eager CUDA graphs: 22 % (SDXL) to 29 % (FLUX.1) on an H200.
SAVED_SHARE = 0.2
# The same for products in 8 bits, which eager blocks round slowly: compiling saves 72 % of an eager step of FLUX.1
# (flux/lora-24gb on an H200), and 58 % of what the GPU is busy with.
SAVED_SHARE_8_BIT = 0.55
FASTEST_STEP = 0.1  # seconds; no eager step that was measured took less (SDXL recorded at batch 1 on an H200)
LOAD_SECONDS = 1.0  # time to load a graph from the cache into this process
RECORD_PASSES = 10  # cost of recording a size in recorded passes: 24 of SDXL, 6 of FLUX.1 on an H200
CACHED_SHARE = 0.2  # of compile time with a full cache: 13 of 75 s (SDXL), 3.4 of 14.7 s (FLUX.1)
SLOWDOWN = 2.0  # compiling beside a training takes this many times as long (FLUX.1 on an H200: 42 s instead of 20)
CONTEXT_BYTES = 1.5 * BYTES_PER_GIB  # GPU memory of an idle process with its libraries
BLOCK_COPIES = 3  # of the largest block: its weights, their gradients, and inductor's trials
KEPT_ACTIVATIONS = 80  # values kept by a pass over a block per value of its largest input
OTHER_SIZES = 0.6  # memory of all other recorded sizes, relative to the first


@dataclass(frozen=True)
class Payoff:
    """Whether compiled blocks save more of the remaining steps, which run eagerly so far, than it costs to get them."""

    steps: int  # that remain
    step_seconds: float  # of an eager step
    sizes: int  # image sizes, each of which is recorded again with compiled blocks
    loading: float = 0.0  # seconds of loading or compiling graphs, in which no step runs
    waiting: float = 0.0  # seconds before that, in which steps run eagerly
    share: float = SAVED_SHARE  # of an eager step that compiling saves

    @property
    def saved(self) -> float:
        return max(self.steps * self.step_seconds - self.waiting, 0.0) * self.share

    @property
    def cost(self) -> float:
        return self.loading + RECORD_PASSES * self.step_seconds * self.sizes

    @property
    def pays(self) -> bool:
        return self.saved > self.cost

    def refusal(self, what_costs: str) -> str:
        """Say why blocks are not compiled, for the log; `what_costs` is one of the constants below."""
        after = f"start after about {self.waiting:.0f} s of compiling and " if self.waiting else ""
        return (
            f"Blocks are not compiled: of {self.steps} remaining steps (eager: {self.step_seconds:.3g} s each), "
            f"compiled ones would {after}save {self.saved:.0f} s, but cost {self.cost:.0f} s to "
            f"{what_costs}"
        )


SWITCHING, LOADING, COMPILING = "switch to", "load from a warm cache", "compile first"


def bytes_to_compile(blocks: Iterable[tuple[int, int]]) -> float:
    """GPU memory of the compiling process, by the bytes of each block's weights and of its largest input."""
    return CONTEXT_BYTES + max(BLOCK_COPIES * weights + KEPT_ACTIVATIONS * given for weights, given in blocks)


def lack_of_room(needed: float, free: float) -> str:
    """Return why the process does not fit into the GPU's memory, "" if it does."""
    if free >= needed:
        return ""
    needs, leaves = needed / BYTES_PER_GIB, max(free, 0) / BYTES_PER_GIB
    return f"that needs {needs:.1f} GiB of the GPU, and the training leaves {leaves:.1f} GiB"
