"""Build a checked config from one or several layers of values, reporting every problem at once."""

import dataclasses
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from library.config.json_types import JsonMapping, JsonObject
from library.config.names import OF_DATASET_FILES
from library.config.problems import ConfigError, Message, MessageLike, Problem, option_name, raise_if_any
from library.config.run_config import RunConfig
from library.config.schema import option_values, options_of, section_options
from library.config.values import Option, closest, did_you_mean

C = TypeVar("C", bound=RunConfig)
COMMAND_FLAGS = ("config_file", "output_config")  # sd-scripts ignores them in a file
MAX_FIX_CHAIN = 6  # maximum rules that a fix may break in sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Values by option name, and where they come from: a file's name, "--" for flags, "" for a form."""

    values: JsonMapping
    source: str = ""

    @property
    def place(self) -> str:
        return f"in {self.source}: " if self.source not in ("", "--") else self.source


@dataclasses.dataclass(frozen=True, slots=True)
class Reading(Generic[C]):
    """A config read from possibly wrong values, so that everything else can still be checked.

    In `config` an unreadable option has its default; `wrong` names these options, and those that a misspelt name
    probably meant: later problems about them would only be consequences of `problems`.
    """

    config: C
    problems: list[Problem]
    notes: list[Problem]
    wrong: frozenset[str] = frozenset()
    known: bool = True  # false if a file could not be read at all, so that its options are unknown


def build_config(config: type[C], values: JsonMapping, source: str = "", notes: list[MessageLike] | None = None) -> C:
    """Build a checked config from values by option name.

    Raises ConfigError with every problem, a line each. Remarks (an ignored key, an option without effect) are appended
    to `notes`; without a list they are logged as warnings.
    """
    return build_layers(config, [Layer(values, source)], notes)


def build_layers(config: type[C], layers: Iterable[Layer], notes: list[MessageLike] | None = None) -> C:
    """Build a config like `build_config`, from several layers of values; a later layer wins over an earlier one."""
    reading = read_layers(config, layers)
    raise_if_any(reading.problems)
    if notes is not None:
        notes.extend(reading.notes)
    else:
        for note in reading.notes:
            logging.getLogger(__name__).warning(note)
    return reading.config


def read_layers(config: type[C], layers: Iterable[Layer], unreadable: Collection[str] = ()) -> Reading[C]:
    """Build a config like `build_layers`, but return problems instead of raising them.

    `unreadable` are options whose values could not even be parsed, such as a flag without its value.
    """
    options, meant_for = options_of(config), set[str]()
    problems: list[Problem] = []
    remarks: list[Problem] = []
    old_options: Mapping[str, Option] = getattr(config, "old", {})
    settings: dict[str, tuple[str, str, Any]] = {}  # option -> where it is set, its name there, and its value
    old_values: JsonObject = {}
    for layer in layers:
        names_in_layer: dict[str, str] = {}  # option -> its name in this layer
        for name, value in layer.values.items():
            if name in old_options:
                old_values |= read_section(old_options, Layer({name: value}, layer.source), problems)
            elif option := _resolve(config, layer, name, value, problems, remarks):
                if option in names_in_layer:
                    template = "and {other} are the same option: keep one of the two"
                    problems.append(
                        Problem(
                            name, template, place=layer.place, other=option_name(names_in_layer[option]), also=option
                        )
                    )
                names_in_layer[option] = name
                settings[option] = layer.place, name, value
            elif name not in options:
                meant_for.add(closest(name, options))
    if old_values:
        converted, conversion_notes = config.convert(old_values, settings.keys())
        settings |= {name: (f"{', '.join(old_values)}: ", name, value) for name, value in converted.items()}
        remarks += conversion_notes
    values, wrong_options = {}, (meant_for | {*unreadable}) & options.keys() - settings.keys()
    for name, (place, title, value) in settings.items():
        try:
            values[name] = options[name].read(value)
        except ConfigError as e:
            problems += [problem.replaced(option=title, place=place) for problem in e.problems]
            wrong_options.add(name)
    built = _assemble(config, values)
    # A rule about an unreadable value would only repeat that it is wrong.
    problems += [p for p in _collect_problems(built, "check") if wrong_options.isdisjoint(p.options)]
    notes = remarks if problems else [*remarks, *_collect_problems(built, "notes")]
    return Reading(built, problems, notes, frozenset(wrong_options))


def draft(config: type[C], values: JsonMapping) -> C:
    return _assemble(config, values)


def replace_options(config: C, **changes: Any) -> C:
    return build_config(type(config), {**option_values(config), **changes}, notes=[])


def find_missing(config: RunConfig) -> list[Problem]:
    return list(_collect_problems(config, "missing"))


def config_notes(config: RunConfig) -> list[Problem]:
    return list(_collect_problems(config, "notes"))


