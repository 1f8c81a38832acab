"""The one place that knows what a config is.

A run's config is a frozen dataclass of sections; a section is a frozen dataclass of options, each declared once with
`opt`. The flags, the TOML reader and writer, the form, docs/options.md and the checks are all derived from that.

A section, or the run itself, may have three methods, each yielding problems: `check(run)` for rules across options
that are broken, `notes(run)` for what the user should know though nothing is broken, and `missing(run)` for what must
be filled in before a training can start (an untouched form is a valid config that cannot be started).
"""

import dataclasses
import functools
import json
import logging
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Problem, Text
from library.config.run_config import RunConfig
from library.config.text_files import read_text
from library.config.values import Option, closest, did_you_mean

__all__ = [
    "ConfigError",
    "Layer",
    "Option",
    "Reading",
    "build",
    "build_layers",
    "changed",
    "defaults",
    "draft",
    "flat",
    "mending",
    "missing",
    "notes",
    "opt",
    "options",
    "read_layers",
    "read_section",
    "read_toml",
    "replace",
    "section",
    "to_toml",
    "values",
]

C = TypeVar("C", bound="RunConfig")  # of a run
S = TypeVar("S")  # of a section of it
HINTS = {"min", "max", "ceiling", "kind", "parse", "label", "advanced", "shown_with"}


def opt(default: Any, help: str, **hints: Any) -> Any:
    """Declare one option: its default, one sentence of help, and hints.

    Hints: `min`, `max`; `ceiling`, a number beyond anything that can be trained, which can only be a mistake; `kind`
    ("file", "folder", "secret", "text" for several lines); `parse`, a function from any value to the option's type;
    `label`, where the name alone reads badly; `advanced`, to fold it away; `shown_with`, see `Option.shown_with`.
    """
    if unknown := set(hints) - HINTS:
        raise TypeError(f"unknown hints: {', '.join(sorted(unknown))}")
    return dataclasses.field(default=default, metadata={"help": help, **hints})


def section(cls: type[S]) -> S:
    """Declare one group of options inside a run's config."""
    return dataclasses.field(default_factory=cls)  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Values by option name, and where they come from: a file's name, "--" for flags, "" for a form."""

    values: JsonMapping
    source: str = ""

    @property
    def place(self) -> str:
        """What a message says in front of the name of one of its options."""
        return f"in {self.source}: " if self.source not in ("", "--") else self.source


@dataclasses.dataclass(frozen=True, slots=True)
class Reading(Generic[C]):
    """What came of reading values that may be wrong, so that all else can be judged as well.

    In `config` an option whose value cannot be read has its default; `wrong` names these options, and those that a
    misspelt name was meant for: what a later check says of them would only be a consequence of `problems`.
    """

    config: C
    problems: list[Problem]
    notes: list[Problem]
    wrong: frozenset[str] = frozenset()
    known: bool = True  # false when a file could not be read at all: nothing can be said of what it may have set


# ---- what a config consists of


@functools.cache
def options(config: type) -> Mapping[str, Option]:
    """Every option of a config class by name, in the order of its sections (`order`) and of their declaration."""
    found: dict[str, Option] = {}
    for part in sorted(dataclasses.fields(config), key=lambda f: getattr(config, "order", (f.name,)).index(f.name)):
        for option in section_options(part.default_factory, part.name).values():  # type: ignore[arg-type]
            if option.name in found:
                raise TypeError(f"{option.name} is declared in both {found[option.name].section} and {part.name}")
            found[option.name] = option
    return types.MappingProxyType(found)


@functools.cache
def section_options(cls: type, name: str = "") -> Mapping[str, Option]:
    """The options of one section class by name; fields that are not made by `opt` are left out."""
    hints = typing.get_type_hints(cls)
    fields = (f for f in dataclasses.fields(cls) if "help" in f.metadata)
    return types.MappingProxyType({f.name: _option(f, hints[f.name], name) for f in fields})


