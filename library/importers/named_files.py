"""Files that a file of settings names, in its trainer's own format: data sets, prompts, settings of adapters."""

import contextlib
from pathlib import Path
from typing import Any

from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import load_json, load_toml
from library.config.problems import ConfigError
from library.importers import diffusion_pipe, diffusion_pipe_data, musubi, onetrainer, simpletuner, simpletuner_data


def with_named_files(found: JsonObject, path: Path) -> JsonObject:
    """Include the files of data sets and prompts that the file names, where they are in its trainer's own format."""
    if simpletuner.fits(found):
        return _of_simpletuner(found, path)
    if diffusion_pipe.fits(found):
        data = _beside(found, "dataset", path, ".toml")
        return {**found, "dataset": data} if data and diffusion_pipe_data.is_dataset(data) else found
    if onetrainer.fits(found):
        wanted = [("concept_file_name", "concepts"), ("sample_definition_file_name", "samples")]
        lists = {target: _beside(found, key, path, ".json") for key, target in wanted if not found.get(target)}
        return {**found, **{target: data for target, data in lists.items() if isinstance(data, list)}}
    if musubi.fits(found):
        data = _beside(found, "dataset_config", path, ".toml")
        return {**found, "dataset_config": data} if data and musubi.is_dataset(data) else found
    return found


def _of_simpletuner(found: JsonObject, path: Path) -> JsonObject:
    """Its lists of data sets and prompts, and its settings of LyCORIS."""
    read = dict(found)
    for key in ("data_backend_config", "user_prompt_library", "lycoris_config"):
        name = key if key in found else f"--{key}"
        data = _beside(found, name, path, ".json")
        is_list = key == "data_backend_config"
        if simpletuner_data.is_datasets(data) if is_list else isinstance(data, dict):
            read[name] = data
    return read


def _beside(found: JsonMapping, key: str, path: Path, suffix: str) -> Any:
    """The content of the file that a key names, relative to here, its folder, or the one above; None if missing."""
    name = str(found.get(key) or "")
    for place in (Path(name), path.parent / name, path.parent.parent / name) if name else ():
        if place.suffix.lower() == suffix and place.is_file():
            with contextlib.suppress(ConfigError):
                return load_json(place) if suffix == ".json" else load_toml(place)
    return None
