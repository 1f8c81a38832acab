"""A step whose numbers are none must not reach the weights; and nobody waits for the device to find out."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class NonFiniteGuard:
    """Looks at the loss and the norm of the gradients before the optimizer steps.

    On a CPU the step is left out. On a GPU a fused optimizer leaves it out by itself, told by a flag that never leaves
    the device. Any other optimizer there spoils its weights, but only in memory: the training ends as soon as the
    numbers have arrived on the host, and no file is written before they have.
    """

    def __init__(self, optimizer: Any, run: Any) -> None:
        self._scaled = run.accelerator.scaler is not None  # a gradient scaler looks by itself
        self.waits = run.device.type == "cpu"  # where reading a number costs nothing
        self._flagged = [one for one in _within(optimizer) if getattr(one, "_step_supports_amp_scaling", False)]

    def should_step(self, *numbers: Tensor) -> bool:
        """Whether to step, as far as the host can know; the optimizer is told the rest."""
        if self._scaled or not (self.waits or self._flagged):
            return True
        fine = torch.stack([number.detach().float() for number in numbers]).isfinite().all()
        if self.waits:
            return bool(fine)
        for optimizer in self._flagged:
            optimizer.found_inf = (~fine).float()
        return True


def _within(optimizer: Any) -> Iterator[Any]:
    """The optimizers of which it is made, or itself."""
    yield from (bundle.optimizer for bundle in optimizer.bundles) if hasattr(optimizer, "bundles") else (optimizer,)
