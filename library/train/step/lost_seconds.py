"""Time lost after the first step: seconds without steps at the usual speed, by cause."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from library.config.problems import Message

FIRST_STEPS = Message("slow first steps")
NEW_EPOCHS = Message("new epochs")
COMPILING = Message("compiling")
RECORDING = Message("recording CUDA graphs")
COMPARING = Message("eager steps to compare with")
SAVING = Message("saving")
SAVING_STATES = Message("saving states")
GENERATING = Message("generating samples")
VALIDATING = Message("validating")


@dataclass
class LostSeconds:
    """Adds up seconds by cause: work between steps, and the excess of slow steps over usual ones."""

    _between: dict[Message, float] = field(default_factory=dict)
    _steps: dict[Message, tuple[int, float]] = field(default_factory=dict)  # cause -> slow steps, and their seconds
    cause: Message | None = None  # of the current work
    _since: float = 0.0

    @contextlib.contextmanager
    def during(self, cause: Message) -> Iterator[None]:
        """Count the seconds of this context, which is outside steps. A nested context counts for its own cause."""
        outer = self.cause
        self._switch(cause)
        try:
            yield
        finally:
            self._switch(outer)

    @contextlib.contextmanager
    def of_steps(self) -> Iterator[None]:
        """Do not count the seconds of this context, in which the GPU finishes steps that the host has launched."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - began

    def add_step(self, cause: Message, seconds: float) -> None:
        number, total = self._steps.get(cause, (0, 0.0))
        self._steps[cause] = (number + 1, total + seconds)

    def by_cause(self, usual: float) -> dict[Message, float]:
        """Return the seconds by cause, largest first; `usual` are the seconds of a usual step."""
        lost = dict(self._between)
        for cause, (number, seconds) in self._steps.items():
            lost[cause] = lost.get(cause, 0.0) + max(seconds - number * usual, 0.0)
        return dict(sorted(lost.items(), key=lambda entry: -entry[1]))

    def _switch(self, cause: Message | None) -> None:
        now = time.monotonic()
        if self.cause:
            self._between[self.cause] = self._between.get(self.cause, 0.0) + now - self._since
        self.cause, self._since = cause, now
