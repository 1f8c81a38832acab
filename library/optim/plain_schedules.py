"""The common learning rate schedules of transformers.optimization, which takes a second to import.

Arguments and rates are those of the functions there.
"""

import functools
import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def constant(optimizer: Optimizer, last_epoch: int = -1) -> LambdaLR:
    return LambdaLR(optimizer, _same, last_epoch=last_epoch)


def constant_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    return _schedule(optimizer, _always, num_warmup_steps, num_warmup_steps + 1, last_epoch)


def linear(optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1) -> LambdaLR:
    factor = functools.partial(_linear, warmup=num_warmup_steps, total=num_training_steps)
    return LambdaLR(optimizer, factor, last_epoch=last_epoch)


def cosine(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """Return a schedule that follows `num_cycles` waves of the cosine; half a wave falls to 0."""
    wave = functools.partial(_wave, cycles=num_cycles)
    return _schedule(optimizer, wave, num_warmup_steps, num_training_steps, last_epoch)


def cosine_with_restarts(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1, last_epoch: int = -1
) -> LambdaLR:
    fall = functools.partial(_fall, cycles=num_cycles)
    return _schedule(optimizer, fall, num_warmup_steps, num_training_steps, last_epoch)


def _schedule(
    optimizer: Optimizer, shape: Callable[[float], float], warmup: int, total: int, last_epoch: int
) -> LambdaLR:
    # A partial, as transformers has: a saved state then holds the same.
    factor = functools.partial(_after_warmup, shape=shape, warmup=warmup, total=total)
    return LambdaLR(optimizer, factor, last_epoch=last_epoch)


def _after_warmup(step: int, *, shape: Callable[[float], float], warmup: int, total: int) -> float:
    """Return the factor of the rate: a line up to 1, then the shape over the share of the remaining steps."""
    if step < warmup:
        return float(step) / float(max(1, warmup))
    return shape(float(step - warmup) / float(max(1, total - warmup)))


def _same(_: int | None = None) -> int:
    return 1


def _always(_: float) -> float:
    return 1.0


def _linear(step: int, *, warmup: int, total: int) -> float:
    if step < warmup:
        return float(step) / float(max(1, warmup))
    return max(0.0, float(total - step) / float(max(1, total - warmup)))


def _wave(progress: float, *, cycles: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * float(cycles) * 2.0 * progress)))


def _fall(progress: float, *, cycles: float) -> float:
    if progress >= 1.0:
        return 0.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((float(cycles) * progress) % 1.0))))
