"""TOML and JSON: files of settings as tables, and configs as TOML."""

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Text
from library.config.run_config import RunConfig
from library.config.schema import changed, flat
from library.config.text_files import read_text


def read_toml(path: str | Path) -> JsonObject:
    """Values by option name. Tables are for the reader's eye: as in sd-scripts, their names do not matter."""
    return flat(load_toml(path))


def load_toml(path: str | Path) -> JsonObject:
    """A TOML file as it is. Raises ConfigError when it is absent, not text, or not TOML."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as e:
        if Path(path).suffix.lower() in (".json", ".yaml", ".yml"):
            advice = "{path} is not a TOML file; convert it: kohya import {path} -o run.toml"
            raise ConfigError(advice, path=path) from None
        is_escape = "escape" in str(e) or "hex value" in str(e)  # what the \U of C:\Users is called
        hint = Text("; in double quotes write \\\\ for \\, or use single quotes") if is_escape else ""
        raise ConfigError("{path} is not valid TOML: {why}{hint}", path=path, why=e, hint=hint) from None


def load_json(path: str | Path) -> Any:
    """A JSON file as it is. Raises ConfigError when it is absent, not text, not JSON, or has a key twice."""
    try:
        return json.loads(read_text(path), object_pairs_hook=lambda pairs: once(pairs, path))
    except ConfigError:
        raise
    except (ValueError, RecursionError) as e:
        raise ConfigError("{path} is not valid JSON: {why}", path=path, why=e) from None


def once(pairs: Iterable[tuple[Any, Any]], path: str | Path) -> dict[Any, Any]:
    """A table in which each key was written once, as TOML has it. Raises ConfigError naming one that was not."""
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError("{path} has {key} twice in one table; delete one of them", path=path, key=key)
        found[key] = value
    return found


def to_toml(config: RunConfig, comment: str = "", secrets: bool = False) -> str:
    """TOML of what differs from the defaults, a table per section, with a comment on top if wanted."""
    blocks = ["\n".join(f"# {line}".rstrip() for line in comment.splitlines())] if comment else []
    for name, members in changed(config, secrets).items():
        blocks.append("\n".join([f"[{name}]", *(f"{k} = {toml_value(v)}" for k, v in members.items())]))
    return "\n\n".join(blocks) + "\n" if blocks else ""


def toml_value(value: Any) -> str:
    """One value as TOML. Paths of Windows become 'literal strings', so that they can be read. NaN is refused."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ConfigError("{value} cannot be written: only finite numbers have a meaning", value=value)
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    text = str(value)
    if "\\" in text and "'" not in text and text.isprintable():
        return f"'{text}'"
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return '"' + "".join(escapes.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in text) + '"'
