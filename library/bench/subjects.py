"""Subjects to measure: models of this project, with random weights or from a run's TOML."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from library import families, methods
from library.bench import random_weights
from library.compiler.prewarm import prewarm_inductor
from library.config.building import build_config
from library.config.formats import read_toml
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import raise_if_any
from library.config.run_config import RunConfig
from library.config.schema import options_of
from library.config.sections import EmbeddingRun
from library.families.base import ModelComponents
from library.families.shared import t5
from library.memory.quantization import fp8_storage
from library.methods.base import FrozenBaseMethod
from library.objectives.base import NoisedBatch

FACTOR = 8  # pixels per latent and side
TEXT_TOKENS = 77  # tokens of a CLIP caption
PATH = "random"  # placeholder for files that are never opened


@dataclass
class TrainableModel:
    """A denoiser with its trained parameters, as required by `prepare_denoiser`."""

    components: ModelComponents
    family: Any
    method: Any


class LearnedText(FrozenBaseMethod):
    """Placeholder for a trained word: text encoder outputs of captions with it, as encoders are measured separately."""

    def __init__(self, config: RunConfig, texts: Mapping[str, Tensor]) -> None:
        super().__init__(config, "embedding", (), "learning_rate is 0")
        self.texts = {name: nn.Parameter(text) for name, text in texts.items()}

    def named(self) -> dict[str, nn.Parameter]:
        return self.texts


class Subject(Protocol):
    """A model and training to measure."""

    title: str
    about: JsonMapping  # description for the result file
    batch: int
    resolutions: tuple[int, ...]

    def config(self, options: JsonMapping) -> RunConfig:
        """Return the settings with these options on top. Raises ConfigError for an invalid combination."""

    def make(self, config: RunConfig, device: torch.device) -> TrainableModel:
        """Return a new denoiser on the device."""

    def predict(
        self, trainable: TrainableModel, resolution: int, device: torch.device
    ) -> Callable[[nn.Module], Tensor]:
        """Return a function that calls a denoiser for images of this size: its own, or a copy on another device."""

    def encoders(self) -> Mapping[str, Callable[[torch.device, torch.dtype], Callable[[], Any]]]:
        """Return text encoders by name: a function that loads one and returns a function that runs it."""

    def vae(self, device: torch.device, dtype: torch.dtype) -> nn.Module | None:
        """Return the image autoencoder, if the model has one."""


class FamilySubject:
    """A model of one of our families."""

    def __init__(self, script: str, values: JsonMapping, size: str | None) -> None:
        """`size` is tiny or full for random weights, None for the files in `values`."""
        self.kind = families.config_class(script)
        self.name: str = self.kind.family
        self._module = families.random_module(self.name)
        small = getattr(self._module, "TINY_OPTIONS", {}) if size == "tiny" else {}
        self.values = {**usual(script), **small, **values} if size else dict(values)
        self.batch = int(self.config({}).data.train_batch_size)
        sizes = families.sizes_of_model(self.name, self.config({}), size == "full")
        self.random = self._module.make_networks(sizes) if size else None
        self.title = f"{families.facts_of(self.name).title}, {size} size" if size else self.kind.title
        source = "random weights" if size else str(self.values.get("pretrained_model_name_or_path"))
        self.about: JsonMapping = {"family": self.name, "script": script, "size": size, "model": source}
        width, height = self.config({}).data.size or (1024, 1024)
        side = max(64, round((width * height) ** 0.5 / 64) * 64)
        self.resolutions: tuple[int, ...] = self.random.resolutions if self.random else (side,)
        self._loaded: ModelComponents | None = None

    def config(self, options: JsonMapping) -> RunConfig:
        return build_config(self.kind, {**self.values, **options}, notes=[])

    def make(self, config: RunConfig, device: torch.device) -> TrainableModel:
        """Return a new denoiser on the device, with its trained parameters."""
        family, dtype = families.family_for(config), fp8_storage.storage_type(config)
        with prewarm_inductor(config.compile, device):
            if self.random:
                denoiser = self.random.denoiser()
                where = random_weights.place_weights(denoiser, device, dtype, config)
                families.adopt_denoiser(family, denoiser)
                waits = where.type != device.type
                components = ModelComponents(
                    random_weights.fill_randomly(denoiser, where, dtype, waits_on_host=waits), None, {}, {}, {}
                )
            else:
                components = family.load(dtype, fp8_storage.compute_type(config))
                components.encoders, components.vae = {}, None
        if isinstance(config, EmbeddingRun):
            components.denoiser.requires_grad_(False)
            texts = self._module.input_shapes(family, components.denoiser).texts(self.batch, device)
            return TrainableModel(components, family, LearnedText(config, texts))
        return TrainableModel(components, family, methods.attach_method(components, family, config))

    def predict(
        self, trainable: TrainableModel, resolution: int, device: torch.device
    ) -> Callable[[nn.Module], Tensor]:
        """Return a function that calls a denoiser for images of this size."""
        latents = self.latents(trainable, resolution, device)
        ones = torch.ones(len(latents), device=device)
        noised = NoisedBatch(latents, ones, latents, ones, ones, ones)
        text, sizes = self.text(trainable, device), torch.ones(len(latents), 6, device=device)
        controls = self.shown(trainable, latents)
        return lambda denoiser: trainable.family.predict(denoiser, noised, text, sizes, controls)

    def latents(self, trainable: TrainableModel, size: int | tuple[int, int], device: torch.device) -> Tensor:
        """Return random latents [B, C, h, w] of images of one size: the side of a square, or (width, height)."""
        width, height = size if isinstance(size, tuple) else (size, size)
        channels = self._module.input_shapes(trainable.family, trainable.components.denoiser).latent_channels
        return torch.randn(self.batch, channels, height // FACTOR, width // FACTOR, device=device)

    def shown(self, trainable: TrainableModel, latents: Tensor) -> list[Tensor]:
        """Return random control inputs for these latents: latents, or pixels if the model reads pixels."""
        if self.config({}).control_images.guided:
            number, _, height, width = latents.shape
            return [torch.rand(number, 3, height * FACTOR, width * FACTOR, device=latents.device) * 2 - 1]
        return self._module.input_shapes(trainable.family, trainable.components.denoiser).controls(latents)

    def text(self, trainable: TrainableModel, device: torch.device) -> dict[str, Tensor]:
        """Return random text outputs in the shapes of the caches."""
        if isinstance(trainable.method, LearnedText):
            return {name: text.to(device) for name, text in trainable.method.texts.items()}
        return self._module.input_shapes(trainable.family, trainable.components.denoiser).texts(self.batch, device)

    def encoders(self) -> Mapping[str, Callable[[torch.device, torch.dtype], Callable[[], Any]]]:
        names = self._module.make_networks(families.sizes_of_model(self.name, self.config({}), full=False)).encoders
        return {name: lambda device, dtype, name=name: self._encoder(name, device, dtype) for name in names}

    def _encoder(self, name: str, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
        if self.random:
            model = self._small(self.random.encoders[name](), device, dtype)
        else:
            model = self._stored(dtype).encoders[name].to(device)
        length = TEXT_TOKENS
        if name == "t5xxl":
            family = families.family_for(self.config({}))
            if self.random:
                families.adopt_denoiser(family, self.random.denoiser())
            length = max(family.text_lengths.values())
        model = getattr(model, "language", model)  # of an encoder that reads images as well
        config: Any = model.config
        ids = torch.randint(0, config.vocab_size, (self.batch, length), device=device)
        if name == "t5xxl":
            return lambda: t5.encode_t5_ids(model, ids, None)
        return lambda: model(ids, output_hidden_states=True)

    def _small(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        random_weights.check_room(model, device, dtype)
        return random_weights.fill_randomly(model, device, dtype)

    def vae(self, device: torch.device, dtype: torch.dtype) -> nn.Module | None:
        """Return the image autoencoder, random or from the run's files."""
        if self.random:
            return self._small(self.random.vae(), device, dtype)
        autoencoder = self._stored(dtype).vae
        return autoencoder.to(device) if autoencoder is not None else None

    def _stored(self, dtype: torch.dtype) -> ModelComponents:
        """Read the run's text encoders and VAE, only once."""
        if self._loaded is None:
            self._loaded = families.family_for(self.config({})).load(dtype, dtype)
            self._loaded.denoiser = nn.Identity()
        return self._loaded


