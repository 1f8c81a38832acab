"""Any transformer of diffusers, by the name of its class and a config: Qwen-Image, Wan VACE, and those to come.

What such a model is called with is read from the parameters of its `forward`; their usual names say what belongs there.
"""

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library import families
from library.bench import networks
from library.bench.subjects import FACTOR, Made, usual
from library.config.schema import ConfigError, build
from library.config.values import meant
from library.families.base import Parts
from library.learners.adapters import LoraLinear, Spec

SCRIPT = "flux_train_network"  # whose options say how to train it
TEXT_WIDTHS = ("joint_attention_dim", "text_dim", "cross_attention_dim", "caption_channels", "text_embed_dim",
               "cap_feat_dim", "context_in_dim")  # fmt: skip
POOLED_WIDTHS = ("pooled_projection_dim", "pooled_dim")
PACKED = ("img_ids", "img_shapes", "image_rotary_emb")  # parameters of models that read images as a row of tokens


class Stranger:
    """What the trainer has to know of a model that is no family of ours."""

    name = "diffusers"
    block_inputs: Mapping[str, Any] = {}

    def __init__(self, regions: tuple[str, ...]) -> None:
        self.regions = regions

    def swapped(self, number: int) -> dict[str, int]:
        """`blocks_to_swap`: of the first kind."""
        return {self.regions[0]: number}


class Adapters:
    """LoRA on every Linear layer of the blocks."""

    def __init__(self, model: nn.Module, regions: tuple[str, ...], rank: int, rate: float) -> None:
        model.requires_grad_(False)
        self.rate, self.layers = rate, []
        for block in [m for m in model.modules() if type(m).__name__ in regions]:
            for path, layer in [(p, m) for p, m in block.named_modules() if type(m) is nn.Linear]:
                place, _, name = path.rpartition(".")
                self.layers.append(LoraLinear.around(layer, Spec(rank=rank, alpha=rank)))
                setattr(block.get_submodule(place), name, self.layers[-1])

    def parameters(self) -> list[nn.Parameter]:
        """All that learns."""
        return [p for layer in self.layers for p in (*layer.lora_down.parameters(), *layer.lora_up.parameters())]

    def groups(self, _: Any = None) -> list[dict[str, Any]]:
        """One group for the optimizer."""
        return [{"params": self.parameters(), "lr": self.rate, "name": "adapters"}]

    def train(self, mode: bool = True) -> "Adapters":
        """Adapters have no modes of their own."""
        return self


