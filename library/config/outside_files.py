"""The only readers of files from outside: configs, data sets, prompts, captions, image lists, weight headers.

Anybody may have written them, so each is treated as hostile: only regular files are opened, never a pipe or a device,
and limits on size, depth and the length of names and numbers keep any parser within seconds. Files beyond them raise a
ConfigError that names the file.
"""

import contextlib
import errno
import json
import os
import re
import stat
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from library.config.json_types import JsonObject
from library.config.outside_text import (
    NO_TEXT,
    SettingsText,
    decode_text,
    refuse_half_characters,
    settings_text,
    with_line_feeds,
)
from library.config.problems import ConfigError, Message, Problem

# Maximum bytes by kind of file; real files have a hundredth of it.
MAX_SETTINGS_BYTES = 1_000_000  # of a config, a data set, prompts
CAPTION = 100_000  # of the caption of one image
LIST = 512_000_000  # of an image list, with 300 bytes per image
TOKENIZER = 64_000_000  # of a tokenizer file; the largest vocabularies have 35 MB
YAML = 100_000  # smaller, as the YAML parser is slow
MAX_TABLE_DEPTH = 50  # maximum nesting of tables
LONGEST_NAME = 5000  # maximum characters of a key; image lists have paths as keys
LONGEST_NUMBER = 40  # maximum digits
YAML_TIMEOUT = 10.0  # time limit in seconds for parsing YAML

# TOML's strings and comments, whose content is no syntax.
_QUOTED = re.compile(
    r'"""(?:[^\\]|\\.)*?(?:"""|\Z)|'  # an unclosed string extends to the end, so nothing is scanned twice
    r"\'\'\'.*?(?:\'\'\'|\Z)|"
    r'"(?:[^"\\\n]|\\.)*"?|'
    r"'[^'\n]*'?|"
    r"#[^\n]*",
    re.S,
)
_NUMBER = 1 << 128  # larger integers are refused before they are written as decimal digits, which takes quadratic time
_AS_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


# ---- files as bytes and as text


def check_regular(path: str | Path) -> os.stat_result:
    """Return the stat of a regular file. Raises ConfigError for a missing one, a folder, a pipe or a device."""
    try:
        regular = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError("{path} does not exist", path=path) from None
    except (OSError, ValueError) as e:
        raise ConfigError("{path} cannot be read: {why}", path=path, why=getattr(e, "strerror", "") or e) from None
    if stat.S_ISDIR(regular.st_mode):
        raise ConfigError("{path} is a folder; name a file", path=path)
    if not stat.S_ISREG(regular.st_mode):
        raise ConfigError("{path} is a pipe or a device; name an ordinary file", path=path)
    return regular


