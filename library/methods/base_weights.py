"""Adapters that are merged into the model before it gets those that are trained (`base_weights`).

Captions are encoded before the denoiser is read, so text encoders are merged as soon as each of them is read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.families.base import DeferredNetwork, Family, ModelComponents
from library.methods import lora, lora_files

OPTION = "base_weights"


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
    for path, strength, tensors in _opened(config):

        def merge(layer: Any, parts: Mapping[str, Tensor], strength: float = strength) -> None:
            if id(layer) not in merged:
                lora.merge_product(layer, parts, strength)

        unmatched = lora.change_layers(lora.networks(components), family, tensors, merge)
        lora_files.report_unmatched(OPTION, path, unmatched, len(lora_files.by_name(tensors)))


def _read_merged(name: str, source: DeferredNetwork, family: Family, config: RunConfig) -> nn.Module:
    encoder = source.read()
    for _, strength, tensors in _opened(config):
        # Files for layers of other sizes are reported once the whole model is read.
        lora.change_layers({name: encoder}, family, tensors, partial(lora.merge_product, multiplier=strength))
    return encoder


def _opened(config: RunConfig) -> Iterator[tuple[Path, float, dict[str, Tensor]]]:
    for path, strength in files_with_strengths(config):
        yield path, strength, lora_files.plain_file(OPTION, path, config.family)