def _option(field: dataclasses.Field, hint: Any, section: str) -> Option:
    kinds = list(get_args(hint)) if get_origin(hint) in (types.UnionType, typing.Union) else [hint]
    optional = type(None) in kinds
    kinds = [k for k in kinds if k is not type(None)]
    choices = tuple(c for k in kinds if get_origin(k) is Literal for c in get_args(k))
    plain = [k for k in kinds if get_origin(k) is not Literal]
    kind = plain[-1] if plain else type(choices[0])  # of `int | float` the wider one, which is last
    many = get_origin(kind) is tuple and get_args(kind)[-1] is ...
    kind = get_args(kind)[0] if many else get_origin(kind) or kind
    is_open = bool(choices and plain)  # Literal["a", "b"] | str: these, or anything else
    return Option(field.name, section, kind, many, optional, choices, is_open, field.default, field.metadata)


def values(config: Any) -> JsonObject:
    """Every option's value by name."""
    return {o.name: getattr(getattr(config, o.section), o.name) for o in options(type(config)).values()}


def changed(config: Any, secrets: bool = False) -> dict[str, JsonObject]:
    """What differs from the defaults, by section: a preset, a run's TOML and its record are all this.

    Tokens and keys stay out of files unless `secrets` is asked for.
    """
    out: dict[str, JsonObject] = {}
    for name, value in values(config).items():
        o = options(type(config))[name]
        if value != o.default and (secrets or o.kind != "secret"):
            out.setdefault(o.section, {})[name] = value
    return out


def flat(sections: JsonMapping) -> JsonObject:
    """One level of tables taken away: {"optim": {"learning_rate": 1}} -> {"learning_rate": 1}. Later ones win."""
    out: JsonObject = {}
    for key, value in sections.items():
        out.update(value if isinstance(value, Mapping) else {key: value})
    return out


# ---- making one


def build(config: type[C], values: JsonMapping, source: str = "", notes: list[str] | None = None) -> C:
    """Values by option name -> a checked config.

    Raises ConfigError with every problem, a line each. What the user should know though nothing is wrong (a key that
    is ignored, an option without effect) is appended to `notes`; without such a list it is logged as warnings.
    """
    return build_layers(config, [Layer(values, source)], notes)


def build_layers(config: type[C], layers: Iterable[Layer], notes: list[str] | None = None) -> C:
    """Like `build`, from several layers of values; a later layer wins over an earlier one."""
    reading = read_layers(config, layers)
    if reading.problems:
        raise ConfigError(*reading.problems)
    _tell(reading.notes, notes)
    return reading.config


def read_layers(config: type[C], layers: Iterable[Layer], unheard: Collection[str] = ()) -> Reading[C]:
    """Like `build_layers`, but what is wrong is told in the answer and never raised.

    `unheard` are options that somebody tried to set in a way that could not be understood.
    """
    known, meant_for = options(config), set[str]()
    problems: list[Problem] = []
    remarks: list[Problem] = []
    old_known: Mapping[str, Option] = getattr(config, "old", {})
    chosen: dict[str, tuple[str, str, Any]] = {}  # option -> where it is set, its name there, and its value
    old: JsonObject = {}
    for layer in layers:
        for name, value in layer.values.items():
            if name in old_known:
                old |= read_section(old_known, Layer({name: value}, layer.source), problems)
            elif option := _resolve(config, layer, name, value, problems, remarks):
                chosen[option] = layer.place, name, value
            elif name not in known:
                meant_for.add(closest(name, known))
    _convert(config, old, chosen, remarks)
    read, wrong = {}, (meant_for | {*unheard}) & known.keys() - chosen.keys()
    for name, (place, title, value) in chosen.items():
        try:
            read[name] = known[name].read(value)
        except ConfigError as e:
            problems += [problem.replaced(option=title, place=place) for problem in e.problems]
            wrong.add(name)
    made = _assemble(config, read)
    # A rule that speaks of a value which could not be read would only repeat that it is wrong.
    problems += [p for p in _ask(made, "check") if wrong.isdisjoint(p.options)]
    notes = remarks if problems else [*remarks, *_ask(made, "notes")]
    return Reading(made, problems, notes, frozenset(wrong))


def draft(config: type[C], read: JsonMapping) -> C:
    """A config of values that are right each for itself, whether or not they go together."""
    return _assemble(config, read)