def working_fix(problem: Problem, config: RunConfig) -> JsonObject:
    """Return option values that fix a problem of this config; empty if they would cause another.

    If the problem's own fix breaks a rule, that rule's fix is added; if this fails, the switch that caused the problem
    is turned off.
    """
    options = options_of(type(config))
    values = {name: value for name, value in problem.fix.items() if name in options}
    if not values:
        return {}
    before = read_layers(type(config), [Layer(option_values(config))])
    fix = _complete_fix(problem, values, before)
    switch = options.get(problem.option)
    if fix is None and switch and switch.type is bool and not switch.default:
        fix = _complete_fix(problem, {problem.option: False}, before)
    return fix or {}


def _complete_fix(problem: Problem, values: JsonObject, before: Reading[C]) -> JsonObject | None:
    """Return values that fix a problem, with the fixes of the rules that they break.

    Empty if the problem remains, None if the rules contradict each other.
    """
    earlier_rules = {_rule(other) for other in before.problems} - {_rule(problem)}
    for _ in range(MAX_FIX_CHAIN):  # a rule's fix may break the next rule
        reading = read_layers(type(before.config), [Layer({**option_values(before.config), **values})])
        broken = next((other for other in reading.problems if _rule(other) not in earlier_rules), None)
        if problem.replaced(place="") in [*reading.problems, *find_missing(reading.config), *reading.notes]:
            return {}
        if broken is None:
            return values
        if not broken.fix or not broken.fix.keys().isdisjoint(values):
            return None
        values = {**values, **broken.fix}
    return None


def _rule(problem: Problem) -> tuple[str, str, frozenset[str]]:
    return problem.option, problem.template, problem.also


def read_section(cls: type | Mapping[str, Option], layer: Layer, problems: list[Problem]) -> JsonObject:
    """Parse the values of one table into checked values by name, for a section class or options; append problems."""
    options, values = cls if isinstance(cls, Mapping) else section_options(cls), {}
    for name, value in layer.values.items():
        if name not in options:
            hint = did_you_mean(name, options)
            problems.append(Problem(name, "is not a known key{hint}", place=layer.place, hint=hint))
            continue
        try:
            values[name] = options[name].read(value)
        except ConfigError as e:
            problems += [problem.replaced(option=name, place=layer.place) for problem in e.problems]
    return values


def _resolve(
    config: type[RunConfig], layer: Layer, name: str, value: Any, problems: list[Problem], remarks: list[Problem]
) -> str | None:
    """Return the option of a name, or None if there is nothing to set; explain that in `problems` or `remarks`."""
    place, options = layer.place, options_of(config)
    if name in options:
        return name
    if new := getattr(config, "aliases", {}).get(name):
        remarks.append(Problem(name, "is an old name; it is read as {new}", place=place, new=new))
        return new
    if advice := getattr(config, "retired", {}).get(name):
        if value not in (None, False, 0, "", []):
            problems.append(Problem(name, "was removed: {advice}", place=place, advice=Message(advice)))
    elif reason := getattr(config, "refused", {}).get(name):
        if value not in (None, False, 0, "", []):
            problems.append(Problem(name, "cannot be used here: {reason}", place=place, reason=Message(reason)))
    elif reason := getattr(config, "foreign", {}).get(name):
        remarks.append(Problem(name, "is ignored: {reason}", place=place, reason=Message(reason)))
    elif script := getattr(config, "script_with", lambda *_: "")(name, getattr(config, "family", "")):
        this_script = config.script
        problems.append(
            Problem(name, "is an option of {script}, and this is {here}", place=place, script=script, here=this_script)
        )
    elif name in COMMAND_FLAGS:
        template = "works only on the command line: copy the options of that file into this one"
        problems.append(Problem(name, template, place=place))
    else:
        problems.append(unknown_option(name, place, understood(config)))
    return None


def unknown_option(name: str, place: str, names: Iterable[str]) -> Problem:
    """Return the problem of an unknown option, with the most similar of `names`."""
    if name in OF_DATASET_FILES:
        return Problem(name, "is set for single data sets: write it into the dataset_config", place=place)
    return Problem(name, "is not an option{hint}", place=place, hint=did_you_mean(name, names))


def understood(config: type[RunConfig]) -> list[str]:
    tables = (getattr(config, table, {}) for table in ("aliases", "retired", "refused", "foreign", "old"))
    return [*options_of(config), *(name for table in tables for name in table)]


def _assemble(config: type[C], values: JsonMapping) -> C:
    parts: dict[str, JsonObject] = {f.name: {} for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    for name, value in values.items():
        parts[options_of(config)[name].section][name] = value
    return config(**{f.name: f.default_factory(**parts[f.name]) for f in dataclasses.fields(config)})  # type: ignore


def _collect_problems(config: RunConfig, method: str) -> Iterator[Problem]:
    if hasattr(config, method):
        yield from getattr(config, method)()
    for name in dict.fromkeys(option.section for option in options_of(type(config)).values()):
        part = getattr(config, name)
        if hasattr(part, method):
            yield from getattr(part, method)(config)
