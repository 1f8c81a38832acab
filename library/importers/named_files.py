"""Files that a file of settings names, in its trainer's own format: data sets, prompts, settings of adapters."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import load_json, load_toml
from library.config.problems import ConfigError
from library.config.schema import flatten_sections
from library.importers import diffusion_pipe, diffusion_pipe_data, musubi, onetrainer, simpletuner

MayRead = Callable[[Path], bool]
MAX_PARTS = 32  # of a relative path whose ends are looked for


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


def with_config_file(flags: JsonObject, path: Path, may_read: MayRead = everything) -> JsonObject:
    """Lay the flags of a command over the settings in the file that its --config_file names, as scripts do."""
    name = str(flags.get("config_file") or "")
    named = {"config_file": name if name.lower().endswith(".toml") else f"{name}.toml"}
    data = _read_named_file(named, "config_file", Origin(path, may_read), ".toml") if name else None
    if not isinstance(data, dict):
        return flags
    return {**flatten_sections(data), **{key: value for key, value in flags.items() if key != "config_file"}}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a file of settings is, and which others may be read."""

    path: Path
    may_read: MayRead


def _with_simpletuner_files(settings: JsonObject, origin: Origin) -> JsonObject:
    """Include its lists of data sets and prompts, and its settings of LyCORIS."""
    filled = dict(settings)
    for key in ("data_backend_config", "user_prompt_library", "lycoris_config"):
        name = next((name for name in settings if simpletuner.current_key(name) == key), key)
        data = _read_named_file(settings, name, origin, ".json")
        if isinstance(data, list if key == "data_backend_config" else dict):
            filled[name] = data
    return filled


def _read_named_file(settings: JsonMapping, key: str, origin: Origin, suffix: str) -> Any:
    """Return the content of the file that a key names; None if there is none."""
    name = str(settings.get(key) or "")
    if not name.lower().endswith(suffix):
        return None
    for file in _places(name, origin.path.parent):
        with contextlib.suppress(ConfigError, OSError):  # such as a name that is too long, or a closed folder
            if origin.may_read(file) and file.is_file():
                return load_json(file) if suffix == ".json" else load_toml(file)
    return None


def _places(name: str, folder: Path) -> Iterator[Path]:
    """Yield where a named file may be: relative to the working folder, to the file's folder, or to the one above it.

    Programs name it relative to the folder in which they are started, such as config/cat/data.json in config/cat: what
    a relative path ends with is looked for in the same folders. A whole path means this file and no other.
    """
    yield Path(name)
    is_whole = PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive
    parts = [] if is_whole else [part for part in re.split(r"[/\\]", name) if part]
    for start in range(len(parts) if len(parts) <= MAX_PARTS else 1):
        end = Path(*parts[start:])
        yield from (folder / end, folder.parent / end)
