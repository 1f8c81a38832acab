"""Place each weight of a denoiser as its file is read: on the GPU, unless other work comes first."""

from collections.abc import Callable

import torch
from torch import nn

from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.families.base import Family, WeightPlacement
from library.memory import prepare, swapping
from library.memory.modulation import modulation_layers


def plan_placement(
    family: Family, config: RunConfig, device: torch.device
) -> Callable[[nn.Module], WeightPlacement] | None:
    """Return a function from a denoiser on the meta device to the placement of its weights; None if all stay on the
    host at first.

    They stay there on a CPU, for sharding, for merging adapters, and if another package creates the adapters.
    """
    if device.type == "cpu" or prepare.is_sharded(config):
        return None
    if isinstance(config, AdapterRun) and (
        config.network.base_weights or not config.network.module.startswith("networks.")
    ):
        return None
    precision, number, is_moved_later = config.precision, config.memory.blocks_to_swap or 0, False
    if config.adapters:
        # These are moved and rounded later, one at a time: products are timed first, and GGPO scales its noise
        # by the unrounded weights.
        arguments = config.network.network_args if isinstance(config, AdapterRun) else ()
        by_row = precision.fp8_compute or any(argument.startswith("ggpo") for argument in arguments)
        is_moved_later = precision.int8_base or precision.nf4_denoiser or precision.auto_compute
        is_moved_later = is_moved_later or precision.fp8_denoiser and by_row

    def place(denoiser: nn.Module) -> WeightPlacement:
        modulation = prepare.offloaded_modulation(family, config)
        waiting = set(swapping.choose_blocks(denoiser, family.swap_plan(number) if number else {}))
        host, eight_bits = set[str](), set[str]()
        for path, block in denoiser.named_modules():
            if type(block).__name__ not in family.block_classes:
                continue
            layers = {name: layer for name, layer in block.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
            matrices = {f"{path}.{name}.weight" for name in layers}
            offloaded = {id(layer) for layer in modulation_layers(block, modulation)}
            host |= {f"{path}.{name}.weight" for name, layer in layers.items() if id(layer) in offloaded}
            if block in waiting:
                host |= {f"{path}.{name}" for name, p in block.named_parameters() if p.dim() >= 2}
            if is_moved_later:
                host |= matrices
            elif config.adapters and precision.fp8_denoiser:
                eight_bits |= matrices
        return WeightPlacement(device, frozenset(host), frozenset(eight_bits))

    return place
