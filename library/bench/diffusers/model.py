"""Any transformer of diffusers, by class name and config: Qwen-Image, Wan VACE, and future ones.

Its inputs are derived from the usual names of `forward`'s parameters.
"""

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library import families
from library.bench import random_weights
from library.bench.diffusers.inputs import DiffusersInputs
from library.bench.subjects import TrainableModel, usual
from library.compiler.torch_private import pytree
from library.config.building import build_config
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import load_json
from library.config.problems import ConfigError, first_line
from library.config.run_config import RunConfig
from library.config.values import did_you_mean
from library.families.base import ModelComponents
from library.families.shared.random_networks import build_on_meta
from library.memory.quantization import fp8_storage
from library.methods.adapters import AdapterSpec, LoraLinear
from library.methods.factor_cache import FactorCache

# Training options: those of a LoRA for transformers of this size.
SCRIPT = families.lora_script(next(f.name for f in families.all_families() if f.trained_in_compute_dtype))


class DiffusersFamily:
    """The facts that the trainer needs about a model outside our families."""

    name = "diffusers"
    block_inputs: JsonMapping = {}

    def __init__(self, block_classes: tuple[str, ...]) -> None:
        self.block_classes = block_classes

    def resolution_level(self, path: str) -> int:
        return 0

    def execution_key(self, path: str) -> tuple[int, ...]:
        return ()

    def swap_plan(self, number: int) -> dict[str, int]:
        return {self.block_classes[0]: number}


class DiffusersLora:
    """LoRA on every Linear layer of the blocks."""

    factor_caches: tuple[FactorCache, ...] = ()  # required of a TrainingMethod; here each layer scales its own factors

    def __init__(self, model: nn.Module, block_classes: tuple[str, ...], rank: int, rate: float) -> None:
        model.requires_grad_(False)
        self.rate, self.layers = rate, []
        for block in [m for m in model.modules() if type(m).__name__ in block_classes]:
            for path, layer in [(p, m) for p, m in block.named_modules() if type(m) is nn.Linear]:
                place, _, name = path.rpartition(".")
                self.layers.append(LoraLinear.around(layer, AdapterSpec(rank=rank, alpha=rank)))
                setattr(block.get_submodule(place), name, self.layers[-1])

    def parameters(self) -> list[nn.Parameter]:
        return [p for layer in self.layers for p in (*layer.lora_down.parameters(), *layer.lora_up.parameters())]

    def groups(self) -> list[JsonObject]:
        return [{"params": self.parameters(), "lr": self.rate, "name": "adapters"}]

    def train(self, mode: bool = True) -> "DiffusersLora":
        return self


