"""Group batches into optimizer steps, seed the generators of each batch, and undo a cancelled step."""

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
from library.train.stop_requests import REQUEST_KINDS, ControlRequests


class Stepper:
    """Yields the batches of each optimizer step, from the clock's position to the end or a stop."""

    def __init__(
        self,
        batches: Batches,
        clock: Clock,
        generators: StepGenerators,
        world: World,
        requests: ControlRequests,
        size: int,
    ) -> None:
        """`size` is gradient_accumulation_steps, the batches per step; an epoch's last step may have fewer."""
        self.batches, self.clock, self.generators, self.world = batches, clock, generators, world
        self.requests, self._size = requests, size
        self.timer = StepTimer(world.device)
        # A single process can drop a step between two of its batches.
        self._droppable = size > 1 and world.ranks == 1
        self._before: dict[str, Any] = {}  # clock, data and random state before this step
        self.read_error: ConfigError | None = None  # why the next step is unreadable; no step follows

    def __iter__(self) -> Iterator[list[Batch]]:
        self.requests.defer_signals()
        while not self.clock.done and not self.requests.stopping and not self.read_error:
            if self.clock.epoch_ended:
                self.batches.set_epoch(self.clock.epoch + 1)
            self._remember()
            for window in self.timer.waited(self._windows()):
                self.clock.tick()
                yield window
                if self.world.ranks == 1:  # several processes agree by the all-reduced numbers of the previous step
                    self.requests.agree(self.requests.flags())
                if self.clock.done or self.requests.stopping:
                    break
                self._remember()

    def _windows(self) -> Iterator[list[Batch]]:
        """Yield the windows of this epoch; stop before the first that any process fails to read, and set
        `read_error`.
        """
        remaining, window = windows(self.batches, self._size), list[Batch]()
        while not self.read_error:
            try:
                window = next(remaining, [])
            except ConfigError as error:
                self.read_error = error
            if self.world.messages and (window or self.read_error):
                problem = self.world.messages.first_problem(str(self.read_error or ""))
                self.read_error = ConfigError(problem) if problem else None
            if not window:
                return
            if not self.read_error:
                yield window
        self.drop_step()

    def micro_batches(self, window: Sequence[Batch], compile_log: CompileLog) -> Iterator[tuple[int, Batch]]:
        """Yield the batches of a step with their numbers, on the device and seeded; raise WorkCancelled
        between them.
        """
        for number, batch in enumerate(window, start=1):
            if self._droppable:
                self.requests.raise_if_cancelled()
            self.generators.seed_batch(self.clock.step, number)
            compile_log.bucket = batch.bucket
            yield number, self.timer.moved(batch)

    def average_loss(self, loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of all processes, and in the same all-reduce which requests (REQUEST_KINDS) any of them
        received.
        """
        if self.world.ranks == 1:
            return loss, {}
        received = self.requests.flags()
        averaged = torch.stack([loss, *(torch.full_like(loss, float(name in received)) for name in REQUEST_KINDS)])
        self.world.average(averaged)
        return averaged[0], dict(zip(REQUEST_KINDS, averaged[1:], strict=True))

    def _remember(self) -> None:
        self._before = {"clock": self.clock.state(), "data": self.batches.state_dict()}
        if self._droppable:
            self._before["random"] = rng.get_rng_state(self.world.device)

    def drop_step(self) -> None:
        """Restore clock, data position and random state from before this step; weights have not changed in it."""
        clock, saved_clock = self.clock, self._before["clock"]
        clock.step, clock.epoch, clock.in_epoch = (
            saved_clock[name] for name in ("current_step", "current_epoch", "step_in_epoch")
        )
        self.batches.load_state_dict(self._before["data"])
        if self._droppable:  # otherwise nothing is drawn before all batches of a step are read
            rng.set_rng_state(self._before["random"], self.world.device)
        self.requests.agree({"stop"})
