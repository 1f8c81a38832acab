"""The loss of a batch: add noise, predict, compare with the target."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from library.compiler.log import CompileLog
from library.config.run_config import RunConfig
from library.data.batch import Batch
from library.families.base import Family, ModelComponents, NoisedBatch
from library.families.capabilities import TakesControls
from library.methods import TrainingMethod
from library.objectives import loss as objective
from library.train.step.rng import StepGenerators

Predict = Callable[[NoisedBatch, dict[str, Tensor], Tensor], Tensor]


class Machine(Protocol):
    """The part of `World` that a loss uses: this process' rank, the number of processes, mixed precision."""

    rank: int
    ranks: int

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of mixed precision."""


@dataclass(frozen=True)
class LossFunction:
    """Mean weighted loss of a batch, a 0-dim tensor on the device, without synchronising."""

    family: Family
    components: ModelComponents
    method: TrainingMethod
    config: RunConfig
    machine: Machine
    generators: StepGenerators
    compile_log: CompileLog

    def __call__(self, batch: Batch, noise: Callable[[Tensor], NoisedBatch] | None = None) -> Tensor:
        """Return the loss. `noise` makes noised latents; by default the step's generator draws noise and timesteps."""
        return self._caption_loss(batch, *self._noised_inputs(batch, noise))

    def parts(self, batch: Batch) -> Iterator[tuple[Tensor, bool]]:
        """Yield the terms whose sum a step minimizes, each with whether it is the last.

        Take the gradient of each before the next: so only one keeps activations, and each can be recorded.
        """
        preservation = self.config.preservation
        if preservation is None:
            yield self(batch), True
            return
        inputs = self._noised_inputs(batch)
        yield self._caption_loss(batch, *inputs), False
        yield preservation.weight * self._preservation_loss(batch, *inputs), True

    def _noised_inputs(
        self, batch: Batch, noise: Callable[[Tensor], NoisedBatch] | None = None
    ) -> tuple[NoisedBatch, list[Tensor]]:
        """Return noised latents and controls."""
        with torch.no_grad():
            latents = batch.latents
            if latents is None:
                assert batch.pixels is not None  # a batch has one of both
                # Contiguous like cached latents: the VAE's memory format depends on the size, and graphs on the format.
                latents = self.family.latents(self.components, batch.pixels, self.generators.vae).contiguous()
            return noise(latents) if noise else self.add_noise(latents), self.controls(batch)

    def _caption_loss(self, batch: Batch, noised: NoisedBatch, controls: Sequence[Tensor]) -> Tensor:
        """Return the loss of the prediction for the captions."""
        with self.machine.autocast():
            text = self.text(batch)
            target = noised.target
            # First, as recomputing blocks read what the last pass has prepared: adapters' factors, joined text.
            if batch.keep_base is not None and self.config.can_be_left_out:
                base = self._base_prediction(batch, noised, lambda: text, controls)
                target = torch.where(batch.keep_base[:, None, None, None], base, target)
            predicted = self._predict(batch, noised, text, controls)
        options = self.config.loss
        losses = objective.elementwise(predicted, target, options.loss_type, noised.huber_c)
        by_area = options.normalize_masked_area_loss
        return objective.per_image(losses, noised.weight, batch.weights, batch.mask, by_area).mean()

    def _preservation_loss(self, batch: Batch, noised: NoisedBatch, controls: Sequence[Tensor]) -> Tensor:
        """Return the mean square by which adapters change the predictions for the preserved prompts."""
        assert batch.preserved_captions is not None  # of every image of a training
        preserved = replace(batch, captions=batch.preserved_captions, text=batch.preserved_text)
        with self.machine.autocast():
            base = self._base_prediction(preserved, noised, lambda: self.text(preserved), controls)
            predicted = self._predict(preserved, noised, self.text(preserved), controls)
        return torch.nn.functional.mse_loss(predicted.float(), base.float())

    def _predict(
        self, batch: Batch, noised: NoisedBatch, text: dict[str, Tensor], controls: Sequence[Tensor]
    ) -> Tensor:
        compiled = self.config.compile.compile and not self.compile_log.fallback

        def predict_all(noised: NoisedBatch, text: dict[str, Tensor], sizes: Tensor) -> Tensor:
            padded_controls = [pad_rows(rows, len(sizes)) for rows in controls]
            return self.family.predict(self.components.denoiser, noised, text, sizes, padded_controls)

        return predict_padded(batch.full if compiled else len(batch), predict_all, noised, text, batch.sizes)

    def add_noise(self, latents: Tensor) -> NoisedBatch:
        """Return noised latents: this process' rows of the noise for all processes' batches."""
        rank, ranks, generator = self.machine.rank, self.machine.ranks, self.generators.noise
        if ranks == 1:
            return self.family.noised(latents, generator)
        # All processes draw the same numbers and take their own rows, so two of them compute what one does with twice
        # the batch size.
        own_rows = slice(rank * len(latents), (rank + 1) * len(latents))
        return _map_tensors(
            self.family.noised(latents.repeat(ranks, 1, 1, 1), generator), lambda values: values[own_rows]
        )

    def controls(self, batch: Batch) -> list[Tensor]:
        """Return reference images, control image or inpainting mask, as `Family.predict` takes them."""
        control_images = list(batch.controls)
        if control_images and batch.latents is None and not batch.is_guided:
            assert isinstance(self.family, TakesControls)  # otherwise scanning the data set would have failed
            control_images = [self.family.control_latents(self.components, pixels) for pixels in control_images]
        return control_images if batch.paint is None else [*control_images, batch.paint]

    def text(self, batch: Batch) -> dict[str, Tensor]:
        """Return text outputs by name: cached ones, and those of encoders that are trained or not cached."""
        text = dict(batch.text or {})
        live = live_encoders(self.components, self.method, cached=batch.text is not None)
        if live:
            learns = any(self.method.trained_parts.get(name) for name in live)
            with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
                text |= self.family.text(self.components, batch.captions, tuple(live))
        if length := batch.text_length:
            cut = text.keys() & self.family.text_lengths.keys()
            text |= {name: with_text_length(text[name], length) for name in cut}
        return text

    def _base_prediction(
        self, batch: Batch, noised: NoisedBatch, text: Callable[[], dict[str, Tensor]], controls: Sequence[Tensor]
    ) -> Tensor:
        """Return the detached prediction without adapters, the target of what a training preserves. `text` is called
        while text encoders have no adapters, either.
        """
        if self.config.control_images.guided:  # the trained modules do nothing without a control image
            return self._predict(batch, noised, text(), ()).detach()
        method: Any = self.method  # adapters, which this kind of run can leave out
        with method.left_out():
            return self._predict(batch, noised, text(), controls).detach()

    def warm_up(self, batch: Batch, device: torch.device) -> None:
        """Run forward and backward as in a step without side effects: no gradient is kept, no weight hook runs."""
        loss = self(batch.to(device))
        weights = self.method.parameters()
        if shards := self.method.shards:  # the loss does not depend on the sharded parameters themselves
            loss.backward()
            shards.forget_gradients()
            for p in weights:
                p.grad = None
            return
        if not self.config.adapters:  # cheap gradient targets that still force a backward pass through all blocks
            weights = [p for p in weights if p.dim() < 2] or weights
        torch.autograd.grad(loss, weights, allow_unused=True)


