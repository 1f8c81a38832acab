"""The length of a training in steps and epochs, counted in one place for the trainer and for the page."""

import math
from typing import NamedTuple

from library.config.sections import Steps


class Length(NamedTuple):
    """A training in optimizer steps: those of an epoch, all of them, and in how many epochs those are."""

    per_epoch: int
    total: int
    epochs: int


def length(steps: Steps, num_batches: int) -> Length:
    """The length over so many batches per epoch and process; each epoch ends with a step, as accelerate has it."""
    per_epoch = math.ceil(num_batches / steps.gradient_accumulation_steps)
    total = steps.max_train_epochs * per_epoch if steps.max_train_epochs else steps.max_train_steps
    return Length(per_epoch, total, math.ceil(total / per_epoch) if per_epoch else steps.max_train_epochs or 0)
