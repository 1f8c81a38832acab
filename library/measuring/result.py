"""The measured cost of a training with some options changed.

`timing.measure_passes` measures inside the training's process, `library.bench.probe` in a separate one.
"""

from dataclasses import dataclass

from library.config.problems import Message, MessageLike, counted, join_messages
from library.measuring.candidates import Overrides, format_changes

OUT_OF_MEMORY = ("out of memory", "OutOfMemory", "ALLOC_FAILED", "ran out of memory")  # parts of error messages
MEMORY_MARGIN = 0.92  # share of the GPU's memory that chosen settings may use


@dataclass
class Measured:
    """One candidate. `seconds` cover a forward and backward pass in the training's process, a whole step in a separate
    one."""

    changes: Overrides
    seconds: float = 0.0
    compiling: float = 0.0  # seconds before the first pass at full speed
    peak: float = 0.0  # GiB, of the GPU if there is one
    graphs: int = 0
    why: MessageLike = ""  # why it cannot be used, "" if it can

    def total(self, passes: int) -> float:
        return self.compiling + passes * self.seconds

    @property
    def lacks_memory(self) -> bool:
        return any(sign in str(self.why) for sign in OUT_OF_MEMORY)

    def sentence(self, of_steps: bool = True) -> Message:
        """Return memory, seconds of a step (or batch), graphs and compiling; or why it cannot be used."""
        what = format_changes(self.changes) or Message("as it is")
        if self.why:
            return Message("{settings}: {found}", settings=what, found=self.why)
        measurements = [Message("{memory} GB at its peak", memory=f"{self.peak:.1f}")]
        if self.seconds:
            pace = "{seconds} s a step" if of_steps else "{seconds} s a batch"
            measurements.append(Message(pace, seconds=f"{self.seconds:.3g}"))
        if self.graphs:
            measurements.append(counted(self.graphs, "graph"))
        if self.compiling:
            measurements.append(Message("{seconds} s to compile", seconds=f"{self.compiling:.1f}"))
        return Message("{settings}: {found}", settings=what, found=join_messages(measurements))
