"""The loss on images that are held out for validation, which shows overfitting."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from library.compiler import cudagraph
from library.config import phases
from library.config.problems import Message
from library.config.sections import AdapterRun, Validation
from library.data.batch import Batch
from library.data.images import ImageSet
from library.data.loading import Batches
from library.data.threads import ahead, num_workers
from library.families.base import NoisedBatch
from library.optim import optimizers
from library.train import beside
from library.train.step.rng import derive_seed
from library.train.stop_requests import WorkCancelled
from library.train.training import Training

NOT_REPORTED = "the result of this validation is not logged ({why}); the training goes on"


class ValidationRunner:
    """Measures the same batches with the same noise again and again, at the noise levels of the family.

    Random numbers and compiled graphs of the training stay as they are.
    """

    def __init__(self, training: Training, images: ImageSet) -> None:
        self._training = training
        config = training.config
        # The full trainings have no such options, but their dataset_config may hold images back as well.
        self._options = config.validation if isinstance(config, AdapterRun) else Validation()
        seed = self._options.validation_seed
        self._seed = training.generators.seed if seed is None else seed
        held_back = images.validation
        self._batches: Batches | None = Batches(held_back, config, self._seed) if held_back else None

    def when_due(self) -> None:
        """After a step: every so many steps and, if nothing else is said, at the end of every epoch."""
        if self._batches is None:
            return
        steps = self._options.validate_every_n_steps
        epochs = self._options.validate_every_n_epochs or 1
        training = self._training
        if due := list(training.clock.every(steps, epochs)):
            training.step_log.settle()
            if losses := self._measure(self._batches):
                beside.attempt(lambda: self._report(due, losses), NOT_REPORTED, training)
                if training.early_stop.patience is not None:
                    training.early_stop.count(training.clock.step, sum(losses.values()) / len(losses))
                    training.early_stop.end_when_due(training.clock, training.world, training.journal)

    def after_resume(self) -> None:
        """Make up for the validation that a state was saved before: a training that goes on ends where the other did.

        Without early_stop_patience no step depends on it.
        """
        training = self._training
        if training.clock.step and training.early_stop.lacks(training.clock.step):
            self.when_due()
        elif training.clock.step:
            training.early_stop.end_when_due(training.clock, training.world, training.journal)

    def _report(self, due: list[str], losses: dict[str, float]) -> None:
        training = self._training
        for when in due:
            training.journal.validated(when, training.clock, losses, training.step_log.meter.average)

    def _measure(self, batches: Batches) -> dict[str, float]:
        """The mean loss at each noise level, over all processes; empty if one of them was interrupted or failed.

        An image that cannot be read, a lack of memory or any other error causes a warning; the training goes on.
        """
        training = self._training
        levels, world, components = training.family.validation_timesteps, training.world, training.components
        sums, cut = torch.zeros(len(levels) + 1, device=world.device), torch.zeros(1, device=world.device)
        problem = ""
        try:
            with evaluation_mode([components.denoiser, *components.encoders.values()], training):
                for number, batch, counts in self._own_batches(batches):
                    losses = [self._loss(batch, number, level) for level in levels]
                    if counts:
                        sums += torch.stack([*losses, torch.ones_like(losses[0])])
        except WorkCancelled:
            cut += 1
        except Exception as error:
            problem, cut = beside.reason(error, training), cut + 1
            if training.method.shards is not None:
                world.gather(True)  # the others wait to compute together, and end it
        if world.ranks > 1:
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(cut)
        if said := [*filter(None, world.gather(problem))]:
            training.journal.warn(Message("this validation is left out ({why}); the training goes on", why=said[0]))
        elif cut.item():
            training.journal.say("The validation is not done to the end, as the training ends now.")
        if cut.item():
            return {}
        *totals, count = sums.tolist()
        return {str(level): total / count for level, total in zip(levels, totals, strict=True)}

    def _own_batches(self, batches: Batches) -> Iterator[tuple[int, Batch, bool]]:
        """The batches of this process with their numbers, on the device and as latents, and whether they count.

        Processes with shards of one model must run equally many passes: one that lacks a batch takes the last one
        again.
        """
        training, world = self._training, self._training.world
        numbered = list(enumerate(batches.draws(epoch=1)))[: self._options.max_validation_steps]
        own = numbered[world.rank :: world.ranks]
        missing = training.method.shards is not None and len(own) < -(-len(numbered) // world.ranks)
        counted, own = len(own), [*own, *numbered[-1:] * missing]
        workers = num_workers(training.config.data.max_data_loader_n_workers)
        made = ahead(batches.make, [draw for _, draw in own], workers)
        for place, ((number, _), batch) in enumerate(zip(own, made, strict=True)):
            training.journal.phase(phases.VALIDATING, number, len(numbered))
            batch = batch.to(world.device)
            if batch.latents is None:
                generator = self._generator(number, "image")
                assert batch.pixels is not None
                latents = training.family.latents(training.components, batch.pixels, generator)
                batch = replace(batch, latents=latents)
            yield number, batch, place < counted

    def _loss(self, batch: Batch, number: int, level: float) -> Tensor:
        def noise(latents: Tensor) -> NoisedBatch:
            timesteps = torch.full((len(latents),), level, device=latents.device)
            return self._training.family.noised(latents, self._generator(number, level), timesteps)

        training = self._training
        return cudagraph.with_room(training.components.denoiser, lambda: training.compute_loss(batch, noise))

    def _generator(self, number: int, level: float | str) -> torch.Generator:
        return generator_of(self._seed, number, level, self._training.world.device)


def generator_of(seed: int, number: int, level: float | str, device: torch.device) -> torch.Generator:
    """The generator of the noise of a batch, by its number, at a noise level: the same in every validation."""
    return torch.Generator(device).manual_seed(derive_seed(f"validation {seed} {number} {level}"))


@contextlib.contextmanager
def evaluation_mode(networks: Iterable[nn.Module], training: Training) -> Iterator[None]:
    """Inside, networks are in evaluation mode, run eagerly and without gradients; afterwards all is as before.

    A compiled block would need other graphs here, and compiling them would cost more than running eagerly. Raises
    WorkCancelled out of the first network when somebody wants the training to end now.
    """
    networks, requests, world = list(networks), training.journal.requests, training.world

    def check(*given: Any) -> None:
        if training.method.shards is None:
            requests.raise_if_cancelled()
        elif any(world.gather(requests.cancelled())):  # all compute together, so all end it together
            raise WorkCancelled

    hook = networks[0].register_forward_pre_hook(check, prepend=True)
    # Mode by module: inside a denoiser in evaluation mode its adapters are in training mode.
    modes = [(module, module.training) for network in networks for module in network.modules()]
    for module, _ in modes:
        module.training = False
    try:
        with (
            torch.compiler.set_stance("force_eager"),
            torch.no_grad(),
            training.world.autocast(),
            optimizers.averaged(training.updates.raw_optimizer),
        ):
            yield
    finally:
        hook.remove()
        for module, mode in modes:
            module.training = mode
