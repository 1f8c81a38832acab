"""Passes over a training's own batches, before and between its steps, that compile or record the steps' code."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from library.compiler import cudagraph
from library.compiler.cudagraph import GraphedModel
from library.data.loading import Batches, Kind, latent_area
from library.train.step import rng
from library.train.step.loss import LossFunction


@dataclass(frozen=True)
class TrialPasses:
    """Forward and backward passes without a step; weights do not change."""

    batches: Batches
    compute_loss: LossFunction
    device: torch.device
    pause: Callable[[], None]  # excludes the time since the last step from the speed of steps

    @property
    def denoiser(self) -> nn.Module:
        return self.compute_loss.components.denoiser

    @property
    def recorder(self) -> GraphedModel | None:
        return cudagraph.recorder_of(self.denoiser)

    @property
    def text_learns(self) -> bool:
        """Whether text encoders are trained, too."""
        trained = self.compute_loss.method.trained_parts
        return any(map(trained.get, self.compute_loss.components.encoders))

    def run(self, kind: Kind) -> None:
        """Pass over an example batch of this kind, if need be without gpu_memory_limit. Draws random numbers."""
        try:
            self.run_within_limit(kind)
            return
        except torch.OutOfMemoryError:
            if not cudagraph.lift_memory_limit(self.recorder):
                raise
        self.run_within_limit(kind)  # outside the handler, whose error keeps tensors alive

    def run_within_limit(self, kind: Kind) -> None:
        """Pass over an example batch of this kind, and raise torch.OutOfMemoryError at gpu_memory_limit."""
        batch = self.batches.example(kind)
        self.compute_loss.compile_log.bucket = batch.bucket
        self.compute_loss.warm_up(batch, self.device)

    @contextlib.contextmanager
    def random_state_kept(self) -> Iterator[None]:
        """Restore the random generators when this context ends."""
        before = rng.get_rng_state(self.device)
        try:
            yield
        finally:
            rng.set_rng_state(before, self.device)

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Record no further size in this context; recorded ones are replayed."""
        if (recorder := self.recorder) is None:
            yield
            return
        limit, recorder.size_limit = recorder.size_limit, 0
        try:
            yield
        finally:
            recorder.size_limit = limit

    def largest(self) -> Kind:
        return max(self.batches.kinds(), key=latent_area)

    def record_largest(self) -> None:
        with self.random_state_kept():
            self.run(self.largest())

    def forget_recordings(self) -> None:
        """Free the recordings, as blocks have changed; sizes are recorded again when they occur."""
        if self.recorder:
            self.recorder.forget()
