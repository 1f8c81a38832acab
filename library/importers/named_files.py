"""Files that a file of settings names, in its trainer's own format: data sets, prompts, settings of adapters."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import load_json, load_toml
from library.config.problems import ConfigError
from library.importers import diffusion_pipe, diffusion_pipe_data, musubi, onetrainer, simpletuner

MayRead = Callable[[Path], bool]


def everything(path: Path) -> bool:
    # Whoever runs the command may read these files anyway.
    return True


def with_named_files(settings: JsonObject, path: Path, may_read: MayRead = everything) -> JsonObject:
    """Include the files of data sets and prompts that the file names, if they are in its trainer's own format.

    `may_read` says which of them may be opened.
    """
    origin = Origin(path, may_read)
    if simpletuner.recognises(settings):
        return _with_simpletuner_files(settings, origin)
    if diffusion_pipe.recognises(settings):
        data = _read_named_file(settings, "dataset", origin, ".toml")
        return {**settings, "dataset": data} if data and diffusion_pipe_data.is_dataset(data) else settings
    if onetrainer.recognises(settings):
        file_keys = [("concept_file_name", "concepts"), ("sample_definition_file_name", "samples")]
        lists = {
            target: _read_named_file(settings, key, origin, ".json")
            for key, target in file_keys
            if not settings.get(target)
        }
        return {**settings, **{target: data for target, data in lists.items() if isinstance(data, list)}}
    if musubi.recognises(settings):
        data = _read_named_file(settings, "dataset_config", origin, ".toml")
        return {**settings, "dataset_config": data} if data and musubi.is_dataset(data) else settings
    return settings


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a file of settings is, and which others may be read."""

    path: Path
    may_read: MayRead


def _with_simpletuner_files(settings: JsonObject, origin: Origin) -> JsonObject:
    """Include its lists of data sets and prompts, and its settings of LyCORIS."""
    filled = dict(settings)
    for key in ("data_backend_config", "user_prompt_library", "lycoris_config"):
        name = key if key in settings else f"--{key}"
        data = _read_named_file(settings, name, origin, ".json")
        if isinstance(data, list if key == "data_backend_config" else dict):
            filled[name] = data
    return filled


def _read_named_file(settings: JsonMapping, key: str, origin: Origin, suffix: str) -> Any:
    """Return the content of the file that a key names, relative to the working folder, the file's folder, or the one
    above it; None if there is none."""
    name, folder = str(settings.get(key) or ""), origin.path.parent
    for file in (Path(name), folder / name, folder.parent / name) if name else ():
        if file.suffix.lower() == suffix and origin.may_read(file) and file.is_file():
            with contextlib.suppress(ConfigError):
                return load_json(file) if suffix == ".json" else load_toml(file)
    return None
