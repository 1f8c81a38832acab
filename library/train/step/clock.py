"""The length of a training, its current step and epoch, and what is due."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from library.config.problems import ConfigError, Problem, counted
from library.config.run_config import RunConfig
from library.config.sections import AdapterSteps
from library.data.length import length

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
        """Length of a run over `num_batches` batches per epoch and process."""
        per_epoch, total, epochs = length(config.steps, num_batches)
        clock = cls(total=total, per_epoch=per_epoch, epochs=epochs)
        if isinstance(config.steps, AdapterSteps) and config.steps.moved:
            clock._begin(config.steps)
        return clock

    def _begin(self, steps: AdapterSteps) -> None:
        """Go to the first step that the config names.

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
        """One more step is done."""
        if self.in_epoch == self.per_epoch:
            self.epoch, self.in_epoch = self.epoch + 1, 0
        self.step += 1
        self.in_epoch += 1

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.ended or self.step >= self.total

    def end_early(self) -> None:
        """End the training after the current step, as if it were the last."""
        self.ended = True

    @property
    def epoch_ended(self) -> bool:
        """Whether the last step was the last of its epoch."""
        return self.in_epoch == self.per_epoch

    def every(self, steps: int | None, epochs: int | None) -> Iterator[str]:
        """Which of "step" and "epoch" have just become due."""
        if steps and self.step and self.step % steps == 0:
            yield "step"
        if epochs and self.epoch_ended and self.epoch % epochs == 0:
            yield "epoch"

    def state(self) -> dict[str, int]:
        """Step and epoch for a saved state."""
        return {"current_step": self.step, "current_epoch": self.epoch, "step_in_epoch": self.in_epoch}


# Why: docs/decisions/2026-11-22-step-is-a-window-of-batches.md
def windows(batches: Iterable[T], size: int) -> Iterator[list[T]]:
    """The batches of each optimizer step: `size` at a time; the last of an epoch may be fewer."""
    window: list[T] = []
    for batch in batches:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window
