"""How wrong the model is about a batch."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from library.objectives import loss as objective
from library.objectives.base import NoisedBatch


def of(
    batch: Any, family: Any, parts: Any, method: Any, run: Any, noise: Callable[[Tensor], NoisedBatch] | None = None
) -> Tensor:
    """Mean weighted error over a batch, a scalar on the device. Nothing here waits for the device.

    `noise` makes latents hard; without it, that is done as the run's random numbers say.
    """
    batch = batch.to(run.device)
    with torch.no_grad():
        latents = batch.latents
        if latents is None:
            # As where they are cached: the VAE's order in memory depends on the size, and a graph on the order.
            latents = family.latents(parts, batch.pixels, run.encoding).contiguous()
        noised = noise(latents) if noise else noised_here(family, latents, run)
    with run.autocast():
        text = conditions(batch, family, parts, method)
        size = batch.full if run.compiled else len(batch)
        predict = functools.partial(filled_up, size, functools.partial(family.predict, parts.denoiser))
        predicted = predict(noised, text, batch.sizes)
        target = noised.target
        if batch.keep_base is not None:
            base = without_adapters(method, lambda: predict(noised, text, batch.sizes))
            target = torch.where(batch.keep_base[:, None, None, None], base, target)
    wrong = objective.elementwise(predicted, target, run.config, noised)
    return objective.reduce(wrong, noised.weight, batch.weights, batch.mask)


def noised_here(family: Any, latents: Tensor, run: Any) -> NoisedBatch:
    """This process' part of the noise for the batches of all processes.

    All draw the same numbers and take their own share, so that two processes learn what one would from twice the batch.
    """
    if run.ranks == 1:
        return family.noised(latents, run.generator)
    whole = family.noised(latents.repeat(run.ranks, 1, 1, 1), run.generator)
    own = slice(run.rank * len(latents), (run.rank + 1) * len(latents))
    values = {f.name: getattr(whole, f.name) for f in fields(whole)}
    return replace(whole, **{name: value[own] for name, value in values.items() if value is not None})


def filled_up(size: int, predict: Any, noised: NoisedBatch, text: dict[str, Tensor], sizes: Tensor) -> Tensor:
    """Predict for a batch that is shorter than `size`, the last of its bucket, in the shape of a full one.

    Another batch size would cost another graph of every block in the middle of a run. The rows that fill it up repeat
    the last one, and their answers are dropped: the numbers are those of the short batch.
    """
    missing = size - len(sizes)
    if missing <= 0:
        return predict(noised, text, sizes)

    def fill(rows: Tensor) -> Tensor:
        return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])

    values = {f.name: getattr(noised, f.name) for f in fields(noised)}
    full = replace(noised, **{name: fill(value) for name, value in values.items() if value is not None})
    return predict(full, {name: fill(rows) for name, rows in text.items()}, fill(sizes))[: len(sizes)]


def without_adapters(method: Any, predict: Callable[[], Tensor]) -> Tensor:
    """The base model's own answer, for images that shall not change it (diff_output_preservation).

    Gradients stay on, and their graph is thrown away: a compiled block would need another graph without them.
    """
    method.set_multiplier(0.0)
    try:
        return predict().detach()
    finally:
        method.set_multiplier(1.0)


def conditions(batch: Any, family: Any, parts: Any, method: Any) -> dict[str, Tensor]:
    """Text outputs: the cached ones, and those of the encoders that learn or were never cached."""
    text = dict(batch.text or {})
    live = live_encoders(parts, method, cached=batch.text is not None)
    if live:
        learns = any(method.trained_parts.get(name) for name in live)
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            text |= family.text(parts, batch.captions, live)
    return text


def live_encoders(parts: Any, method: Any, cached: bool) -> Sequence[str]:
    """Which text encoders have to run in every step."""
    return tuple(name for name in parts.encoders if not cached or method.trained_parts.get(name))
