"""The length of a training in steps and epochs, computed in one place for trainer and page."""

import math
from typing import NamedTuple

from library.config.sections import Steps


class Length(NamedTuple):
    """The length of a training: optimizer steps per epoch, optimizer steps in total, and epochs."""

    per_epoch: int
    total: int
    epochs: int


def training_length(steps: Steps, num_batches: int) -> Length:
    """Return the length for a number of batches per epoch and process; each epoch ends with a step, as in
    accelerate.
    """
    per_epoch = math.ceil(num_batches / steps.gradient_accumulation_steps)
    total = steps.max_train_epochs * per_epoch if steps.max_train_epochs else steps.max_train_steps
    return Length(per_epoch, total, math.ceil(total / per_epoch) if per_epoch else steps.max_train_epochs or 0)
