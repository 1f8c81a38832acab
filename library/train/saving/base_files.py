"""Adapter files from the Hugging Face Hub (owner/name/file.safetensors) that a training applies, `base_weights` and
`sample_lora`: local copies, or downloads before the training.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from library.config.hub_names import is_file_id
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.config.values import split_strength
from library.distributed.world import World
from library.downloads import hub_files
from library.train.journal import Journal

BASE_WEIGHTS_OPTION, SAMPLE_LORA_OPTION = "base_weights", "sample_lora"


def with_local_files(config: RunConfig) -> RunConfig:
    return _replaced(config, hub_files.find_hub_file)  # other files keep their names


def without_remote_files(config: RunConfig) -> RunConfig:
    """Return the config without files that are still to be downloaded, for checks that open all files."""
    remote = [option for option, _ in _hub_names(config)]
    if SAMPLE_LORA_OPTION in remote:
        config = replace(config, sample=replace(config.sample, sample_lora=None))
    if BASE_WEIGHTS_OPTION not in remote or not isinstance(config, AdapterRun):
        return config
    pairs = [
        pair for pair in zip(config.network.base_weights, _strengths(config), strict=True) if not is_file_id(pair[0])
    ]
    names, strengths = tuple(name for name, _ in pairs), tuple(strength for _, strength in pairs)
    return replace(config, network=replace(config.network, base_weights=names, base_weights_multiplier=strengths))


def remote_files(config: RunConfig) -> tuple[list[Problem], list[Problem]]:
    """Return problems of files that cannot be downloaded, and remarks on those that will be. Queries the hub for
    missing files.
    """
    problems, remarks = list[Problem](), list[Problem]()
    for option, name in _hub_names(config):
        if hub_files.find_hub_file(name) is None:
            try:
                remarks.append(hub_files.announced(option, name))
            except ConfigError as e:
                problems.append(hub_files.unreachable_file(option, name, e.said))
    return problems, remarks


def fetch(config: RunConfig, world: World, journal: Journal) -> RunConfig:
    """Download missing files, and return the config with the paths of all. Collective: the first process downloads.
    Raises ConfigError.
    """
    if not any(_hub_names(config)):
        return config
    local_file = hub_files.find_or_download(journal.phase)
    if world.main:
        _replaced(config, local_file)
    world.wait_for_everyone()
    return _replaced(config, local_file)


def _hub_names(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the files on the hub that the training applies, each with its option."""
    if isinstance(config, AdapterRun):
        yield from ((BASE_WEIGHTS_OPTION, name) for name in config.network.base_weights if is_file_id(name))
    file, _ = split_strength(config.sample.sample_lora or "")
    if config.sample.wanted and is_file_id(file):
        yield SAMPLE_LORA_OPTION, file


def _replaced(config: RunConfig, find: Callable[[str], Path | None]) -> RunConfig:
    if config.sample.wanted:
        config = hub_files.with_sample_lora(config, find)
    if not isinstance(config, AdapterRun) or not any(map(is_file_id, config.network.base_weights)):
        return config
    paths = tuple(str(find(name) or name) if is_file_id(name) else name for name in config.network.base_weights)
    return replace(config, network=replace(config.network, base_weights=paths))


def _strengths(config: AdapterRun) -> tuple[float, ...]:
    strengths = config.network.base_weights_multiplier
    return (*strengths, *[1.0] * len(config.network.base_weights))[: len(config.network.base_weights)]
