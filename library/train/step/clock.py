"""The length of a training, its current step and epoch, and what is due."""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from library.config.problems import ConfigError, Problem, counted
from library.config.run_config import RunConfig
from library.config.sections import AdapterSteps
from library.data.length import training_length

T = TypeVar("T")


@dataclass(slots=True)
class Clock:
    """Steps are optimizer steps. Epochs count from 1, as file names and captions do."""

    total: int
    per_epoch: int
    epochs: int
    step: int = 0  # steps done
    epoch: int = 1  # the epoch that the last or next step belongs to
    in_epoch: int = 0  # steps done of it
    ended: bool = False  # whether the training ends before its last step

    @classmethod
    def of(cls, config: RunConfig, num_batches: int) -> "Clock":
        """Return the clock of a run with `num_batches` batches per epoch and process."""
        per_epoch, total, epochs = training_length(config.steps, num_batches)
        clock = cls(total=total, per_epoch=per_epoch, epochs=epochs)
        if isinstance(config.steps, AdapterSteps) and config.steps.moved:
            clock._begin(config.steps)
        return clock

    def _begin(self, steps: AdapterSteps) -> None:
        """Move to the first step that the config names.

        Without `skip_until_initial_step` only epochs count from there: step 0 is the first of that epoch, and the
        training ends with the last epoch.
        """
        epoch = (steps.initial_epoch or 1) - 1
        first = epoch * self.per_epoch if steps.initial_step is None else steps.initial_step
        if first >= self.total:
            name = "initial_epoch" if steps.initial_step is None else "initial_step"
            raise ConfigError(
                Problem(
                    name,
                    ": this training has {steps} in {epochs}, so nothing is left to do; "
                    "lower {name}, or raise max_train_steps or max_train_epochs",
                    steps=counted(self.total, "step"),
                    epochs=counted(self.epochs, "epoch"),
                    name=name,
                )
            )
        done, self.in_epoch = divmod(first, self.per_epoch)
        self.epoch = done + 1
        if steps.skip_until_initial_step:
            self.step = first
        else:
            self.in_epoch, self.total = 0, min(self.total, (self.epochs - done) * self.per_epoch)

    def tick(self) -> None:
        """Count one more step."""
        if self.in_epoch == self.per_epoch:
            self.epoch, self.in_epoch = self.epoch + 1, 0
        self.step += 1
        self.in_epoch += 1

    @property
    def done(self) -> bool:
        return self.ended or self.step >= self.total

    def end_early(self) -> None:
        self.ended = True

    @property
    def epoch_ended(self) -> bool:
        return self.in_epoch == self.per_epoch

    def every(self, steps: int | None, epochs: int | None) -> Iterator[str]:
        """Yield which of "step" and "epoch" have just become due."""
        if steps and self.step and self.step % steps == 0:
            yield "step"
        if epochs and self.epoch_ended and self.epoch % epochs == 0:
            yield "epoch"

    def times_left(self, steps: int | None, epochs: int | None) -> int:
        """Return how often what is due at these intervals, and after the last step, will still be due."""
        if self.done:
            return 0
        every = epochs * self.per_epoch if epochs else steps or self.total
        return math.ceil(self.total / every) - self.step // every

    def state(self) -> dict[str, int]:
        return {"current_step": self.step, "current_epoch": self.epoch, "step_in_epoch": self.in_epoch}


# Yielding whole steps lets a step be repeated eagerly after compiling failed.
# Why: docs/decisions/2026-11-22-step-is-a-window-of-batches.md
def windows(batches: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the batches of each optimizer step: `size` at a time; the last step of an epoch may have fewer."""
    remaining = iter(batches)
    while window := list(itertools.islice(remaining, size)):
        yield window
