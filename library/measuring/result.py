"""What a training costs with some of its options changed: the one result of all that is tried before a choice.

`measure_passes` measures inside the process that trains, `library.bench.probe` in a process of its own.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from library.measuring.candidates import Overrides

if TYPE_CHECKING:
    import torch

MEMORY_MARGIN = 0.92  # of the GPU's memory may be in use by what is chosen
GIB = 2**30


@dataclass
class Measured:
    """One candidate. `seconds` are of a forward and backward pass in the training's process, and of a whole step in a
    process of its own."""

    changes: Overrides
    seconds: float = 0.0
    compiling: float = 0.0  # seconds before the first pass at full speed
    peak: float = 0.0  # GiB, of the GPU where there is one
    graphs: int = 0
    why: str = ""  # why it cannot be used, "" if it can

    def total(self, passes: int) -> float:
        """Seconds of a whole training."""
        return self.compiling + passes * self.seconds


def measure_passes(
    passes: Iterable[tuple[Callable[[], Any], float]], repeats: int, device: "torch.device"
) -> tuple[float, float, float]:
    """Time passes over batches of several sizes, each with the share of batches that it stands for.

    Returns seconds of a pass once it runs steadily, the mean over sizes; seconds that first passes took longer, which
    is compiling; and the peak of GPU memory in GiB, 0 without a GPU.
    """
    import statistics

    import torch

    from library.compiler import cudagraph
    from library.measuring import timing

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    first, steady = 0.0, 0.0
    for call, share in passes:
        times = [timing.timed(call, device) for _ in range(1 + repeats)]
        usual = statistics.median(times[1:])
        first += times[0] - usual
        steady += usual * share
    return steady, max(first, 0.0), cudagraph.peak(device) / GIB if device.type == "cuda" else 0.0
