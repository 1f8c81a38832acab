"""Group batches into optimizer steps, seed the generators of each batch, and take back a step that is cancelled."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from library.compiler.log import CompileLog
from library.config.problems import ConfigError
from library.data.batch import Batch
from library.data.loading import Batches
from library.distributed.world import World
from library.train.step import rng
from library.train.step.clock import Clock, windows
from library.train.step.rng import StepGenerators
from library.train.step.step_metrics import StepTimer
from library.train.stop_requests import ASKED, ControlRequests


class Stepper:
    """Yields the batches of each optimizer step, from where the clock stands to the end or until someone says stop."""

    def __init__(
        self,
        batches: Batches,
        clock: Clock,
        generators: StepGenerators,
        world: World,
        requests: ControlRequests,
        size: int,
    ) -> None:
        """`size` is gradient_accumulation_steps, the batches of a step; the last step of an epoch may have fewer."""
        self.batches, self.clock, self.generators, self.world = batches, clock, generators, world
        self.requests, self._size = requests, size
        self.timer = StepTimer(world.device)
        # A step can be dropped between its batches, and by one process alone.
        self._droppable = size > 1 and world.ranks == 1
        self._before: dict[str, Any] = {}  # clock, data and random state before this step
        self.read_error: ConfigError | None = None  # why the next step could not be read; no step follows

    def __iter__(self) -> Iterator[list[Batch]]:
        self.requests.defer_signals()
        while not self.clock.done and not self.requests.stopping and not self.read_error:
            if self.clock.epoch_ended:
                self.batches.set_epoch(self.clock.epoch + 1)
            self._remember()
            for window in self.timer.waited(self._windows()):
                self.clock.tick()
                yield window
                if self.world.ranks == 1:  # of several, all have read the same answer in the lines of the step before
                    self.requests.agree(self.requests.flags())
                if self.clock.done or self.requests.stopping:
                    break
                self._remember()

    def _windows(self) -> Iterator[list[Batch]]:
        """Windows of this epoch; ends before the first one that any process fails to read, and sets `read_error`."""
        rest, window = windows(self.batches, self._size), list[Batch]()
        while not self.read_error:
            try:
                window = next(rest, [])
            except ConfigError as error:
                self.read_error = error
            if self.world.messages and (window or self.read_error):
                said = self.world.messages.first_problem(str(self.read_error or ""))
                self.read_error = ConfigError(said) if said else None
            if not window:
                return
            if not self.read_error:
                yield window
        self.drop_step()

    def micro_batches(self, window: Sequence[Batch], compile_log: CompileLog) -> Iterator[tuple[int, Batch]]:
        """The batches of a step with their numbers, on the device and seeded; raises WorkCancelled between them."""
        for number, batch in enumerate(window, start=1):
            if self._droppable:
                self.requests.raise_if_cancelled()
            self.generators.seed_batch(self.clock.step, number)
            compile_log.bucket = batch.bucket
            yield number, self.timer.moved(batch)

    def average_loss(self, loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of all processes, and in the same all-reduce which requests (ASKED) any of them got."""
        if self.world.ranks == 1:
            return loss, {}
        said = self.requests.flags()
        both = torch.stack([loss, *(torch.full_like(loss, float(name in said)) for name in ASKED)])
        self.world.average(both)
        return both[0], dict(zip(ASKED, both[1:], strict=True))

    def _remember(self) -> None:
        self._before = {"clock": self.clock.state(), "data": self.batches.state_dict()}
        if self._droppable:
            self._before["random"] = rng.get_rng_state(self.world.device)

    def drop_step(self) -> None:
        """Restore clock, data position and random state from before this step; weights have not changed in it."""
        clock, known = self.clock, self._before["clock"]
        clock.step, clock.epoch, clock.in_epoch = (
            known[name] for name in ("current_step", "current_epoch", "step_in_epoch")
        )
        self.batches.load_state_dict(self._before["data"])
        if self._droppable:  # else nothing is drawn before all batches of a step are read
            rng.set_rng_state(self._before["random"], self.world.device)
        self.requests.agree({"stop"})
