"""Numbers of the steps, read from the device only once they have arrived, so that reading them never waits."""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from library.train import step_timer

WARM_UP = 3  # steps left out of the speed: they load kernels and compile
RECENT = 50  # steps that the remaining time is judged by


Batch = tuple[Tensor, list[str]]  # its loss, a scalar on the device, and the files of its images
Line = tuple[dict[str, Any], list[str]]  # the numbers of a step, and the images whose loss is none


@dataclass(slots=True)
class _Pending:
    line: dict[str, Any]
    values: Tensor  # in host memory, filled in by `arrived`
    names: tuple[str, ...]
    images: tuple[list[str], ...]  # of each batch, whose losses are the last values
    arrived: Any  # a CUDA event, or None
    moments: list[Any]  # of the step, for `split.seconds`


@dataclass
class Meter:
    """Turns steps into lines for the log: loss, its average, speed without warm-up, and the time left."""

    total: int
    per_epoch: int
    _pending: deque[_Pending] = field(default_factory=deque)
    _losses: list[float] = field(default_factory=list)
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _last: float = 0.0
    _seen: int = 0
    warm_steps: int = 0
    warm_seconds: float = 0.0
    took: float | None = None  # seconds of the last step, None where something else lay before it

    def push(
        self,
        line: dict[str, Any],
        values: dict[str, Tensor],
        batches: Sequence[Batch] = (),
        compiled: bool = False,
        moments: Sequence[Any] = (),
    ) -> None:
        """Note a step. `values` are scalars on the device; `compiled` marks a step that is not typical of the speed.

        `moments` are those of the step, see `split`.
        """
        now = time.monotonic()
        self._seen += 1
        self.took = now - self._last if self._last else None
        if self._seen > WARM_UP and not compiled and self.took is not None:
            self._times.append(self.took)
            self.warm_steps += 1
            self.warm_seconds += self.took
        self._last = now
        stacked = torch.stack([v.detach().float() for v in (*values.values(), *(loss for loss, _ in batches))])
        arrived = None
        if stacked.device.type == "cuda":
            host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            stacked = host.copy_(stacked, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        images = tuple(paths for _, paths in batches)
        self._pending.append(
            _Pending(line | self.speed(line["step"]), stacked, tuple(values), images, arrived, list(moments))
        )

    def pause(self) -> None:
        """What comes next is no step (a save, samples): leave it out of the speed."""
        self._last = 0.0

    def lines(self, wait: bool = False) -> list[Line]:
        """The lines whose numbers have arrived, in order; all of them with `wait`."""
        return list(self._read(lambda first: wait or first.arrived is None or first.arrived.query()))

    def lines_until(self, step: int) -> list[Line]:
        """The lines of all steps up to this one, and of none after it: the same in every process."""
        return list(self._read(lambda first: first.line["step"] <= step))

    def _read(self, wanted: Any) -> Iterator[Line]:
        while self._pending and wanted(self._pending[0]):
            first = self._pending.popleft()
            if first.arrived is not None:
                first.arrived.synchronize()
            yield self._line(first)

    def speed(self, step: int) -> dict[str, float]:
        """Seconds per step without warm-up, and the seconds left; nothing before there is a typical step."""
        if not self._times:
            return {}
        recent = sum(self._times) / len(self._times)
        overall = self.warm_seconds / self.warm_steps
        return {"s_it": round(overall, 4), "eta": round(recent * max(self.total - step, 0), 1)}

    def _line(self, pending: _Pending) -> Line:
        values = pending.values.tolist()
        numbers = dict(zip(pending.names, values, strict=False))
        losses = values[len(pending.names) :]
        odd = [p for loss, paths in zip(losses, pending.images, strict=True) if not math.isfinite(loss) for p in paths]
        self._keep(pending.line["step"], numbers["loss"])
        where = step_timer.seconds(pending.moments)
        return pending.line | numbers | {"avr_loss": self.average} | where, odd

    @property
    def average(self) -> float:
        """Upstream's moving average: one slot for each step of an epoch, overwritten by the next epoch's."""
        return sum(self._losses) / max(len(self._losses), 1)

    def _keep(self, step: int, loss: float) -> None:
        slot = (step - 1) % self.per_epoch
        if slot < len(self._losses):
            self._losses[slot] = loss
        else:
            self._losses.append(loss)

    def state(self) -> list[float]:
        """The average's slots, for a resumed run."""
        return list(self._losses)

    def load(self, losses: list[float]) -> None:
        """Take over the slots of the run that is resumed."""
        self._losses = list(losses)
