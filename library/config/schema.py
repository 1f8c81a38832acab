"""The definition of what a config consists of.

A run's config is a frozen dataclass of sections; a section is a frozen dataclass of options, each declared once with
`opt`. Flags, TOML reader and writer, form, docs/options.md and checks are all derived from that.

A section, or the run itself, may have three methods that yield problems: `check(run)` for violated rules across
options, `notes(run)` for remarks on a valid config, and `missing(run)` for what must be filled in before a training can
start (an untouched form is a valid config that cannot be started).
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Problem
from library.config.values import Option

S = TypeVar("S")  # a section
HINTS = {
    *("usual", "min", "max", "ceiling", "kind", "weighted", "split", "parse"),
    *("label", "words", "advanced", "shown_with", "written"),
}


def opt(default: Any, help: str, **hints: Any) -> Any:
    """Declare one option: its default, one sentence of help, and hints.

    Hints: `min`, `max`; `ceiling`, a number beyond anything trainable, so certainly a mistake; `kind` ("file", "files",
    "folder", "code" for a name of it, "secret", "text" for several lines); `weighted`, if a strength may follow the
    file, FILE:0.8; `split`, a function from text to several values, if blanks do not always part them; `parse`, a
    function from any value to the option's type; `usual`, the proposal for a negative number (else the default; None:
    nothing); `label`, if the name alone reads badly; `words` of choices that read badly; `advanced`, to fold it away;
    `shown_with`, see `Option.shown_with`; `written`, if the training writes into the path: "always", or "if missing"
    where it first reads what is there.
    """
    if unknown := set(hints) - HINTS:
        raise TypeError(f"unknown hints: {', '.join(sorted(unknown))}")
    return dataclasses.field(default=default, metadata={"help": help, **hints})


def define_section(cls: type[S]) -> S:
    return dataclasses.field(default_factory=cls)  # type: ignore[return-value]


@functools.cache
def options_of(config: type) -> Mapping[str, Option]:
    """Return the options of a config class by name, in the order of its sections (`order`) and of their declaration."""
    options: dict[str, Option] = {}
    for part in sorted(dataclasses.fields(config), key=lambda f: getattr(config, "order", (f.name,)).index(f.name)):
        for option in section_options(part.default_factory, part.name).values():  # type: ignore[arg-type]
            if option.name in options:
                raise TypeError(f"{option.name} is declared in both {options[option.name].section} and {part.name}")
            options[option.name] = option
    return types.MappingProxyType(options)


@functools.cache
def section_options(cls: type, name: str = "") -> Mapping[str, Option]:
    """Return the options of one section class by name, without fields not declared by `opt`."""
    hints = typing.get_type_hints(cls)
    fields = (f for f in dataclasses.fields(cls) if "help" in f.metadata)
    return types.MappingProxyType({f.name: _option(f, hints[f.name], name) for f in fields})


def _option(field: dataclasses.Field, hint: Any, section: str) -> Option:
    kinds = list(get_args(hint)) if get_origin(hint) in (types.UnionType, typing.Union) else [hint]
    optional = type(None) in kinds
    kinds = [k for k in kinds if k is not type(None)]
    choices = tuple(c for k in kinds if get_origin(k) is Literal for c in get_args(k))
    plain = [k for k in kinds if get_origin(k) is not Literal]
    kind = plain[-1] if plain else type(choices[0])  # the last type of `int | float` is the wider one
    many = get_origin(kind) is tuple and get_args(kind)[-1] is ...
    kind = get_args(kind)[0] if many else get_origin(kind) or kind
    is_open = bool(choices and plain)  # Literal["a", "b"] | str: these, or anything else
    return Option(field.name, section, kind, many, optional, choices, is_open, field.default, field.metadata)


def option_values(config: Any) -> JsonObject:
    return {o.name: getattr(getattr(config, o.section), o.name) for o in options_of(type(config)).values()}


def changed(config: Any, secrets: bool = False) -> dict[str, JsonObject]:
    """Return what differs from the defaults, by section: the content of a preset, a run's TOML and its record.

    Tokens and keys are left out unless `secrets` is set.
    """
    sections: dict[str, JsonObject] = {}
    for name, value in option_values(config).items():
        o = options_of(type(config))[name]
        if value != o.default and (secrets or o.kind != "secret"):
            sections.setdefault(o.section, {})[name] = value
    return sections


def flatten_sections(sections: JsonMapping, problems: list[Problem] | None = None) -> JsonObject:
    """Remove one level of tables: {"optim": {"learning_rate": 1}} -> {"learning_rate": 1}.

    An option in two tables is ambiguous: it is appended to `problems`, or raised as ConfigError without such a list.
    """
    flat: JsonObject = {}
    places: dict[str, MessageLike] = {}
    duplicates: list[Problem] = []
    for title, value in sections.items():
        for key, inner in (value if isinstance(value, Mapping) else {title: value}).items():
            place = f"[{title}]" if isinstance(value, Mapping) else Message("the part above all tables")
            if key in flat:
                template = "is in both {first} and {second}: keep one of the two"
                duplicates.append(Problem(key, template, first=places[key], second=place))
            flat[key], places[key] = inner, place
    if problems is not None:
        problems += duplicates
    elif duplicates:
        raise ConfigError(*duplicates)
    return flat


def defaults(config: Any, *names: str) -> JsonObject:
    options = options_of(type(config))
    return {name: options[name].default for name in names if name in options}
