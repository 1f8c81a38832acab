"""A config written into the text that it came from: comments, order and spelling stay, and only values change."""

import re
from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from library.config.building import draft
from library.config.formats import to_toml, toml_value
from library.config.json_types import JsonObject
from library.config.outside_files import parse_toml
from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.config.schema import changed, flatten_sections, option_values, options_of
from library.config.values import Option

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

MAX_KEPT = 60_000  # characters of a text that is kept; tomlkit takes a second for more
SCRIPT_NAMED = re.compile(r"sd-scripts/(\w+)\.py")
TABLE_HEAD = re.compile(r"\s*\[[^=]*\]\s*(?:#.*)?")  # the line that begins a table


def to_commented_toml(text: str, config: RunConfig, comment: str = "") -> str:
    """Return a config as TOML: `text` with the values of the config.

    Names that are no options of the config are removed, and so are tokens. `comment` names the script, and is added if
    no comment on top does. A text that cannot be kept is written anew, as `to_toml` does.
    """
    from tomlkit.exceptions import TOMLKitError

    new = to_toml(config, comment)
    if not text.strip() or len(text) > MAX_KEPT:
        return new
    try:
        kept = _with_script(_with_values(text, config), config, comment)
        return kept if _holds(kept, config) else new
    except (ConfigError, TOMLKitError, KeyError, TypeError, ValueError):
        return new


def comments_on_top(text: str) -> list[str]:
    return list(takewhile(lambda line: not line.strip() or line.lstrip().startswith("#"), text.split("\n")))


def _with_script(text: str, config: RunConfig, comment: str) -> str:
    top = comments_on_top(text)
    named = [(at, match[1]) for at, line in enumerate(top) if (match := SCRIPT_NAMED.search(line))]
    if not comment or (named and named[0][1] == config.script):
        return text
    if not named:
        return f"# {comment}\n{text}" if top else f"# {comment}\n\n{text}"
    rows = text.split("\n")
    return "\n".join([*rows[: named[0][0]], f"# {comment}", *rows[named[0][0] + 1 :]])


def _with_values(text: str, config: RunConfig) -> str:
    import tomlkit  # slow, and only needed where a text is edited

    parse_toml(text, "config.toml")  # the limits for everything from outside
    document = tomlkit.parse(text)
    values, written = option_values(config), set[str]()
    for place, key, option in [*_entries(document, config)]:
        if option is None:
            del place[key]
            continue
        value = values[option.name]
        written.add(option.name)
        if _reads_as(option, place[key], value):
            continue
        if value in (None, ()):
            del place[key]
        else:
            place[key] = _item(value)
    kept = tomlkit.dumps(document)
    for section, members in changed(config).items():
        lines = [f"{name} = {toml_value(value)}" for name, value in members.items() if name not in written]
        kept = _with_lines(kept, section, lines) if lines else kept
    return kept


def _entries(document: "TOMLDocument", config: RunConfig) -> "Iterator[tuple[Any, str, Option | None]]":
    """Each key above and in the tables of a text: its place, its name, and the option that it sets."""
    from tomlkit.items import Table

    options, aliases = options_of(type(config)), getattr(config, "aliases", {})
    for name in [*document]:
        item = document[name]
        for place, key in [(item, inner) for inner in [*item]] if isinstance(item, Table) else [(document, name)]:
            option = options.get(aliases.get(key, key))
            yield place, key, None if option is None or option.kind == "secret" else option


def _reads_as(option: Option, written: Any, value: Any) -> bool:
    try:
        return option.read(written.unwrap() if hasattr(written, "unwrap") else written) == value  # a bool is a bool
    except ConfigError:
        return False


def _item(value: Any) -> Any:
    import tomlkit

    return tomlkit.parse(f"value = {toml_value(value)}")["value"]


def _with_lines(text: str, section: str, lines: list[str]) -> str:
    """A text with further lines behind the last value of a section; without tables, behind the last of all."""
    rows = text.rstrip("\n").split("\n")
    heads = [at for at, row in enumerate(rows) if TABLE_HEAD.fullmatch(row)]
    head = next((at for at in heads if rows[at].partition("#")[0].strip() == f"[{section}]"), None)
    if head is None and (heads or not any(row.partition("#")[0].strip() for row in rows)):
        return "\n".join([*rows, "", f"[{section}]", *lines]) + "\n"
    first = -1 if head is None else head
    end = next((at for at in heads if at > first), len(rows))
    # What is written above a table belongs to that table.
    last = max((at for at in range(max(first, 0), end) if rows[at].partition("#")[0].strip()), default=first)
    return "\n".join([*rows[: last + 1], *lines, *rows[last + 1 :]]) + "\n"


def _holds(text: str, config: RunConfig) -> bool:
    """Whether a text has exactly the values of a config."""
    options, aliases = options_of(type(config)), getattr(config, "aliases", {})
    read: JsonObject = {}
    for key, value in flatten_sections(parse_toml(text, "config.toml")).items():
        name = aliases.get(key, key)
        read[name] = options[name].read(value)
    secrets = {name: options[name].default for name in options if options[name].kind == "secret"}
    return option_values(draft(type(config), read)) == {**option_values(config), **secrets}