class Foreign:
    """A transformer of diffusers with random weights, trained as a LoRA."""

    def __init__(self, name: str, given: Mapping[str, Any], values: Mapping[str, Any], inputs: Mapping[str, Any]):
        """`given` are the arguments of the class; `inputs` shapes of parameters that have no usual name, and `frames`,
        the number of latent frames of a video model."""
        self.cls, self.given = class_of(name), arguments(name, given)
        self.inputs = dict(inputs)
        self.frames = int(self.inputs.pop("frames", 1))
        self.values = {**usual(SCRIPT), **values}
        self.batch, self.title = int(self.config({}).data.train_batch_size), name
        self.regions = tuple(getattr(self.cls, "_repeated_blocks", None) or self.cls._no_split_modules or ())
        self.about = {"family": "diffusers", "class": name, "config": dict(given), "size": None, "script": SCRIPT,
                      "model": "random weights"}  # fmt: skip
        self.resolutions = (512, 1024)

    def config(self, given: Mapping[str, Any]) -> Any:
        """The settings with these options on top."""
        return build(families.config_class(SCRIPT), {**self.values, **given}, notes=[])

    def make(self, config: Any, device: torch.device) -> Made:
        """A fresh model on the device, with adapters in its blocks."""
        from library.memory import precision

        try:
            model = networks.empty(lambda: self.cls(**self.given))
        except (TypeError, ValueError, AttributeError, RuntimeError, ZeroDivisionError) as error:
            raise ConfigError(f"{self.title} cannot be made from this config: {error}") from error
        dtype = precision.storage_type(config)
        model = networks.filled(model, networks.place(model, device, dtype, config), dtype)
        if any(p.ndim == 5 for p in model.parameters()):  # of video, for which there is no such order as images have
            model.to = functools.partial(_to, model)
        learner = Adapters(model, self.regions, config.network.network_dim or 4, config.optim.learning_rate)
        return Made(Parts(model, None, {}, {}, {}), Stranger(self.regions), learner)

    def predict(self, made: Made, resolution: int, device: torch.device) -> Callable[[nn.Module], Tensor]:
        """What calls a model for images of this size."""
        first = next(p for p in made.parts.denoiser.parameters() if p.is_floating_point() and p.itemsize > 1)
        given = {name: _cast(x, first.dtype) for name, x in self._inputs(made.parts.denoiser, resolution, device)}

        def call(model: nn.Module) -> Tensor:
            found = model(**given)
            return (found[0] if isinstance(found, tuple) else found).float()

        return call

    def encoders(self) -> Mapping[str, Any]:
        """None: only the transformer is built."""
        return {}

    def vae(self, device: torch.device, dtype: torch.dtype) -> nn.Module | None:
        """None: only the transformer is built."""
        return None

    def _inputs(self, model: nn.Module, resolution: int, device: torch.device) -> Iterator[tuple[str, Any]]:
        side = resolution // FACTOR
        for name, parameter in inspect.signature(self.cls.forward).parameters.items():
            if name in self.inputs:
                yield name, torch.randn(self.inputs[name], device=device)
            elif (value := self._usual_input(name, model.config, side, device)) is not None:
                yield name, value
            elif name != "self" and parameter.default is inspect.Parameter.empty and parameter.kind < 2:
                raise ConfigError(
                    f"{self.title} is called with {name}, whose shape is not known here: "
                    f"give it with --input {name}=1,16,64 (its sizes)"
                )

    def _usual_input(self, name: str, config: Any, side: int, device: torch.device) -> Any:
        number, text, channels = self.batch, self.inputs.get("text_length", 128), config.get("in_channels", 16)
        tokens = (side // 2) ** 2
        parameters = inspect.signature(self.cls.forward).parameters
        image: tuple[int, ...] = (number, channels, side, side)
        if len(_several(config.get("patch_size"))) == 3:
            image = (number, channels, self.frames, side, side)
        elif any(word in parameters for word in PACKED):
            image = (number, tokens, channels)
        shapes: dict[str, tuple[int, ...] | None] = {
            "hidden_states": image,
            "encoder_hidden_states": _wide((number, text), config, TEXT_WIDTHS),
            "pooled_projections": _wide((number,), config, POOLED_WIDTHS),
            "timestep": (number,),
            "guidance": (number,) if config.get("guidance_embeds") else None,
            "img_ids": (tokens, 3),
            "txt_ids": (text, 3),
            "encoder_hidden_states_image": (number, 257, config["image_dim"]) if config.get("image_dim") else None,
            "control_hidden_states": (number, config.get("vace_in_channels", channels), *image[2:]),
        }
        if name == "img_shapes":
            return [[(1, side // 2, side // 2)]] * number
        if name == "return_dict":
            return False
        shape = shapes.get(name)
        if shape is None:
            return None
        return (
            torch.rand(shape, device=device) if name in ("timestep", "guidance") else torch.randn(shape, device=device)
        )


def class_of(name: str) -> type[Any]:
    """A class of diffusers that is a network. Raises ConfigError, with a suggestion, for any other name."""
    import diffusers

    found = getattr(diffusers, name, None) if name.isidentifier() else None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        known = [known for known in dir(diffusers) if "Transformer" in known]
        raise ConfigError(f"diffusers {diffusers.__version__} has no network called {name}{meant(name, known)}")
    return found


def arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a config.json that the class takes. Raises ConfigError for others, which would be ignored."""
    known = inspect.signature(class_of(name).__init__).parameters
    own = {key: value for key, value in given.items() if not key.startswith("_")}
    if unknown := sorted(set(own) - set(known)):
        raise ConfigError(f"{name} takes no {', '.join(unknown)}: is this config that of another class?")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in own.items()}


def read_config(path: Path) -> dict[str, Any]:
    """A config.json. Raises ConfigError when it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path} must hold a JSON object: the config.json of a diffusers model")
    return found


def _to(model: nn.Module, *args: Any, memory_format: Any = None, **kwargs: Any) -> nn.Module:
    return type(model).to(model, *args, **kwargs) if args or kwargs else model


def _wide(front: tuple[int, ...], config: Any, names: tuple[str, ...]) -> tuple[int, ...] | None:
    width = next((config[name] for name in names if config.get(name)), None)
    return (*front, width) if width else None


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.ndim > 2 else value