def usual(script: str) -> JsonObject:
    """Return the usual training options, with placeholders for files."""
    cls = families.config_class(script)
    values = {
        "pretrained_model_name_or_path": PATH,
        "train_data_dir": PATH,
        "output_dir": PATH,
        "resolution": "1024",
        "max_train_steps": 100,
        "cache_latents": True,
        "cache_text_encoder_outputs": True,
        "optimizer_type": "AdamW",
        "learning_rate": 1e-4,
        "train_batch_size": 1,
        "network_module": next(iter(families.facts_of(cls.family).adapter_modules)),
        "network_dim": 16,
        "network_alpha": 16,
        "network_train_unet_only": True,
        "clip_l": PATH,
        "t5xxl": PATH,
        "ae": PATH,
        "token_string": "zorb",
        "cond_emb_dim": 32,
    }
    options = options_of(cls)
    if issubclass(cls, EmbeddingRun):
        del values["cache_text_encoder_outputs"]  # captions with the trained word are encoded in each step
    return {name: value for name, value in values.items() if name in options}


def subject_of_run(path: Path, script: str, values: JsonMapping) -> FamilySubject:
    """Return the training described by a TOML. Raises ConfigError if its model is unreadable."""
    family_subject = FamilySubject(script, {**read_toml(path), **values}, None)
    problems = list(families.family_for(family_subject.config({})).problems())
    if not family_subject.values.get("pretrained_model_name_or_path"):
        problems = [f"{path.name} names no model: set pretrained_model_name_or_path, or measure --family"]
    raise_if_any(problems)
    family_subject.title = f"{family_subject.kind.title} of {path.name}"
    return family_subject
