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
    return lambda denoiser: _place(denoiser, family, config, device)


def _place(denoiser: nn.Module, family: Family, config: RunConfig, device: torch.device) -> WeightPlacement:
    num_swapped = config.memory.blocks_to_swap or 0
    swapped = set(swapping.choose_blocks(denoiser, family.swap_plan(num_swapped) if num_swapped else {}))
    modulation = prepare.offloaded_modulation(family, config)
    waits_for_rounding = _rounds_later(config)
    is_rounded_now = config.adapters and config.precision.fp8_denoiser and not waits_for_rounding
    host, eight_bits = set[str](), set[str]()
    for path, block in denoiser.named_modules():
        if type(block).__name__ not in family.block_classes:
            continue
        layers = {
            f"{path}.{name}.weight": layer
            for name, layer in block.named_modules()
            if isinstance(layer, nn.Linear | nn.Conv2d)
        }
        offloaded = {id(layer) for layer in modulation_layers(block, modulation)}
        host |= {name for name, layer in layers.items() if id(layer) in offloaded}
        if block in swapped:
            host |= {f"{path}.{name}" for name, p in block.named_parameters() if p.dim() >= 2}
        if waits_for_rounding:
            host |= layers.keys()
        if is_rounded_now:
            eight_bits |= layers.keys()
    return WeightPlacement(device, frozenset(host), frozenset(eight_bits))


def _rounds_later(config: RunConfig) -> bool:
    """Return whether matrices are rounded and moved one at a time after loading: if products are timed first, and as
    GGPO scales its noise by the unrounded weights.
    """
    precision = config.precision
    if not config.adapters:
        return False
    if precision.int8_base or precision.nf4_denoiser or precision.auto_compute:
        return True
    arguments = config.network.network_args if isinstance(config, AdapterRun) else ()
    needs_rows = precision.fp8_compute or any(argument.startswith("ggpo") for argument in arguments)
    return precision.fp8_denoiser and needs_rows
