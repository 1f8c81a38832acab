"""The held-out loss of saved files: the batches, noise and noise levels of the training's own validation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from library.compiler.log import CompileLog
from library.config.problems import Message, Report
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.data.batch import Batch
from library.data.encoding import image_generator
from library.data.held_out import plain_options
from library.data.images import ImageSet
from library.data.loading import Batches
from library.families.base import NoisedBatch
from library.families.capabilities import TakesControls
from library.sampling.generate import OpenModel
from library.train.evaluation.validation import validation_generator
from library.train.step.loss import LossFunction
from library.train.step.rng import StepGenerators

MEASURED_IMAGES = 8  # images to measure if none are held out


class AppliedMethod:
    """Placeholder for a finished training method: nothing is trained, and applied files can be switched off."""

    trained_parts: Mapping[str, bool] = {}
    shards = None

    def __init__(self, model: OpenModel, strengths: Mapping[Any, float]) -> None:
        self._applied, self._strengths = model.applied, strengths

    def differs(self, part: str) -> bool:
        return part in self.trained_parts

    def set_multiplier(self, by: float) -> None:
        self._applied.set(self._strengths if by else {})


@dataclass
class HeldOutLoss:
    """Measures one file after another on the same batches; VAE and text encoder outputs are kept."""

    images: ImageSet
    config: RunConfig  # of the training, with its seed
    _encoded: list[Batch] = field(default_factory=list)  # on the CPU, with latents
    _texts: list[dict[str, Tensor]] = field(default_factory=list)

    def __call__(self, model: OpenModel, strengths: Mapping[Any, float], config: RunConfig, report: Report) -> float:
        """Return the mean loss over batches and noise levels; `strengths` are those of the applied files.

        `config` is the one that the model was opened with.
        """
        family, device = model.family, model.world.device
        model.applied.set(strengths)
        if not self._encoded:
            report(Message("encoding images"), 0, 1)
            self._encoded = [*self._with_latents(model)]
            self._texts.clear()
        if not self._texts:
            self._texts = self._encode_text(model)
        generators = StepGenerators(self._seed, device, 0)
        method: Any = AppliedMethod(model, strengths)
        measure = LossFunction(family, model.components, method, config, model.world, generators, CompileLog())
        levels, losses = family.validation_timesteps, []
        with model.computing():
            for number, (batch, text) in enumerate(zip(self._encoded, self._texts, strict=True)):
                report(Message("measuring the held-out loss"), number, len(self._encoded))
                batch = replace(batch, text=text).to(device)
                losses.append(
                    torch.stack([self._loss_at_level(level, number, batch, measure) for level in levels]).mean()
                )
        return float(torch.stack(losses).mean())

    def forget_text(self) -> None:
        self._texts.clear()

    def _loss_at_level(self, level: float, number: int, batch: Batch, measure: LossFunction) -> Tensor:
        def noise(latents: Tensor) -> NoisedBatch:
            timesteps = torch.full((len(latents),), level, device=latents.device)
            return measure.family.noised(
                latents, validation_generator(self._seed, number, level, latents.device), timesteps
            )

        return measure(batch, noise)

    @property
    def _seed(self) -> int:
        validation_seed = self.config.validation.validation_seed if isinstance(self.config, AdapterRun) else None
        return (self.config.steps.seed or 0) if validation_seed is None else validation_seed

    def _with_latents(self, model: OpenModel) -> Iterator[Batch]:
        """Return the batches, encoded like in the training: image by image if it caches latents."""
        batches = Batches(self.images, self.config, self._seed)
        max_batches = self.config.validation.max_validation_steps if isinstance(self.config, AdapterRun) else None
        vae, device = model.components.vae, model.world.device
        assert vae is not None
        places = {image.path: image for image in self.images.items}
        vae.to(device)
        try:
            for number, draw in enumerate(batches.draws(epoch=1)[:max_batches]):
                batch = batches.make(draw).to(device)
                assert batch.pixels is not None
                # Like the training, which caches latents outside of mixed precision.
                with torch.no_grad() if self.config.cache.latents else model.computing():
                    batch_generator = validation_generator(self._seed, number, "image", device)
                    image_generators = [image_generator(path, places[path].fit.bucket) for path in batch.paths]
                    generator = image_generators if self.config.cache.latents else batch_generator
                    latents = model.family.latents(model.components, batch.pixels, generator)
                    controls = batch.controls
                    if controls and not batch.is_guided:
                        assert isinstance(model.family, TakesControls)
                        controls = tuple(
                            model.family.control_latents(model.components, control) for control in controls
                        )
                if self.config.cache.text:  # cached captions are encoded once, without variations
                    batch.captions = [places[path].encoded_caption for path in batch.paths]
                yield replace(batch, latents=latents.contiguous(), pixels=None, controls=controls).to("cpu")
        finally:
            vae.to("cpu")

    def _encode_text(self, model: OpenModel) -> list[dict[str, Tensor]]:
        with model.computing(), model.encoders_on_device():
            outputs = [model.family.text(model.components, batch.captions) for batch in self._encoded]
        return [{name: value.cpu() for name, value in output.items()} for output in outputs]


def choose_measured_images(images: ImageSet) -> tuple[ImageSet, bool]:
    """Return the images to measure the loss on, and whether they are held out: the validation split, or a few of the
    data set without augmentation.
    """
    if images.validation:
        return images.validation, True
    learned = [image for image in images.items if not image.is_reg] or images.items
    chosen = learned[:: max(1, len(learned) // MEASURED_IMAGES)][:MEASURED_IMAGES]
    items = [replace(image, repeats=1, subset=plain_options(image.subset)) for image in chosen]
    return ImageSet(items, images.datasets), False