class DiffusersSubject:
    """A transformer of diffusers with random weights, trained as a LoRA."""

    def __init__(self, name: str, arguments: JsonMapping, values: JsonMapping, inputs: JsonMapping):
        """`arguments` are those of the class; `inputs` are shapes of parameters without a usual name, and the number of
        latent `frames` of a video. Raises ConfigError if they do not fit together.
        """
        self.cls, self.arguments = class_of(name), class_arguments(name, arguments)
        self.values = {**usual(SCRIPT), **values}
        self.batch, self.title = int(self.config({}).data.train_batch_size), name
        self.inputs = DiffusersInputs(
            self.cls, {n: x for n, x in inputs.items() if n != "frames"}, self.batch, int(inputs.get("frames", 1))
        )
        blank = self._empty()
        self.inputs.settle(blank)
        self.block_classes = repeated_classes(self.cls, blank)
        facts = {"class": name, "config": dict(arguments), "size": None, "script": SCRIPT, "model": "random weights"}
        self.about: JsonMapping = {"family": "diffusers", **facts}
        self.resolutions: tuple[int, ...] = (512, 1024)

    def config(self, options: JsonMapping) -> RunConfig:
        return build_config(families.config_class(SCRIPT), {**self.values, **options}, notes=[])

    def make(self, config: Any, device: torch.device) -> TrainableModel:
        """Return a new model on the device, with adapters in its blocks."""
        model = self._empty()
        dtype = fp8_storage.storage_type(config)
        model = random_weights.fill_randomly(model, random_weights.place_weights(model, device, dtype, config), dtype)
        if any(p.ndim == 5 for p in model.parameters()):  # video, which has no channels-last format like images
            model.to = functools.partial(_to, model)
        method = DiffusersLora(model, self.block_classes, config.network.network_dim or 4, config.optim.learning_rate)
        return TrainableModel(ModelComponents(model, None, {}, {}, {}), DiffusersFamily(self.block_classes), method)

    def _empty(self) -> nn.Module:
        try:
            return build_on_meta(lambda: self.cls(**self.arguments))
        except Exception as error:  # foreign classes raise anything for wrong arguments
            why = f"{type(error).__name__}: {first_line(error)[:200]}"
            template = f"{self.title} cannot be made from this config ({why})"
            raise ConfigError(template) from error

    def predict(
        self, trainable: TrainableModel, resolution: int, device: torch.device
    ) -> Callable[[nn.Module], Tensor]:
        """Return a function that calls a model for images of this size."""
        arguments = self.inputs.of(trainable.components.denoiser, resolution, device)

        def call(model: nn.Module) -> Tensor:
            outputs = pytree.tree_leaves(model(**arguments))
            return torch.cat([x.float().flatten() for x in outputs if isinstance(x, Tensor) and x.is_floating_point()])

        return call

    def encoders(self) -> JsonMapping:
        return {}

    def vae(self, device: torch.device, dtype: torch.dtype) -> nn.Module | None:
        return None


def class_of(name: str) -> type[Any]:
    """Return a network class of diffusers. Raises ConfigError, with a suggestion, for any other name."""
    import diffusers

    model_class = getattr(diffusers, name, None) if name.isidentifier() else None
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        network_names = [other for other in dir(diffusers) if "Transformer" in other]
        raise ConfigError(
            "diffusers {version} has no network called {name}{hint}",
            version=diffusers.__version__,
            name=name,
            hint=did_you_mean(name, network_names),
        )
    return model_class


def repeated_classes(cls: type[Any], model: nn.Module) -> tuple[str, ...]:
    """Return the classes of its repeated blocks. Raises ConfigError if none has a Linear layer."""
    candidates = getattr(cls, "_repeated_blocks", None)
    if not candidates:
        rows = [row for row in model.children() if isinstance(row, nn.ModuleList)]
        class_names = [type(block).__name__ for row in rows for block in row]
        candidates = [name for name in class_names if re.search("block|layer", name, re.I)] or class_names
    with_linear = {type(m).__name__ for m in model.modules() if any(type(layer) is nn.Linear for layer in m.modules())}
    if not (repeated := tuple(name for name in dict.fromkeys(candidates) if name in with_linear)):
        raise ConfigError(
            "{network} has no repeated blocks with Linear layers, which LoRA could train", network=cls.__name__
        )
    return repeated


def class_arguments(name: str, entries: JsonMapping) -> JsonObject:
    """Return a config.json's entries that the class accepts. Raises ConfigError for others, which would be ignored."""
    accepted = inspect.signature(class_of(name).__init__).parameters
    own_entries = {key: value for key, value in entries.items() if not key.startswith("_")}
    if unknown := sorted(set(own_entries) - set(accepted)):
        raise ConfigError(
            "{name} takes no {unknown}: is this config that of another class?", name=name, unknown=", ".join(unknown)
        )
    return {key: tuple(value) if isinstance(value, list) else value for key, value in own_entries.items()}


def read_config(path: Path) -> JsonObject:
    """Return the content of a config.json. Raises ConfigError for another file."""
    try:
        json = load_json(path)
    except ConfigError as e:
        raise ConfigError("--config: {error}", error=e.said) from e
    if not isinstance(json, dict):
        raise ConfigError("--config {path} must hold a JSON object: the config.json of a diffusers model", path=path)
    return json


def _to(model: nn.Module, *args: Any, memory_format: Any = None, **kwargs: Any) -> nn.Module:
    return type(model).to(model, *args, **kwargs) if args or kwargs else model
