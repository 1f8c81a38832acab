"""Numbers of the steps: loss, speed and where the time goes.

They are read from the device only once they have arrived, so that reading never waits.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from library.config.problems import Message
from library.data.batch import Batch
from library.train.step.lost_seconds import COMPILING, FIRST_STEPS, NEW_EPOCHS, LostSeconds

T = TypeVar("T")

WARM_UP = 3  # steps excluded from the speed, as they load kernels and allocate memory
SHOWN_FROM = 0.05  # seconds lost to one cause that are worth mentioning
RECENT = 50  # steps that the remaining time is estimated from

BatchLoss = tuple[Tensor, list[str]]  # its loss, a scalar on the device, and the files of its images
Line = tuple[dict[str, Any], list[str]]  # the numbers of a step, and the images whose loss is NaN or infinite


@dataclass(slots=True)
class _Pending:
    line: dict[str, Any]
    values: Tensor  # in host memory, filled in by `arrived`
    names: tuple[str, ...]
    images: tuple[list[str], ...]  # per batch; the batch losses are the last values
    arrived: "torch.cuda.Event | None"
    timestamps: list[Any]  # of the step, for `seconds`
    took: float | None  # seconds on the host since the step before; None after other work
    cause: Message | None  # why the step is slow, and excluded from the speed


@dataclass
class Meter:
    """Turns steps into lines for the log: loss, its average, speed without warm-up, and the time left."""

    total: int
    per_epoch: int
    _pending: deque[_Pending] = field(default_factory=deque)
    _losses: list[float] = field(default_factory=list)
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _last: float = 0.0
    _ended: Any = None  # timestamp of the end of the last step that was read
    _seen: int = 0
    _epoch: int = 0  # of the last step
    sizes: int = 0  # kinds of images of the steps so far
    _sizes_before: int = 0
    _paused_for: Message = COMPILING  # the last work that interrupted steps
    lost: LostSeconds = field(default_factory=LostSeconds)
    warm_steps: int = 0
    warm_seconds: float = 0.0
    took: float | None = None  # seconds of the last step, None if other work preceded it

    def push(
        self,
        line: dict[str, Any],
        values: Mapping[str, Tensor],
        batches: Sequence[BatchLoss] = (),
        cause: Message | None = None,
        timestamps: Sequence[Any] = (),
    ) -> None:
        """Record a step. `values` are scalars on the device; a step that is slow for a `cause` is excluded from the
        speed, as are the first ones and those after other work.

        `timestamps` come from StepTimer.
        """
        now = time.monotonic()
        slow = self._why_slow(line)
        cause = cause or slow
        self.took = now - self._last if self._last else None
        if cause is None and self.took is None:
            cause = self._paused_for
        self._last = now
        stacked = torch.stack([v.detach().float() for v in (*values.values(), *(loss for loss, _ in batches))])
        arrived = None
        if stacked.device.type == "cuda":
            # Copied asynchronously into pinned memory, so that the host does not wait for the GPU.
            host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            stacked = host.copy_(stacked, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        images = tuple(paths for _, paths in batches)
        step = _Pending(line, stacked, tuple(values), images, arrived, list(timestamps), self.took, cause)
        self._pending.append(step)

    def _why_slow(self, line: Mapping[str, Any]) -> Message | None:
        """Return why a step is slower than others by its number, size or epoch, None if it is not."""
        self._seen += 1
        epoch = line.get("epoch", 1)
        is_first = self._seen <= WARM_UP or self.sizes > self._sizes_before
        is_new = epoch != self._epoch and self.per_epoch > 1  # where an epoch is one step, all steps are alike
        self._sizes_before, self._epoch = self.sizes, epoch
        return FIRST_STEPS if is_first else NEW_EPOCHS if is_new else None

    def pause(self) -> None:
        """Exclude the next step from the speed, as other work precedes it."""
        self._last = 0.0
        # Apart from other work, only compiling interrupts steps, between or within them.
        self._paused_for = self.lost.cause or COMPILING

    def lines(self, wait: bool = False) -> list[Line]:
        # Those whose numbers have arrived, or all with `wait`, in order.
        return list(self._read(lambda pending: wait or pending.arrived is None or pending.arrived.query()))

    def lines_until(self, step: int) -> list[Line]:
        # Independent of what has arrived, so the same in every process.
        return list(self._read(lambda pending: pending.line["step"] <= step))

    def _read(self, is_ready: Callable[[_Pending], bool]) -> Iterator[Line]:
        while self._pending and is_ready(self._pending[0]):
            pending = self._pending.popleft()
            if pending.arrived is not None:
                pending.arrived.synchronize()
            values = pending.values.tolist()
            numbers = dict(zip(pending.names, values, strict=False))
            losses = zip(values[len(pending.names) :], pending.images, strict=True)
            bad_images = [path for loss, paths in losses if not math.isfinite(loss) for path in paths]
            # Upstream's moving average: one slot for each step of an epoch, overwritten by the next epoch's.
            slot = (pending.line["step"] - 1) % self.per_epoch
            self._losses[slot : slot + 1] = [numbers["loss"]]  # appends during the first epoch
            self._count(pending)
            numbers |= {"avr_loss": self.average, **self.speed(pending.line["step"])}
            yield pending.line | numbers | seconds(pending.timestamps), bad_images

    def _count(self, pending: _Pending) -> None:
        """Add the seconds from the end of the step before to the end of this one, or of the step alone after other
        work.
        """
        ended, took, timestamps = self._ended, pending.took, pending.timestamps
        self._ended = timestamps[-1] if timestamps else None
        if timestamps:
            # By the GPU's own clock: the host runs ahead, so that its steps look shorter than they are.
            took = _between(timestamps[0] if took is None or ended is None else ended, timestamps[-1])
        if took is None:
            return
        if pending.cause in (None, NEW_EPOCHS):  # the steps that are left have new epochs, too
            self._times.append(took)
        if pending.cause:
            self.lost.add_step(pending.cause, took)
            return
        self.warm_steps += 1
        self.warm_seconds += took

    def speed(self, step: int) -> dict[str, float]:
        """Return seconds per step without warm-up, and the seconds left; empty before the first typical step."""
        if not self._times:
            return {}
        recent = sum(self._times) / len(self._times)
        overall = self.warm_seconds / self.warm_steps if self.warm_steps else recent
        return {"s_it": round(overall, 4), "eta": round(recent * max(self.total - step, 0), 1)}

    def lost_seconds(self) -> dict[Message, float]:
        """Return the seconds that were lost since the first step, by cause; empty before the first typical step."""
        if not self.warm_steps:
            return {}
        lost = self.lost.by_cause(self.warm_seconds / self.warm_steps)
        return {cause: round(seconds, 2) for cause, seconds in lost.items() if seconds >= SHOWN_FROM}

    @property
    def average(self) -> float:
        return sum(self._losses) / max(len(self._losses), 1)

    def state(self) -> list[float]:
        return list(self._losses)

    def load(self, losses: list[float]) -> None:
        self._losses = list(losses)


# The host runs ahead, so only events in the GPU's stream show how long the GPU itself waited for data.
# Why: docs/decisions/2026-11-20-step-time-by-gpu-events.md
@dataclass
class StepTimer:
    """Takes the timestamps that split a step's time into waiting for data, copying to the device, and computing.

    On a GPU they are events of its stream, as the host runs ahead of it. They are read when the numbers of the step
    have arrived anyway, so nothing waits for them.
    """

    device: torch.device
    _timestamps: list[Any] = field(default_factory=list)

    def waited(self, windows: Iterable[T]) -> Iterator[T]:
        """Yield the windows; a step begins when the next one is requested."""
        iterator = iter(windows)
        while True:
            self._timestamps = [self._now()]
            window = next(iterator, None)
            if window is None:
                return
            self._timestamps.append(self._now())
            yield window

    def moved(self, batch: Batch) -> Batch:
        """Return the batch on the device."""
        self._timestamps.append(self._now())
        on_device = batch.to(self.device)
        self._timestamps.append(self._now())
        return on_device

    def ended(self) -> list[Any]:
        """Return the timestamps of the step that ends here, for `seconds`; empty if its start was not recorded."""
        complete = len(self._timestamps) >= 2
        timestamps, self._timestamps = self._timestamps, []
        return [*timestamps, self._now()] if complete else []

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment


def seconds(timestamps: Sequence[Any]) -> dict[str, float]:
    """Split a step's seconds into data_s, transfer_s and compute_s. GPU events must have passed."""
    if not timestamps:
        return {}
    begin, ready, *moves, end = timestamps
    data = _between(begin, ready)
    transfer = sum(_between(a, b) for a, b in zip(moves[::2], moves[1::2], strict=True))
    compute = max(0.0, _between(ready, end) - transfer)
    return {"data_s": round(data, 5), "transfer_s": round(transfer, 5), "compute_s": round(compute, 5)}


def _between(first: Any, second: Any) -> float:
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1000
