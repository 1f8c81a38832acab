"""The loss on images that are held out for validation, which reveals overfitting."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from library.compiler import cudagraph, torch_settings
from library.config import phases
from library.config.problems import Message
from library.config.sections import AdapterRun, Validation
from library.data.batch import Batch
from library.data.images import ImageSet
from library.data.loading import Batches
from library.data.threads import ahead, num_workers
from library.families.base import NoisedBatch
from library.optim import averaging
from library.train import beside
from library.train.step.rng import derive_seed
from library.train.stop_requests import WorkCancelled
from library.train.training import Training

NOT_REPORTED = "the result of this validation is not logged ({why}); the training continues"


class ValidationRunner:
    """Measures the same batches with the same noise each time, at the noise levels of the family.

    The training's random numbers and compiled graphs do not change.
    """

    def __init__(self, training: Training, images: ImageSet) -> None:
        self._training = training
        config = training.config
        # Full trainings lack these options, but their dataset_config may hold images back as well.
        self._options = config.validation if isinstance(config, AdapterRun) else Validation()
        seed = self._options.validation_seed
        self._seed = training.generators.seed if seed is None else seed
        held_back = images.validation
        self._batches: Batches | None = Batches(held_back, config, self._seed) if held_back else None

    def when_due(self) -> None:
        """Validate after a step: every n steps and, by default, at the end of every epoch."""
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
        """Repeat the validation that a state was saved before."""
        # Otherwise a resumed run would not stop early where the original does.
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
        """Return the mean loss at each noise level over all processes; empty if one of them was interrupted or failed.

        An unreadable image, lack of memory or any other error causes a warning; the training continues.
        """
        training = self._training
        levels, world, components = training.family.validation_timesteps, training.world, training.components
        sums, num_cut = torch.zeros(len(levels) + 1, device=world.device), torch.zeros(1, device=world.device)
        problem = ""
        try:
            with evaluation_mode([components.denoiser, *components.encoders.values()], training):
                for number, batch, counts in self._own_batches(batches):
                    losses = [self._loss(batch, number, level) for level in levels]
                    if counts:
                        sums += torch.stack([*losses, torch.ones_like(losses[0])])
        except WorkCancelled:
            num_cut += 1
        except Exception as error:
            problem, num_cut = beside.reason(error, training), num_cut + 1
            if training.method.shards is not None:
                world.gather(True)  # the others wait in this collective, and then end, too
        # Also if this process was interrupted: a collective that one of them leaves out would block the others.
        if world.ranks > 1:
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(num_cut)
        if problems := [*filter(None, world.gather(problem))]:
            training.journal.warn(
                Message("this validation is left out ({why}); the training continues", why=problems[0])
            )
        elif num_cut.item():
            training.journal.say("The validation was cut short, as the training is ending.")
        if num_cut.item():
            return {}
        *totals, count = sums.tolist()
        return {str(level): total / count for level, total in zip(levels, totals, strict=True)}

    def _own_batches(self, batches: Batches) -> Iterator[tuple[int, Batch, bool]]:
        """Yield this process' batches with their numbers, on the device and as latents, and whether they count."""
        training, world = self._training, self._training.world
        numbered = list(enumerate(batches.draws(epoch=1)))[: self._options.max_validation_steps]
        own_draws = numbered[world.rank :: world.ranks]
        # Processes with shards of one model must run equally many passes, so one that lacks a batch repeats the last.
        missing = training.method.shards is not None and len(own_draws) < -(-len(numbered) // world.ranks)
        num_counted, own_draws = len(own_draws), [*own_draws, *numbered[-1:] * missing]
        workers = num_workers(training.config.data.max_data_loader_n_workers)
        loaded = ahead(batches.make, [draw for _, draw in own_draws], workers)
        for position, ((number, _), batch) in enumerate(zip(own_draws, loaded, strict=True)):
            training.journal.phase(phases.VALIDATING, number, len(numbered))
            batch = batch.to(world.device)
            if batch.latents is None:
                generator = self._generator(number, "image")
                assert batch.pixels is not None
                latents = training.family.latents(training.components, batch.pixels, generator)
                batch = replace(batch, latents=latents)
            yield number, batch, position < num_counted

    def _loss(self, batch: Batch, number: int, level: float) -> Tensor:
        def noise(latents: Tensor) -> NoisedBatch:
            timesteps = torch.full((len(latents),), level, device=latents.device)
            return self._training.family.noised(latents, self._generator(number, level), timesteps)

        training = self._training
        return cudagraph.with_room(training.components.denoiser, lambda: training.compute_loss(batch, noise))

    def _generator(self, number: int, level: float | str) -> torch.Generator:
        return validation_generator(self._seed, number, level, self._training.world.device)


def validation_generator(seed: int, number: int, level: float | str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(derive_seed(f"validation {seed} {number} {level}"))


def cancel_check(training: Training) -> Callable[[], None]:
    """Return a function for each pass of the denoiser: it raises WorkCancelled when the user ends the training now."""
    requests, world = training.journal.requests, training.world

    def check() -> None:
        if training.method.shards is None:
            requests.raise_if_cancelled()
        elif any(world.gather(requests.cancelled())):  # all processes compute together, so they must stop together
            raise WorkCancelled

    return check


@contextlib.contextmanager
def evaluation_mode(networks: Iterable[nn.Module], training: Training) -> Iterator[None]:
    """Run networks in evaluation mode, eagerly and without gradients, within this context.

    Raises WorkCancelled from the first network when the user ends the training now.
    """
    networks, check = list(networks), cancel_check(training)
    hook = networks[0].register_forward_pre_hook(lambda *_: check(), prepend=True)
    try:
        with torch_settings.stance("force_eager"), without_learning(networks, training):
            yield
    finally:
        hook.remove()


@contextlib.contextmanager
def without_learning(networks: Iterable[nn.Module], training: Training) -> Iterator[None]:
    """Run networks in evaluation mode and without gradients, with averaged weights, within this context."""
    with (
        in_evaluation_mode(networks),
        torch.no_grad(),
        training.world.autocast(),
        averaging.averaged(training.updates.raw_optimizer),
    ):
        yield


@contextlib.contextmanager
def in_evaluation_mode(networks: Iterable[nn.Module]) -> Iterator[None]:
    """Run networks in evaluation mode within this context: dropout would draw random numbers of the training."""
    # Save the mode of each module: adapters are in training mode inside a denoiser in evaluation mode.
    modes = [(module, module.training) for network in networks for module in network.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