# Another batch size would recompile every block in the middle of a run.
# Why: docs/decisions/2026-11-20-short-batches-are-padded.md
def predict_padded(size: int, predict: Predict, noised: NoisedBatch, text: dict[str, Tensor], sizes: Tensor) -> Tensor:
    """Predict for a batch shorter than `size` (the last of its bucket) in the shape of a full one."""
    # The padding repeats the last row, and its predictions are dropped, so the loss is that of the short batch.
    if size <= len(sizes):
        return predict(noised, text, sizes)
    full = _map_tensors(noised, lambda rows: pad_rows(rows, size))
    text = {name: pad_rows(rows, size) for name, rows in text.items()}
    return predict(full, text, pad_rows(sizes, size))[: len(sizes)]


def pad_rows(rows: Tensor, size: int) -> Tensor:
    """Pad [B, ...] to [size, ...] by repeating the last row; return it unchanged if it has enough rows."""
    missing = size - len(rows)
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing > 0 else rows


def with_text_length(text: Tensor, length: int) -> Tensor:
    """Cut text outputs [B, L, ...] to [B, length, ...], or pad them with zeros."""
    if (missing := length - text.shape[1]) <= 0:
        return text[:, :length].contiguous()
    return torch.cat([text, text.new_zeros(len(text), missing, *text.shape[2:])], dim=1)


def live_encoders(components: ModelComponents, method: TrainingMethod, cached: bool) -> tuple[str, ...]:
    """Return the text encoders that run in each step; `cached`: whether captions are encoded once."""
    return tuple(name for name in components.encoders if not cached or method.differs(name))


def _map_tensors(noised: NoisedBatch, change: Callable[[Tensor], Tensor]) -> NoisedBatch:
    values = {f.name: getattr(noised, f.name) for f in fields(noised)}
    return replace(noised, **{name: change(value) for name, value in values.items() if value is not None})
