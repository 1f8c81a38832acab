"""What a training costs with some of its options changed: the one result of all that is tried before a choice.

`timing.measure_passes` measures inside the process that trains, `library.bench.probe` in a process of its own.
"""

from dataclasses import dataclass

from library.measuring.candidates import Overrides

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
