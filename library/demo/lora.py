"""Does a LoRA file fit the model in diffusers? Names and sizes of every adapter, through diffusers' own converters."""

import importlib
from pathlib import Path

from library import families
from library.config.run_config import RunConfig
from library.families.shared.diffusers_layers import ADAPTER_ENDINGS


# Why: docs/decisions/2026-11-20-lora-checked-with-diffusers.md
def check_lora_layers(file: Path, config: RunConfig) -> tuple[int, list[str]]:
    """How many layers of diffusers' model the file's adapters fit, and what fits nowhere (key or size, a line each).

    `config` is the config that the file was trained with: it tells which model. Takes seconds, most of them imports.
    """
    from safetensors.torch import load_file

    tensors = load_file(file)
    try:
        converted, sizes = importlib.import_module(families.facts_of(config.family).demo).convert_for_diffusers(
            tensors, config
        )
    except (ValueError, AssertionError, KeyError) as error:
        return 0, [f"diffusers cannot convert the file: {error}"]
    wrong = []
    for name, tensor in converted.items():
        layer, which = _layer_and_dimension(name)
        if layer not in sizes:
            wrong.append(f"{name}: diffusers has no such layer")
        elif tensor.shape[which] != sizes[layer][which]:
            wrong.append(f"{name}: {tensor.shape[which]} features, the layer has {sizes[layer][which]}")
    return len({_layer_and_dimension(name)[0] for name in converted}) if not wrong else 0, wrong


def _layer_and_dimension(name: str) -> tuple[str, int]:
    """The layer's name, and the dimension in which an adapter must fit it: 1 (input) for A, 0 (output) for B."""
    for which, ending in ((1, ADAPTER_ENDINGS[0]), (0, ADAPTER_ENDINGS[1])):
        if name.endswith(ending):
            return name.removesuffix(ending), which
    return name, 0
