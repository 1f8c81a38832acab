"""Adapter files from the Hugging Face Hub (owner/name/file.safetensors) that a training applies, `base_weights`,
`assistant_lora` and `sample_lora`: local copies, or downloads before the training.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from library.config.hub_names import is_file_id
from library.config.problems import ConfigError, Problem, Report
from library.config.run_config import RunConfig
from library.config.schema import option_values
from library.config.sections import AdapterRun
from library.config.values import split_strength
from library.distributed.world import World
from library.downloads import hub_files

BASE_WEIGHTS_OPTION = "base_weights"


def with_local_files(config: RunConfig) -> RunConfig:
    return _replaced(config, hub_files.find_hub_file)  # other files keep their names


def without_remote_files(config: RunConfig) -> RunConfig:
    """Return the config without files that are still to be downloaded, for checks that open all files."""
    remote = [option for option, _ in _hub_names(config)]
    for option in _lora_options(config):
        if option in remote:
            value = option_values(config)[option]
            here = tuple(text for text in value or () if not is_file_id(split_strength(text)[0]))
            config = hub_files.with_value(config, option, None if isinstance(value, str) else here)
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
                remarks.append(hub_files.announce_download(option, name))
            except ConfigError as e:
                problems.append(hub_files.unreachable_file(option, name, e.said))
    return problems, remarks


def fetch(config: RunConfig, world: World, report: Report) -> RunConfig:
    """Download missing files, and return the config with the paths of all. Collective: the first process downloads.
    Raises ConfigError.
    """
    if not any(_hub_names(config)):
        return config
    if world.main:
        with_all_files(config, report)
    world.wait_for_everyone()
    return with_all_files(config, report)


def with_all_files(config: RunConfig, report: Report) -> RunConfig:
    """Return the config with the paths of all files; those that are missing are downloaded. Raises ConfigError."""
    return _replaced(config, hub_files.find_or_download(report))


def _hub_names(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the files on the hub that the training applies, each with its option."""
    if isinstance(config, AdapterRun):
        yield from ((BASE_WEIGHTS_OPTION, name) for name in config.network.base_weights if is_file_id(name))
    for option in _lora_options(config):
        value = option_values(config)[option] or ()
        files = [split_strength(text)[0] for text in ((value,) if isinstance(value, str) else value)]
        yield from ((option, file) for file in files if is_file_id(file))


def _lora_options(config: RunConfig) -> Iterator[str]:
    """Yield the options of LoRAs with strengths that this training applies."""
    if isinstance(config, AdapterRun):
        yield "assistant_lora"
    if config.sample.wanted:
        yield "sample_lora"


def _replaced(config: RunConfig, find: Callable[[str], Path | None]) -> RunConfig:
    for option in _lora_options(config):
        config = hub_files.with_local_lora(config, option, find)
    return hub_files.with_local_base_weights(config, find)


def _strengths(config: AdapterRun) -> tuple[float, ...]:
    strengths = config.network.base_weights_multiplier
    return (*strengths, *[1.0] * len(config.network.base_weights))[: len(config.network.base_weights)]
