"""Adapters of any kind that are merged into the model before it gets those that are trained (`base_weights`).

Captions are encoded before the denoiser is read, so text encoders are merged as soon as each of them is read.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library.adapter_files.changes import LayerChange
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.families.base import DeferredNetwork, Family, ModelComponents
from library.families.stored_weights import restore_layer
from library.methods import lora, lora_files
from library.methods.applied import AppliedChange, adaptable_layers
from library.methods.lora import AdapterLocation
from library.methods.lora_files import Unmatched

OPTION = "base_weights"
Adapters = dict[str, dict[str, Tensor]]  # tensors by the adapter's name, then by their own


def files_with_strengths(config: RunConfig) -> list[tuple[Path, float]]:
    """Return the files of `base_weights`, each with its multiplier: 1 where none is given."""
    if not isinstance(config, AdapterRun):
        return []
    files, multipliers = map(Path, config.network.base_weights or ()), config.network.base_weights_multiplier or ()
    return list(zip(files, (*multipliers, *[1.0] * len(config.network.base_weights or ())), strict=False))


def merge_when_read(components: ModelComponents, family: Family, config: RunConfig) -> None:
    """Let deferred text encoders be merged with the files whenever one is read. Call it before they are stored in
    8 bits, so that sums are rounded once.
    """
    if not (pairs := files_with_strengths(config)):
        return
    for name, source in components.deferred.items():
        if name != "vae":
            components.deferred[name] = replace(
                source,
                read=partial(_read_merged, name, source, family, config),
                files=(*source.files, *(path for path, _ in pairs)),
                kind=f"{source.kind} merged {[strength for _, strength in pairs]}",
                merged=True,
            )


def merge_into_model(components: ModelComponents, family: Family, config: RunConfig) -> None:
    """Merge the files into all networks but those that were merged when they were read. Raises ConfigError for files
    that do not fit.
    """
    if not files_with_strengths(config):
        return
    merged_networks = [components.encoders.get(name) for name, source in components.read_again.items() if source.merged]
    merged = {id(layer) for network in merged_networks if network is not None for layer in network.modules()}
    for path, strength, adapters in _opened(config):
        unmatched = _merge(lora.networks(components), family, adapters, strength, merged)
        lora_files.report_unmatched(OPTION, path, unmatched, len(adapters))


def _read_merged(name: str, source: DeferredNetwork, family: Family, config: RunConfig) -> nn.Module:
    encoder = source.read()
    for _, strength, adapters in _opened(config):
        # Files for layers of other sizes are reported once the whole model is read.
        _merge({name: encoder}, family, adapters, strength)
    return encoder


def _opened(config: RunConfig) -> Iterator[tuple[Path, float, Adapters]]:
    for path, strength in files_with_strengths(config):
        yield path, strength, lora_files.adapters_of(OPTION, path, config.family)


@torch.no_grad()
def _merge(
    roots: Mapping[str, nn.Module], family: Family, adapters: Adapters, strength: float, merged: Set[int] = frozenset()
) -> Unmatched:
    """Add a file's changes to the layers of these networks that it is for, but for those in `merged` (their ids)."""
    used, misfits = set[str](), []
    for part, root in roots.items():
        for path, own_name, layer in adaptable_layers(root, part, family):
            name = own_name if own_name in adapters else AdapterLocation(part, path).alias
            if not (tensors := adapters.get(name)):
                continue
            used.add(name)
            change = AppliedChange(tensors)
            if not change.fits(layer):
                misfits.append(name)
            elif id(layer) in merged:
                continue
            elif change.is_plain and isinstance(layer, nn.Linear | nn.Conv2d):
                lora.merge_product(layer, tensors, strength)
            else:
                _add_change(layer, change.change, strength)
    return Unmatched(unexpected=[name for name in adapters if name not in used], misfits=misfits)


def _add_change(layer: Any, change: LayerChange, strength: float) -> None:
    """Add the change of a kind of LyCORIS, in float32; rounded once to the layer's dtype."""
    restore_layer(layer, torch.bfloat16)
    weight, change = layer.weight.float(), change.ready(layer.weight.device)
    if change.has_weight:
        layer.weight.copy_(weight + change.delta(weight, strength))
    if layer.bias is not None and (bias := change.bias(strength)) is not None:
        layer.bias.copy_(layer.bias.float() + bias)
