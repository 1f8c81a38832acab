"""A file of any trainer -> a config: detect which trainer wrote it, and call its importer."""

import contextlib
import re
from pathlib import Path
from typing import Any

from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import load_json, load_toml, load_yaml, read_text
from library.config.problems import ConfigError, Text
from library.config.run_config import RunConfig
from library.config.schema import options, values
from library.config.values import did_you_mean
from library.importers import aitoolkit, aitoolkit_data, flat, kohya_ss, musubi, onetrainer
from library.importers.builder import Configs, Imported, settle
from library.importers.shared import tables

READERS = (aitoolkit, onetrainer, musubi, kohya_ss)
SUFFIXES = (".json", ".toml", ".yaml", ".yml")


def load(path: str | Path, configs: Configs, script: str = "") -> Imported:
    """A file of settings of any supported trainer -> a config and the outcomes of its keys.

    `configs`: config class by script; `script` overrides the one of the file. Raises ConfigError for any other file,
    and for an unsupported model.
    """
    path = Path(path)
    found = parse(path)
    refuse_data(found, path)
    return read(_with_data(found, path), configs, script or named(path, configs))


def refuse_data(found: JsonMapping, path: Path) -> None:
    """Raise ConfigError for a file that contains only data sets and no training."""
    sets = tables(found.get("datasets"))
    if not sets or found.keys() - {"general", "datasets"}:
        return
    if musubi.is_dataset(found) or any("folder_path" in table for table in sets):
        template = "kohya import {name} -o data.toml writes it as one of ours; name that in dataset_config"
        advice = Text(template, name=path.name)
        trainer = musubi.TRAINER if musubi.is_dataset(found) else aitoolkit.TRAINER
        raise ConfigError(
            "{path} is a data set file of {trainer}, not a training: {advice}",
            path=path,
            trainer=trainer,
            advice=advice,
        )
    raise ConfigError("{path} is a data set file, not a training: name it in dataset_config", path=path)


def is_dataset(found: JsonMapping) -> bool:
    """Whether these are data sets of another trainer, which `dataset` converts."""
    return musubi.is_dataset(found) or aitoolkit_data.is_dataset(found)


def dataset(found: JsonMapping) -> tuple[str, list[str]]:
    """Data sets of another trainer -> the text of a dataset file, and a sentence for each key that was left out."""
    return musubi.dataset(found) if musubi.is_dataset(found) else aitoolkit_data.dataset(found)


def _with_data(found: JsonObject, path: Path) -> JsonObject:
    """Include the files of data sets and prompts that the file names, where they are in its trainer's own format."""
    if onetrainer.fits(found):
        wanted = [("concept_file_name", "concepts"), ("sample_definition_file_name", "samples")]
        lists = {target: _beside(found, key, path, ".json") for key, target in wanted if not found.get(target)}
        return {**found, **{target: data for target, data in lists.items() if isinstance(data, list)}}
    if musubi.fits(found):
        data = _beside(found, "dataset_config", path, ".toml")
        return {**found, "dataset_config": data} if data and musubi.is_dataset(data) else found
    return found


def _beside(found: JsonMapping, key: str, path: Path, suffix: str) -> Any:
    """The content of the file that a key names, relative to here, its folder, or the one above; None if missing."""
    name = str(found.get(key) or "")
    for place in (Path(name), path.parent / name, path.parent.parent / name) if name else ():
        if place.suffix.lower() == suffix and place.is_file():
            with contextlib.suppress(ConfigError):
                return load_json(place) if suffix == ".json" else load_toml(place)
    return None


def read(found: JsonMapping, configs: Configs, script: str = "") -> Imported:
    """`load` from the content of a file."""
    if script and script not in configs:
        raise ConfigError("{script} is not a kind of training{hint}; there are {configs}", script=script,
            hint=did_you_mean(script, configs), configs=', '.join(configs))  # fmt: skip
    reader = next((reader for reader in READERS if reader.fits(found)), None)
    return settle(reader.read(found, script) if reader else flat.read(found, configs, script), configs)


def named(path: Path, configs: Configs) -> str:
    """The script that a TOML file states in its file name or its first line, as our files do; else ""."""
    if path.suffix.lower() != ".toml":
        return ""
    first = read_text(path).partition("\n")[0]
    said = re.findall(r"sd-scripts/(\w+)\.py", first) if first.startswith("#") else []
    in_name = [script for script in sorted(configs, key=len, reverse=True) if script in path.stem]
    return next((script for script in [*said, *in_name] if script in configs), "")


def of_others(found: JsonMapping) -> bool:
    """Whether these are settings with the keys of another trainer, and not a flat file of sd-scripts."""
    return any(reader.fits(found) for reader in READERS)


def parse(path: Path) -> JsonObject:
    """The content of a JSON, TOML or YAML file as tables. Raises ConfigError when it cannot be parsed."""
    suffix = path.suffix.lower()
    if suffix == ".toml":
        return load_toml(path)
    if suffix not in SUFFIXES:
        raise ConfigError("{path} must end in one of {suffixes}", path=path, suffixes=", ".join(SUFFIXES))
    if not read_text(path).strip():
        raise ConfigError("{path} is empty", path=path)
    found = load_json(path) if suffix == ".json" else load_yaml(path)
    if isinstance(found, list):
        _refuse_list(found, path)
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError("{path} holds no settings: it must be one table of names and values", path=path)
    return found


def _refuse_list(found: list[Any], path: Path) -> None:
    """Raise ConfigError for a list, which is only a part of a config of OneTrainer or ai-toolkit."""
    first = next(iter(tables(found)), {})
    if "folder_path" in first:
        raise ConfigError(
            "{path} is a data set file of ai-toolkit, not a training: put it under a key datasets", path=path
        )
    if "path" in first and {"image", "text"} & first.keys():
        advice = "import the config that names it as concept_file_name, which writes it as a dataset_config"
        raise ConfigError(
            "{path} is a data set file of OneTrainer (concepts), not a training: {advice}", path=path, advice=advice
        )
    if "prompt" in first:
        advice = "import the config that names it as sample_definition_file_name"
        raise ConfigError("{path} is a file of sample prompts, not a training: {advice}", path=path, advice=advice)


def differences(first: Any, second: Any) -> list[tuple[str, str, str]]:
    """The options that differ, as (name, first value, second value); "-" where a config has no such option."""
    one, two = _texts(first), _texts(second)
    return [(name, a, b) for name in {**one, **two} if (a := one.get(name, "-")) != (b := two.get(name, "-"))]


def _texts(config: RunConfig) -> dict[str, str]:
    known = options(type(config))
    return {
        name: "(set)" if value and known[name].kind == "secret" else known[name].text(value) or "not set"
        for name, value in values(config).items()
    }
