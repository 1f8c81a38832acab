"""Check that a LoRA file fits the model in diffusers: names and sizes of every adapter, through diffusers' own
converters.
"""

from pathlib import Path

from library import families
from library.config.run_config import RunConfig
from library.families.shared.diffusers_layers import ADAPTER_ENDINGS


# diffusers' own converters decide, as they are what users will load the file with.
# Why: docs/decisions/2026-11-20-lora-checked-with-diffusers.md
def check_lora_layers(file: Path, config: RunConfig) -> tuple[int, list[str]]:
    """Return how many layers of diffusers' model the file's adapters fit, and what fits nowhere (key or size, a line
    each).

    `config` is the file's training config, which determines the model. Takes seconds, mostly for imports.
    """
    from safetensors.torch import load_file

    tensors = load_file(file)
    try:
        converted, sizes = families.random_module(config.family).convert_for_diffusers(tensors, config)
    except (ValueError, AssertionError, KeyError) as error:
        return 0, [f"diffusers cannot convert the file: {error}"]
    wrong = []
    for name, tensor in converted.items():
        layer, dimension = _layer_and_dimension(name)
        if layer not in sizes:
            wrong.append(f"{name}: diffusers has no such layer")
        elif tensor.shape[dimension] != sizes[layer][dimension]:
            wrong.append(f"{name}: {tensor.shape[dimension]} features, the layer has {sizes[layer][dimension]}")
    return len({_layer_and_dimension(name)[0] for name in converted}) if not wrong else 0, wrong


def _layer_and_dimension(name: str) -> tuple[str, int]:
    """Return the layer's name, and the dimension that an adapter must match: 1 (input) for A, 0 (output) for B."""
    for dimension, ending in ((1, ADAPTER_ENDINGS[0]), (0, ADAPTER_ENDINGS[1])):
        if name.endswith(ending):
            return name.removesuffix(ending), dimension
    return name, 0
