"""The loss on images that are held back: whether the training still learns, or only remembers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from library import data
from library.data.threads import ahead, num_workers
from library.train import loss
from library.train.evaluating import evaluation_mode
from library.train.rng import derive_seed
from library.train.stop_requests import WorkCancelled


class Validation:
    """Measures the same batches with the same noise again and again, at the four noise levels of the family.

    Neither the random numbers nor the compiled graphs of training notice.
    """

    def __init__(self, images: Any, family: Any, parts: Any, method: Any, run: Any) -> None:
        self._family, self._parts, self._learner, self._run = family, parts, method, run
        # The full trainings have no such options, but their dataset_config may hold images back as well.
        self._options = getattr(run.config, "validation", None)
        seed = getattr(self._options, "validation_seed", None)
        self._seed = run.seed if seed is None else seed
        self._batches: Any = data.batches(images.validation, run.config, self._seed) if images.validation else None
        if self._batches is None and getattr(self._options, "validation_split", 0.0):
            run.warn("validation_split is so small that it holds no image back: nothing is validated")

    def when_due(self) -> None:
        """After a step: every so many steps and, if nothing else is said, at the end of every epoch."""
        if self._batches is None:
            return
        steps = getattr(self._options, "validate_every_n_steps", None)
        epochs = getattr(self._options, "validate_every_n_epochs", None) or 1
        if due := list(self._run.clock.every(steps, epochs)):
            self._run.settle()
            if found := self._measure():
                for when in due:
                    self._run.validated(when, found)

    def _measure(self) -> dict[str, float]:
        """The mean loss at each noise level, over all processes; nothing when one of them had to end before."""
        levels, run = self._family.validation_timesteps, self._run
        sums, cut = torch.zeros(len(levels) + 1, device=run.device), torch.zeros(1, device=run.device)
        networks = [self._parts.denoiser, *self._parts.encoders.values()]
        try:
            with evaluation_mode(networks, run):
                for number, batch in self._own_batches():
                    losses = [self._loss(batch, number, level) for level in levels]
                    sums += torch.stack([*losses, torch.ones_like(losses[0])])
        except WorkCancelled:
            run.say("The validation is not done to the end, as the training ends now.")
            cut += 1
        if run.ranks > 1:
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(cut)
        if cut.item():
            return {}
        *totals, count = sums.tolist()
        return {str(level): total / count for level, total in zip(levels, totals, strict=True)}

    def _own_batches(self) -> Iterator[tuple[int, Any]]:
        """The batches of this process with their numbers, on the device and as latents."""
        run, most = self._run, getattr(self._options, "max_validation_steps", None)
        numbered = list(enumerate(self._batches.draws(epoch=1)))[:most]
        own = numbered[run.rank :: run.ranks]
        workers = num_workers(run.config.data.max_data_loader_n_workers)
        made = ahead(self._batches.make, [draw for _, draw in own], workers)
        for (number, _), batch in zip(own, made, strict=True):
            run.phase("validating", number, len(numbered))
            batch = batch.to(run.device)
            if batch.latents is None:
                generator = self._generator(number, "image")
                batch = replace(batch, latents=self._family.latents(self._parts, batch.pixels, generator))
            yield number, batch

    def _loss(self, batch: Any, number: int, level: float) -> Tensor:
        def noise(latents: Tensor) -> Any:
            timesteps = torch.full((len(latents),), level, device=latents.device)
            return self._family.noised(latents, self._generator(number, level), timesteps)

        return loss.of(batch, self._family, self._parts, self._learner, self._run, noise)

    def _generator(self, number: int, level: Any) -> torch.Generator:
        return torch.Generator(self._run.device).manual_seed(derive_seed(f"validation {self._seed} {number} {level}"))
