"""The log of the steps: numbers are logged once they are on the host, and checked for NaN."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from library.config.run_config import RunConfig
from library.data.not_finite import NotFiniteError
from library.distributed.world import World
from library.runs.lost_time import lost_time_sentence
from library.train import errors
from library.train.compiling.precompile import Precompiler
from library.train.errors import NonFiniteWatch
from library.train.journal import Journal, pace_of
from library.train.step.clock import Clock
from library.train.step.lost_seconds import COMPARING, COMPILING, RECORDING
from library.train.step.step_metrics import BatchLoss, Line, Meter
from library.train.stop_requests import REQUEST_KINDS


# Reading a loss directly would make every step wait for the GPU.
# Why: docs/decisions/2026-11-22-losses-read-without-waiting.md
class StepLog:
    """Passes the numbers of each step to the journal; on exit also the last ones."""

    def __init__(
        self, config: RunConfig, clock: Clock, world: World, journal: Journal, precompiler: Precompiler
    ) -> None:
        self._config, self._clock, self._world, self._journal = config, clock, world, journal
        self._precompiler, self._log = precompiler, precompiler.log
        self.meter = Meter(clock.total, clock.per_epoch)
        self._non_finite = NonFiniteWatch(scaled=world.scaler is not None)

    def __enter__(self) -> "StepLog":
        return self

    def __exit__(self, *error: object) -> None:
        if self._journal.record:
            for line, _ in self.meter.lines():
                self._journal.step(
                    {name: value for name, value in line.items() if name not in REQUEST_KINDS}, self.meter.total
                )
            self._journal.note(compile=self._log.summary())
            if sentence := self._precompiler.closing_sentence():
                self._journal.say(sentence)
            self._tell_lost_seconds()

    def push(
        self,
        values: dict[str, Tensor],
        batches: Sequence[BatchLoss],
        rates: dict[str, float],
        timestamps: Sequence[Any],
    ) -> None:
        """Record a finished step. `values` are its loss and norms, scalars on the device, which stay there until they
        are ready.
        """
        self._journal.requests.step_done()
        compiled, recorded, step = self._precompiler.note(), self._precompiler.recorded(), self._clock.step
        line = {"step": step, "epoch": self._clock.epoch, "lr": rates}
        line |= {**self._world.memory.now(), **self._log.curves()}
        cause = COMPILING if compiled else RECORDING if recorded else None
        if self._precompiler.plan.measuring:
            cause = COMPARING
        self.meter.sizes = len(self._log.buckets)
        self.meter.push(line, values, batches, cause, timestamps)
        with self.meter.lost.during(COMPILING):
            self._precompiler.step_done(step, None if compiled else self.meter.took)
            if compiled or (step == 1 and not self._config.compile.ahead):
                self._precompiler.prove()
        # Several processes must read the same lines: up to the step before, whose numbers have most likely arrived.
        self._read(self.meter.lines() if self._world.ranks == 1 else self.meter.lines_until(step - 1))

    def settle(self) -> None:
        """Read the numbers of all steps so far, before other work; raise if one is NaN."""
        self.meter.pause()
        with self.meter.lost.of_steps():
            self._read(self.meter.lines(wait=True))
        self._note_lost_seconds()

    def _tell_lost_seconds(self) -> None:
        """Log and record the usual seconds per step, and the time lost besides."""
        lost = self._note_lost_seconds()
        if lost and (sentence := lost_time_sentence(lost)):
            self._journal.say(f"A step took {pace_of(self.meter.speed(0)['s_it'])} s. {sentence}")

    def _note_lost_seconds(self) -> list[dict[str, Any]]:
        lost = [{"cause": cause, "seconds": spent} for cause, spent in self.meter.lost_seconds().items()]
        self._journal.note(lost_seconds=lost)
        return lost

    def _read(self, lines: Sequence[Line]) -> None:
        """Log the numbers that have arrived."""
        for line, images in lines:
            self._journal.requests.agree({name for name in REQUEST_KINDS if line.pop(name, 0.0) > 0})
            self._journal.step(line, self.meter.total)
            if what := self._non_finite.check(line):
                # Several processes read the lines of the same step together, so all of them stop here.
                bad_images = [path for images_of_rank in self._world.gather(images) for path in images_of_rank]
                raise NotFiniteError(
                    errors.non_finite_message(what, line, bad_images, self._config, self._journal.newest)
                )