def replace(config: C, **changes: Any) -> C:
    """A new config with some options changed, checked again."""
    return build(type(config), {**values(config), **changes}, notes=[])


def missing(config: RunConfig) -> list[Problem]:
    """What must be filled in before this config can be trained with."""
    return list(_ask(config, "missing"))


def notes(config: RunConfig) -> list[Problem]:
    """What the user should know of this config though nothing is wrong."""
    return list(_ask(config, "notes"))


def defaults(config: Any, *names: str) -> JsonObject:
    """The defaults of some options, for a fix that switches them off; of those that the config has."""
    known = options(type(config))
    return {name: known[name].default for name in names if name in known}


def mending(problem: Problem, config: RunConfig) -> JsonObject:
    """The values that mend a problem of this config, by option name; none where its fix would leave it standing."""
    wanted = {name: value for name, value in problem.fix.items() if name in options(type(config))}
    if not wanted:
        return {}
    reading = read_layers(type(config), [Layer({**values(config), **wanted})])
    return {} if problem.replaced(place="") in [*reading.problems, *missing(reading.config)] else wanted


def read_section(cls: type | Mapping[str, Option], layer: Layer, problems: list[Problem]) -> JsonObject:
    """The values of one table -> checked values by name, for a section class or any options; problems are appended."""
    known, read = cls if isinstance(cls, Mapping) else section_options(cls), {}
    for name, value in layer.values.items():
        if name not in known:
            hint = did_you_mean(name, known)
            problems.append(Problem(name, "is not a known key{hint}", place=layer.place, hint=hint))
            continue
        try:
            read[name] = known[name].read(value)
        except ConfigError as e:
            problems += [problem.replaced(option=name, place=layer.place) for problem in e.problems]
    return read


def _resolve(config: type[RunConfig], layer: Layer, name: str, value: Any, problems: list[Problem],
             remarks: list[Problem]) -> str | None:  # fmt: skip
    """The option a name stands for, or None when there is nothing to set; says why in `problems` or `told`."""
    place, known = layer.place, options(config)
    if name in known:
        return name
    if new := getattr(config, "aliases", {}).get(name):
        remarks.append(Problem(name, "is an old name; it is read as {new}", place=place, new=new))
        return new
    if advice := getattr(config, "retired", {}).get(name):
        if value not in (None, False, 0, "", []):
            problems.append(Problem(name, "is gone: {advice}", place=place, advice=Text(advice)))
    elif reason := getattr(config, "foreign", {}).get(name):
        remarks.append(Problem(name, "is ignored: {reason}", place=place, reason=Text(reason)))
    elif script := getattr(config, "script_with", lambda _: "")(name):
        here = config.script
        problems.append(
            Problem(name, "is an option of {script}, and this is {here}", place=place, script=script, here=here)
        )
    else:
        problems.append(Problem(name, "is not an option{hint}", place=place, hint=did_you_mean(name, known)))
    return None


def _convert(config: type[RunConfig], old: JsonMapping, chosen: dict[str, Any], remarks: list[Problem]) -> None:
    """Choose the options that checked values of old ones became."""
    if old:
        converted, said = config.convert(old, chosen.keys())
        chosen |= {name: (f"{', '.join(old)}: ", name, value) for name, value in converted.items()}
        remarks += said


def _assemble(config: type[C], read: JsonMapping) -> C:
    parts: dict[str, JsonObject] = {f.name: {} for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    for name, value in read.items():
        parts[options(config)[name].section][name] = value
    return config(**{f.name: f.default_factory(**parts[f.name]) for f in dataclasses.fields(config)})  # type: ignore


def _ask(config: RunConfig, what: str) -> Iterator[Problem]:
    if hasattr(config, what):
        yield from getattr(config, what)()
    for name in dict.fromkeys(option.section for option in options(type(config)).values()):
        part = getattr(config, name)
        if hasattr(part, what):
            yield from getattr(part, what)(config)


def _tell(remarks: list[Problem], notes: list[str] | None) -> None:
    if notes is not None:
        notes.extend(remarks)
        return
    for note in remarks:
        logging.getLogger(__name__).warning(note)


# ---- TOML


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