@contextlib.contextmanager
def open_outside(path: str | Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading. Raises ConfigError like `check_regular`, or if it is unreadable."""
    check_regular(path)
    try:
        with open_regular(path) as file:
            yield file
    except OSError as e:
        raise ConfigError("{path} cannot be read: {why}", path=path, why=e.strerror or e) from None


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError for any other, as a pipe would wait for its writer and a device
    may never end.
    """
    _expect_regular(os.stat(path), path)  # first, as opening a device may already change something
    file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115 - the caller closes it
    try:
        _expect_regular(os.fstat(file.fileno()), path)  # it may have been replaced in between
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: str | Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raises OSError for any other, and above `max_bytes`."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def _expect_regular(status: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))


def _open_without_waiting(path: str, flags: int) -> int:
    # Opening a pipe would wait for its writer; Windows has neither such pipes nor the flag.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_bytes(path: str | Path, max_bytes: int = MAX_SETTINGS_BYTES) -> bytes:
    """Return the content of a regular file. Raises ConfigError for any other, and above `max_bytes`."""
    with open_outside(path) as file:
        size = os.fstat(file.fileno()).st_size
        # One byte more than allowed shows that the file is larger, whatever its stat says.
        data = file.read(max_bytes + 1) or b"" if size <= max_bytes else b""
    if max(size, len(data)) > max_bytes:
        raise _too_large(path, max(size, len(data)), max_bytes)
    return data


def check_file_size(path: str | Path, max_bytes: int) -> None:
    # For files that a package opens by itself; all others go through `read_bytes`.
    if (size := check_regular(path).st_size) > max_bytes:
        raise _too_large(path, size, max_bytes)


def _too_large(path: str | Path, size: int, max_bytes: int) -> ConfigError:
    template = "{path} has {size} bytes, and at most {most} are read: is this the right file?"
    return ConfigError(template, path=path, size=f"{size:,}", most=f"{max_bytes:,}")


def read_outside_text(path: str | Path, max_bytes: int = MAX_SETTINGS_BYTES) -> str:
    """Return the text of a file, with line ends as line feeds. Raises ConfigError like `read_bytes`, or if it is no
    text.
    """
    try:
        return with_line_feeds(decode_text(read_bytes(path, max_bytes)))
    except UnicodeError:
        raise ConfigError(NO_TEXT, path=path) from None


def read_settings_text(path: str | Path, max_bytes: int = MAX_SETTINGS_BYTES) -> SettingsText:
    """Read a text like `read_outside_text`, but also in a Windows code page.

    Only its ASCII characters are certain, unless a batch file names the code page.
    """
    return settings_text(read_bytes(path, max_bytes), path)


# ---- files as tables


def load_toml(path: str | Path) -> JsonObject:
    return _load(path, parse_toml, MAX_SETTINGS_BYTES)


def load_json(path: str | Path, max_bytes: int = MAX_SETTINGS_BYTES) -> Any:
    return _load(path, parse_json, max_bytes)


def _load(path: str | Path, parse: Callable[[str, str | Path], Any], max_bytes: int) -> Any:
    settings = read_settings_text(path, max_bytes)
    try:
        values = parse(settings.text, path)
    except ConfigError:
        if settings.is_certain:
            raise
        raise ConfigError(NO_TEXT, path=path) from None  # in Shift-JIS, half of a letter may be a backslash
    settings.refuse_unclear(values, path)
    return values


def table_of(path: str | Path, max_bytes: int = MAX_SETTINGS_BYTES) -> JsonObject:
    """Return the table of an auxiliary JSON file, such as the settings in a model's folder; empty if it is missing,
    beyond a limit, or no table.
    """
    try:
        table = load_json(path, max_bytes)
    except ConfigError:
        return {}
    return table if isinstance(table, dict) else {}


def load_yaml(path: str | Path) -> Any:
    return _load(path, parse_yaml, YAML)


def parse_toml(text: str, path: str | Path) -> JsonObject:
    """Parse TOML text; `path` names it in messages. Raises ConfigError."""
    _refuse_long_keys(text, path)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        if Path(path).suffix.lower() in (".json", ".yaml", ".yml"):
            advice = "{path} is not a TOML file; convert it: kohya import {path} -o run.toml"
            raise ConfigError(advice, path=path) from None
        is_escape = "escape" in str(e) or "hex value" in str(e)  # the error for the \U of C:\Users
        hint = Message("; in double quotes write \\\\ for \\, or use single quotes") if is_escape else ""
        raise ConfigError("{path} is not valid TOML: {why}{hint}", path=path, why=e, hint=hint) from None
    except RecursionError:
        raise _too_deep(path) from None
    except ValueError as e:  # a number that Python rejects, or an invalid date
        raise _refused_number(path, e) or ConfigError(
            "{path} is not valid TOML: {why}{hint}", path=path, why=e, hint=""
        ) from None
    return check_values(table, path)


def parse_json(text: str | bytes, path: str | Path | Message) -> Any:
    """Parse JSON text; `path` names it in messages. Raises ConfigError."""
    try:
        values = json.loads(text, object_pairs_hook=lambda pairs: once(pairs, path))
    except ConfigError:
        raise
    except RecursionError:
        raise _too_deep(path) from None
    except ValueError as e:
        raise _refused_number(path, e) or ConfigError("{path} is not valid JSON: {why}", path=path, why=e) from None
    return check_values(values, path)


def parse_yaml(text: str, path: str | Path) -> Any:
    """Parse YAML text; `path` names it in messages. Raises ConfigError."""
    try:
        values = _LimitedLoader(text, path).get_single_data()
    except ConfigError:
        raise
    except RecursionError:
        raise _too_deep(path) from None
    except (yaml.YAMLError, ValueError, OverflowError) as e:
        raise ConfigError("{path} is not valid YAML: {error}", path=path, error=" ".join(str(e).split())) from None
    return check_values(_as_json(values), path)


def _as_json(value: Any) -> Any:
    """Reject YAML's additions to JSON: keys that are no text, sets, bytes; dates are as in TOML."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [_as_json(inner) for inner in value]
    return str(value) if isinstance(value, bytes) else value


class _LimitedLoader(yaml.SafeLoader):
    """A loader that rejects duplicate keys, aliases, and content deeper or slower than any settings file."""

    def __init__(self, text: str, path: str | Path) -> None:
        super().__init__(text)
        self.path, self.level, self.until = path, 0, time.monotonic() + YAML_TIMEOUT

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            template = "{path} has the alias *{name}; write out what it stands for"
            raise ConfigError(template, path=self.path, name=self.peek_event().anchor)
        if self.level > MAX_TABLE_DEPTH:
            raise _too_deep(self.path)
        if time.monotonic() > self.until:
            raise ConfigError("{path} takes too long to read: it is not a settings file", path=self.path)
        self.level += 1
        node = super().compose_node(parent, index)
        self.level -= 1
        if isinstance(node, yaml.ScalarNode) and node.tag in _AS_NUMBERS and len(node.value) > LONGEST_NUMBER:
            raise _too_long(self.path, len(node.value))  # before it is computed
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (
            LookupError,
            AttributeError,
            ValueError,
            OverflowError,
        ):  # as of "!!bool x": the package does not check a tag against its text
            if not isinstance(node, yaml.ScalarNode):
                raise
            where = f"line {node.start_mark.line + 1}: {node.value[:LONGEST_NUMBER]!r}"
            error = f"{where} is not valid as {node.tag.rpartition(':')[2][:LONGEST_NUMBER]}"
            raise ConfigError("{path} is not valid YAML: {error}", path=self.path, error=error) from None

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        once(((key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)), self.path)
        return node


def once(pairs: Iterable[tuple[Any, Any]], path: str | Path | Message) -> dict[Any, Any]:
    """Return a table, rejecting duplicate keys like TOML. Raises ConfigError naming one."""
    items = [*pairs]
    table = dict(items)
    if len(table) == len(items):
        return table
    table.clear()
    for key, value in items:
        if key in table:
            raise ConfigError("{path} has {key} twice in one table; delete one of them", path=path, key=key)
        table[key] = value
    return table


@contextlib.contextmanager
def name_option(option: str) -> Iterator[None]:
    """Convert errors of a file to problems of the option that names it."""
    try:
        yield
    except ConfigError as e:
        raise ConfigError(*(Problem(option, ": {why}", why=problem) for problem in e.problems)) from e


# ---- limits


def check_values(values: Any, path: str | Path | Message) -> Any:
    """Return the values. Raises ConfigError if they are nested too deeply, a key or number is too long, or a text has a
    lone surrogate.
    """
    # Level by level instead of recursively, as a hostile file could exhaust Python's stack.
    level, depth = [values], 0
    while level:
        if (depth := depth + 1) > MAX_TABLE_DEPTH:
            raise _too_deep(path)
        inner: list[Any] = []
        for value in level:
            if isinstance(value, int):  # first, as the header of a model has thousands
                if not -_NUMBER < value < _NUMBER:
                    raise _too_long(path, int(value.bit_length() * 0.30103) + 1)
            elif isinstance(value, str):
                if not value.isascii():
                    _refuse_lone_surrogate(value, path, in_path=False)
            elif isinstance(value, dict):
                inner += value.values()
                for key in filter(_may_be_refused, value):
                    _refuse_key(key, path)
            elif isinstance(value, list):
                inner += value
        level = inner
    return values


def _may_be_refused(key: Any) -> bool:
    return isinstance(key, str) and (len(key) > LONGEST_NAME or not key.isascii())


def _refuse_key(key: str, path: str | Path | Message) -> None:
    if len(key) > LONGEST_NAME:
        raise ConfigError("{path} has a name of more than {most} characters", path=path, most=LONGEST_NAME)
    _refuse_lone_surrogate(key, path, in_path=True)


def _refuse_lone_surrogate(text: str, path: str | Path | Message, in_path: bool) -> None:
    try:
        refuse_half_characters(text, in_path)
    except ConfigError as e:
        template = "{path} holds half of a character ({half}) after {text}; delete it or write it whole"
        raise ConfigError(template, path=path, **e.problems[0].arguments) from None


def _refuse_long_keys(text: str, path: str | Path) -> None:
    """Raise ConfigError for a dotted key of very many parts."""
    # The parser's time is quadratic in their number.
    bare = _QUOTED.sub("'", text)
    if any(part.count(".") > MAX_TABLE_DEPTH for part in re.split(r"[,=\[\]{}\n]", bare)):
        raise _too_deep(path)


def _too_deep(path: str | Path | Message) -> ConfigError:
    return ConfigError("{path} nests tables more than {most} levels deep", path=path, most=MAX_TABLE_DEPTH)


def _too_long(path: str | Path | Message, digits: int) -> ConfigError:
    template = "{path} has a number of {digits} digits; write one that has at most {most}"
    return ConfigError(template, path=path, digits=digits, most=LONGEST_NUMBER)


def _refused_number(path: str | Path | Message, error: ValueError) -> ConfigError | None:
    """Return the error for an integer that Python itself refuses to read, None for other errors."""
    digits = re.search(r"value has (\d+) digits", str(error))
    return _too_long(path, int(digits[1])) if digits else None
