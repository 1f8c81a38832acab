"""`base_weights` that are files of the Hugging Face Hub, owner/name/file.safetensors: found on this computer, or
downloaded before the training."""

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

OPTION = "base_weights"


def with_local_files(config: RunConfig) -> RunConfig:
    """The config with the paths of files that are on this computer; the others are named as before."""
    return _replaced(config, hub_files.find)


def without_remote_files(config: RunConfig) -> RunConfig:
    """The config without files that still have to be downloaded, for checks that open all of them."""
    if not isinstance(config, AdapterRun) or not any(map(is_file_id, config.network.base_weights)):
        return config
    pairs = [
        pair for pair in zip(config.network.base_weights, _strengths(config), strict=True) if not is_file_id(pair[0])
    ]
    names, strengths = tuple(name for name, _ in pairs), tuple(strength for _, strength in pairs)
    return replace(config, network=replace(config.network, base_weights=names, base_weights_multiplier=strengths))


def remote_files(config: RunConfig) -> tuple[list[Problem], list[Problem]]:
    """Problems of files that cannot be downloaded, and remarks on those that will be. Asks the hub about files that
    are not on this computer."""
    problems, remarks = list[Problem](), list[Problem]()
    for name in config.network.base_weights if isinstance(config, AdapterRun) else ():
        if is_file_id(name) and hub_files.find(name) is None:
            try:
                remarks.append(hub_files.announced(OPTION, name))
            except ConfigError as e:
                problems.append(hub_files.unreachable(OPTION, name, e.said))
    return problems, remarks


def fetch(config: RunConfig, world: World, journal: Journal) -> RunConfig:
    """Download the files that are not on this computer, and return the config with the paths of all. A collective
    operation: the first process downloads. Raises ConfigError."""
    if not isinstance(config, AdapterRun) or not any(map(is_file_id, config.network.base_weights)):
        return config

    def found(name: str) -> Path:
        return hub_files.find(name) or hub_files.download(name, journal.phase)

    if world.main:
        _replaced(config, found)
    world.wait_for_everyone()
    return _replaced(config, found)


def _replaced(config: RunConfig, find: Callable[[str], Path | None]) -> RunConfig:
    if not isinstance(config, AdapterRun) or not any(map(is_file_id, config.network.base_weights)):
        return config
    paths = tuple(str(find(name) or name) if is_file_id(name) else name for name in config.network.base_weights)
    return replace(config, network=replace(config.network, base_weights=paths))


def _strengths(config: AdapterRun) -> tuple[float, ...]:
    given = config.network.base_weights_multiplier
    return (*given, *[1.0] * len(config.network.base_weights))[: len(config.network.base_weights)]
