"""The layers of a diffusers model that can have an adapter, and their sizes."""

from collections.abc import Iterable
from typing import Any

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.facts import Shapes
from library.families.shared import tensor_names, weights

ADAPTER_ENDINGS = (".lora_A.weight", ".lora_B.weight")
PEFT_ENDINGS = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight"}
LayerSizes = dict[str, tuple[int, int]]


def stored_shapes(config: RunConfig) -> Shapes:
    stored = weights.header(config.model.pretrained_model_name_or_path or "")
    return {plain: stored[name] for plain, name in tensor_names.without_prefix(stored).items()}


def layer_sizes(model: Any) -> LayerSizes:
    """Return the output and input features of all layers that can have an adapter."""
    shapes = {
        name: tuple(m.weight.shape[:2]) for name, m in model.named_modules() if getattr(m, "weight", None) is not None
    }
    return {name: shape for name, shape in shapes.items() if len(shape) == 2}


def with_dotted_paths(tensors: JsonObject, paths: Iterable[str]) -> JsonObject:
    """Return the adapters of a file with kohya's names under dotted paths, which some loaders require, as
    `kohya tools convert --to comfy` writes them; those of a file with such names as they are. `paths` are the model's.
    """
    dotted = {f"lora_unet_{path.replace('.', '_')}": f"diffusion_model.{path}" for path in paths}
    layers_and_endings = {name: name.partition(".")[::2] for name in tensors}
    if not any(layer in dotted for layer, _ in layers_and_endings.values()):
        return tensors
    return {
        f"{dotted[layer]}.{PEFT_ENDINGS[ending]}": tensors[name]
        for name, (layer, ending) in layers_and_endings.items()
        if ending in PEFT_ENDINGS
    }


def convert_with_mixin(tensors: Any, model: str, mixin: str, **sizes: Any) -> tuple[JsonObject, LayerSizes]:
    """Return a LoRA file's adapters by the names of a pipeline's `mixin`, and the layer sizes of diffusers' `model`."""
    import diffusers
    import torch

    package: Any = diffusers
    with torch.device("meta"):
        network = getattr(package, model)(**sizes)
    renamed = getattr(package.loaders, mixin).lora_state_dict(tensors)
    return {name.removeprefix("transformer."): tensor for name, tensor in renamed.items()}, layer_sizes(network)
