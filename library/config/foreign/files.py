"""A file of any trainer -> a config of ours: which trainer wrote it, and who reads it."""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from library.config.foreign import aitoolkit, flat, kohya_ss, musubi, onetrainer
from library.config.foreign.ledger import Configs, Imported, Ledger, settle
from library.config.schema import ConfigError, load_json, load_toml, once, read_text
from library.config.values import meant

READERS = (aitoolkit, onetrainer, musubi, kohya_ss)
SUFFIXES = (".json", ".toml", ".yaml", ".yml")


def load(path: str | Path, configs: Configs, script: str = "") -> Imported:
    """A file of settings of any trainer -> a config of ours and the account of its keys.

    `configs` is what can be trained, by script; `script` wins over what the file says. Raises ConfigError when it is no
    such file, or for a model that is not trained here.
    """
    path = Path(path)
    found = parse(path)
    if musubi.is_dataset(found):
        raise ConfigError(f"{path} describes images only; name it as dataset_config in a file of settings")
    return read(_with_data(found, path), configs, script or named(path, configs))


def _with_data(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """The file about the images that some trainers name is read along, where it is found and is in their own words."""
    if onetrainer.fits(found) and not found.get("concepts"):
        key, target, suffix = "concept_file_name", "concepts", ".json"
    elif musubi.fits(found):
        key, target, suffix = "dataset_config", "dataset_config", ".toml"
    else:
        return found
    name = str(found.get(key) or "")
    for place in (Path(name), path.parent / name, path.parent.parent / name) if name else ():
        if place.suffix.lower() == suffix and place.is_file():
            with contextlib.suppress(ConfigError):
                data = load_json(place) if suffix == ".json" else load_toml(place)
                is_known = musubi.is_dataset(data) if suffix == ".toml" else isinstance(data, list)
                return {**found, target: data} if is_known else found
    return found


def read(found: Mapping[str, Any], configs: Configs, script: str = "") -> Imported:
    """The same, from what stands in the file."""
    if script and script not in configs:
        raise ConfigError(f"{script} is not a kind of training{meant(script, configs)}; there are {', '.join(configs)}")
    return settle(_ledger(found, configs, script), configs)


def named(path: Path, configs: Configs) -> str:
    """The script that a TOML file names in its own name, or in its first line, where our files do; else ""."""
    if path.suffix.lower() != ".toml":
        return ""
    first = read_text(path).partition("\n")[0]
    said = re.findall(r"sd-scripts/(\w+)\.py", first) if first.startswith("#") else []
    in_name = [script for script in sorted(configs, key=len, reverse=True) if script in path.stem]
    return next((script for script in [*said, *in_name] if script in configs), "")


def _ledger(found: Mapping[str, Any], configs: Configs, script: str) -> Ledger:
    reader = next((reader for reader in READERS if reader.fits(found)), None)
    return reader.read(found, script) if reader else flat.read(found, configs, script)


def of_others(found: Mapping[str, Any]) -> bool:
    """Whether these are settings in the words of another trainer, and not a flat file as sd-scripts and we have it."""
    return any(reader.fits(found) for reader in READERS)


def parse(path: Path) -> dict[str, Any]:
    """The tables of a JSON, TOML or YAML file. Raises ConfigError when it is none."""
    suffix = path.suffix.lower()
    if suffix == ".toml":
        return load_toml(path)
    if suffix not in SUFFIXES:
        raise ConfigError(f"{path} must end in one of {', '.join(SUFFIXES)}")
    if not (text := read_text(path)).strip():
        raise ConfigError(f"{path} is empty")
    found = load_json(path) if suffix == ".json" else _yaml(text, path)
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{path} holds no settings: it must be one table of names and values")
    return found


def _yaml(text: str, path: Path) -> Any:
    import yaml  # only for files of ai-toolkit

    class Once(yaml.SafeLoader):
        """Refuses keys that come twice."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            once(((key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)), path)
            return node

    try:
        return Once(text).get_single_data()
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(e).split())}") from None
