"""Configs as TOML: read and written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from library.config.json_types import JsonObject
from library.config.outside_files import load_toml
from library.config.problems import SURROGATES, ConfigError, Problem
from library.config.run_config import RunConfig
from library.config.schema import changed, flatten_sections


def read_toml(path: str | Path) -> JsonObject:
    """Return values by option name. As in sd-scripts, table names do not matter.

    Raises ConfigError like `load_toml`, and for an option in two tables.
    """
    duplicates: list[Problem] = []
    tables = flatten_sections(load_toml(path), duplicates)
    if duplicates:
        raise ConfigError(*(problem.replaced(place=f"in {Path(path).name}: ") for problem in duplicates))
    return tables


def to_toml(config: RunConfig, comment: str = "", secrets: bool = False) -> str:
    """Return non-default values as TOML, a table per section, optionally with a comment on top. Raises ConfigError for
    a path that TOML cannot hold.
    """
    blocks = ["\n".join(f"# {line}".rstrip() for line in comment.splitlines())] if comment else []
    for name, members in changed(config, secrets).items():
        for option, value in members.items():
            _refuse_bytes(option, value)
        blocks.append("\n".join([f"[{name}]", *(f"{k} = {toml_value(v)}" for k, v in members.items())]))
    return "\n\n".join(blocks) + "\n" if blocks else ""


def _refuse_bytes(option: str, value: Any) -> None:
    """Raise ConfigError for a path with bytes that are not UTF-8, which Python keeps as surrogates."""
    for text in value if isinstance(value, list | tuple) else [value]:
        if isinstance(text, str | Path) and SURROGATES.search(str(text)):
            template = ": the name {path} is not UTF-8, and no config can hold it; rename it"
            raise ConfigError(Problem(option, template, path=text))


def toml_value(value: Any) -> str:
    """Return one value as TOML. Windows paths become readable 'literal strings'. Rejects NaN."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ConfigError("{value} cannot be written: numbers must be finite", value=value)
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml_value(member)}" for key, member in value.items()) + "}"
    text = str(value)
    if "\\" in text and "'" not in text and text.isprintable():
        return f"'{text}'"
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return '"' + "".join(escapes.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in text) + '"'
