"""What a training costs with some of its options changed: the one result of all that is tried before a choice.

`timing.measure_passes` measures inside the process that trains, `library.bench.probe` in a process of its own.
"""

from dataclasses import dataclass

from library.measuring.candidates import Overrides, shown

OUT_OF_MEMORY = ("out of memory", "OutOfMemory", "ALLOC_FAILED", "ran out of memory")  # as reasons say it
MEMORY_MARGIN = 0.92  # of the GPU's memory may be in use by what is chosen


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

    @property
    def lacks_memory(self) -> bool:
        """Whether more memory would have helped."""
        return any(sign in self.why for sign in OUT_OF_MEMORY)

    def sentence(self, unit: str) -> str:
        """What it takes, its `unit` of time being a "batch" or a "step"; or why it cannot be used."""
        what = shown(self.changes) or "as it is"
        if self.why:
            return f"{what}: {self.why}"
        graphs = f", {self.graphs} graphs" if self.graphs else ""
        compiled = f"{graphs}, {self.compiling:.1f} s to compile" if self.compiling else graphs
        pace = f", {self.seconds:.3g} s a {unit}" if self.seconds else ""
        return f"{what}: {self.peak:.1f} GB at its peak{pace}{compiled}"
