"""The LoRA that keeps a distilled model distilled while it trains, and is off in images (`assistant_lora`).

It stays beside the layers, and adds to their outputs until it is switched off, so that weights and images are exact.
"""

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.families.base import Family, ModelComponents
from library.methods import lora
from library.methods.adapters import cast_like, saved_alpha
from library.methods.base import AssistantSwitch
from library.methods.lora_files import by_name, plain_file, report_unmatched

OPTION = "assistant_lora"
DOWN_BUFFER, UP_BUFFER = "assistant_down", "assistant_up"  # buffers of a layer: they move with it, and no file has them


# Why: docs/decisions/2026-11-28-assistants-stand-beside-layers.md
def attach_assistant(components: ModelComponents, family: Family, path: Path, strength: float) -> AssistantSwitch:
    """Add an assistant LoRA to the denoiser, and return its switch.

    Call it after adapters are attached, and before weights are stored. Raises ConfigError if the file is no plain LoRA,
    or for another model.
    """
    switch, tensors = AssistantSwitch(), plain_file(OPTION, path, family.config.family)

    def add(layer: nn.Linear | nn.Conv2d, parts: Mapping[str, Tensor]) -> None:
        _add_factors(layer, parts, strength)
        # A method of the layer itself serves layers of any class: those in 8 bits get another one later, and adapters
        # of other packages are methods as well.
        layer.__dict__["_without_assistant"] = layer.__dict__.get("forward")
        layer.__dict__["_assistant"] = switch
        layer.__dict__["forward"] = types.MethodType(_forward, layer)

    unmatched = lora.change_layers({"denoiser": components.denoiser}, family, tensors, add)
    report_unmatched(OPTION, path, unmatched, len(by_name(tensors)))
    return switch


def _add_factors(layer: nn.Linear | nn.Conv2d, tensors: Mapping[str, Tensor], strength: float) -> None:
    weight = layer.weight
    # The layer computes in the dtype of its weight, unless that is in 8 bits already.
    dtype = weight.dtype if weight.dtype.itemsize > 1 else torch.bfloat16
    down, up = tensors["lora_down.weight"].float(), tensors["lora_up.weight"].float()
    rank = len(down)
    up = up * (strength * saved_alpha(tensors, rank) / rank)
    if isinstance(layer, nn.Conv2d):
        down, up = down.reshape(rank, *weight.shape[1:]), up.reshape(len(up), rank, 1, 1)
    else:
        down, up = down.flatten(1), up.flatten(1)
    for name, factor in ((DOWN_BUFFER, down), (UP_BUFFER, up)):
        layer.register_buffer(name, factor.to(weight.device, dtype), persistent=False)


def _forward(layer: Any, input: Tensor, *more: Tensor) -> Tensor:
    own = layer.__dict__["_without_assistant"]
    output = own(input, *more) if own else type(layer).forward(layer, input, *more)
    if not layer.__dict__["_assistant"].is_on:
        return output
    down, up = (cast_like(factor, input) for factor in (layer.assistant_down, layer.assistant_up))
    if isinstance(layer, nn.Conv2d):
        return output + F.conv2d(layer._conv_forward(input, down, None), up).to(output.dtype)
    return output + F.linear(F.linear(input, down), up).to(output.dtype)
