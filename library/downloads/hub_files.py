"""Single files of the Hugging Face Hub that options name as owner/name/file.safetensors: found here, or downloaded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import huggingface_hub

from library.config.hub_names import is_file_id
from library.config.problems import Message, Problem, Report
from library.config.run_config import RunConfig
from library.config.schema import option_values, options_of
from library.config.sections import AdapterRun
from library.config.values import split_strength
from library.downloads import hub
from library.families.shared.hub import ID
from library.files import need_space, size_text

UNREACHABLE = ": {name} is not on this computer. {why}"
ANNOUNCED = ": {name} is downloaded from Hugging Face before the training, {size}"


def default_folder() -> Path:
    return Path.home() / "kohya" / "models"


def find_hub_file(name: str) -> Path | None:
    """Return the file on this computer: in the folder of downloads, or in the cache of huggingface_hub. None if it is
    in neither."""
    match = ID.match(name)
    if not is_file_id(name) or not match:
        return None
    repository, path = match[0], name[match.end() + 1 :]
    downloaded = default_folder() / repository.rpartition("/")[2] / path.rpartition("/")[2]
    if downloaded.is_file():
        return downloaded
    cached = huggingface_hub.try_to_load_from_cache(repository, path)
    return Path(cached) if isinstance(cached, str) else None


def download_hub_file(name: str, report: Report) -> Path:
    """Download the file into the folder of downloads, where its hash and its header are checked. Raises ConfigError."""
    (file,) = hub.remote_files([name])
    path = hub.target_path(default_folder(), file)
    need_space(path, hub.still_needed(path, file))
    return hub.download_file(file, path, report)


def with_local_lora(config: RunConfig, option: str, find: Callable[[str], Path | None]) -> RunConfig:
    """Return the config with the paths of the LoRAs of the hub that an option names, as `find` returns them; None
    leaves a name.
    """

    def found(text: str) -> str:
        file, strength = split_strength(text)
        path = find(file) if is_file_id(file) else None
        return f"{path}:{strength:g}" if path else text

    if not (value := option_values(config)[option]):
        return config
    return with_value(config, option, found(value) if isinstance(value, str) else tuple(map(found, value)))


def with_local_base_weights(config: RunConfig, find: Callable[[str], Path | None]) -> RunConfig:
    """Return the config with the paths of the files of `base_weights` that are on the hub, as `find` returns them; None
    leaves a name.
    """
    if not isinstance(config, AdapterRun) or not any(map(is_file_id, config.network.base_weights)):
        return config
    paths = tuple(str(find(name) or name) if is_file_id(name) else name for name in config.network.base_weights)
    return replace(config, network=replace(config.network, base_weights=paths))


def with_value(config: RunConfig, option: str, value: str | tuple[str, ...] | None) -> RunConfig:
    section = options_of(type(config))[option].section
    return replace(config, **{section: replace(getattr(config, section), **{option: value})})


def find_or_download(report: Report) -> Callable[[str], Path]:
    return lambda name: find_hub_file(name) or download_hub_file(name, report)


def unreachable_file(option: str, name: str, why: Message | str) -> Problem:
    return Problem(option, UNREACHABLE, name=name, why=why)


def announce_download(option: str, name: str) -> Problem:
    """Return the remark that a file will be downloaded, with its size. Queries the hub; raises ConfigError if it is
    unreachable, or lacks the file.
    """
    (file,) = hub.remote_files([name])
    hub.target_path(default_folder(), file)
    return Problem(option, ANNOUNCED, name=name, size=size_text(file.size))
