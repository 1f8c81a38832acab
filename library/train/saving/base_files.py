"""`base_weights` from the Hugging Face Hub (owner/name/file.safetensors): local copies, or downloads before the
training.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from library.config.hub_names import is_file_id
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.distributed.world import World
from library.downloads import hub_files
from library.train.journal import Journal

BASE_WEIGHTS_OPTION = "base_weights"


def with_local_files(config: RunConfig) -> RunConfig:
    return _replaced(config, hub_files.find_hub_file)  # other files keep their names


def without_remote_files(config: RunConfig) -> RunConfig:
    """Return the config without files that are still to be downloaded, for checks that open all files."""
    if not isinstance(config, AdapterRun) or not any(map(is_file_id, config.network.base_weights)):
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
    for name in config.network.base_weights if isinstance(config, AdapterRun) else ():
        if is_file_id(name) and hub_files.find_hub_file(name) is None:
            try:
                remarks.append(hub_files.announced(BASE_WEIGHTS_OPTION, name))
            except ConfigError as e:
                problems.append(hub_files.unreachable_file(BASE_WEIGHTS_OPTION, name, e.said))
    return problems, remarks


def fetch(config: RunConfig, world: World, journal: Journal) -> RunConfig:
    """Download missing files, and return the config with the paths of all. Collective: the first process downloads.
    Raises ConfigError.
    """
    if not isinstance(config, AdapterRun) or not any(map(is_file_id, config.network.base_weights)):
        return config

    def local_file(name: str) -> Path:
        return hub_files.find_hub_file(name) or hub_files.download_hub_file(name, journal.phase)

    if world.main:
        _replaced(config, local_file)
    world.wait_for_everyone()
    return _replaced(config, local_file)


def _replaced(config: RunConfig, find: Callable[[str], Path | None]) -> RunConfig:
    if not isinstance(config, AdapterRun) or not any(map(is_file_id, config.network.base_weights)):
        return config
    paths = tuple(str(find(name) or name) if is_file_id(name) else name for name in config.network.base_weights)
    return replace(config, network=replace(config.network, base_weights=paths))


def _strengths(config: AdapterRun) -> tuple[float, ...]:
    strengths = config.network.base_weights_multiplier
    return (*strengths, *[1.0] * len(config.network.base_weights))[: len(config.network.base_weights)]
