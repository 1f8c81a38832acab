"""Build a config from a file of another trainer, with a report that covers each of its settings."""

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from library.config.building import build, draft
from library.config.json_types import JsonMapping, JsonObject, JsonValue
from library.config.problems import ConfigError, Problem, Text
from library.config.run_config import RunConfig
from library.config.schema import changed, flat, options
from library.config.sections.run import INEFFECTIVE_EVERYWHERE
from library.config.values import Option, to_float

Kind = Literal["kept", "renamed", "changed", "ignored", "empty", "default"]
Configs = Mapping[str, type]  # script -> its config class
NOT_HERE = "not supported by this trainer"
TO_FIX = "to fix: {problem}"
SECRET = "tokens and keys stay out of configs; set the environment variable of the service (WANDB_API_KEY, HF_TOKEN)"


@dataclass(frozen=True, slots=True)
class KeyOutcome:
    """The outcome of one key, and a sentence about it unless it was kept or empty."""

    key: str
    kind: Kind
    text: str = ""


@dataclass(slots=True)
class ImportBuilder:
    """The settings of one file during the import. Each key gets one outcome, and each option at most one value."""

    source: JsonMapping
    script: str
    trainer: str
    values: JsonObject = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)  # option -> the key that set it
    outcomes: dict[str, KeyOutcome] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)  # option -> content of a file that it names
    keeps_ineffective: bool = False  # whether options without effect are kept, as in our own files
    absent: frozenset[str] = frozenset()  # keys of `source` that are the trainer's defaults and not in the file
    names: dict[str, str] = field(default_factory=dict)  # key -> its old name, where the file has that

    @property
    def family(self) -> str:
        """The family of the script."""
        return self.script.partition("_train")[0]

    @property
    def adapters(self) -> bool:
        """Whether the script trains adapters."""
        return self.script.endswith("_network")

    def get(self, key: str) -> Any:
        """The value of a key; None where it is absent or empty."""
        value = self.source.get(key)
        return None if is_empty(value) else value

    def number(self, key: str) -> float | None:
        """The value of a key as a number; None where it is none."""
        return to_number(self.source.get(key))

    def keep(self, key: str, value: Any = None) -> None:
        """Record that the key is an option of the same name."""
        self._set(key, KeyOutcome(key, "kept"), {key: self.source.get(key) if value is None else value})

    def rename(self, key: str, option: str, value: Any = None) -> None:
        """Record that the key is an option of another name."""
        value = self.source.get(key) if value is None else value
        self._set(key, KeyOutcome(key, "renamed", option), {option: value})

    def change(self, key: str, text: str, values: JsonMapping | None = None) -> None:
        """Record that the key corresponds to other options, or to another value."""
        self._set(key, KeyOutcome(key, "changed", text), values or {})

    def explain(self, text: str, *keys: str) -> None:
        """Record that the keys are covered by what another one sets. Those that are not in `source` are skipped."""
        for key in keys:
            if key in self.source:
                self.change(key, text)

    def assume(self, key: str, value: Any) -> None:
        """Set the trainer's default for a key that the file does not have."""
        if key not in self.source:
            self.source, self.absent = {**self.source, key: value}, self.absent | {key}

    def ignore(self, key: str, reason: str) -> None:
        """Record that the key has no equivalent; not reported where it is off or empty."""
        off = is_empty(self.source.get(key)) or self.source.get(key) in (False, 0, "0")
        self.outcomes[key] = KeyOutcome(key, "empty") if off else KeyOutcome(key, "ignored", reason)

    def empty(self, *keys: str) -> None:
        """Record that the keys set nothing."""
        for key in keys:
            if key in self.source:
                self.outcomes.setdefault(key, KeyOutcome(key, "empty"))

    def left(self) -> list[str]:
        """The keys that have no outcome yet."""
        return [key for key in self.source if key not in self.outcomes]

    def given(self, key: str) -> bool:
        """Whether the file itself has the key."""
        return key in self.source and key not in self.absent

    def _set(self, key: str, outcome: KeyOutcome, values: JsonMapping) -> None:
        self.outcomes[key] = outcome
        for option, value in values.items():
            self.values[option], self.keys[option] = value, key


@dataclass(frozen=True, slots=True)
class Imported:
    """A file of another trainer as a config, and the report on its keys."""

    trainer: str  # with the tab that wrote it, as in "kohya_ss (LoRA)"
    config: RunConfig
    outcomes: tuple[KeyOutcome, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]  # rules across options that the file breaks: to be fixed before a training
    texts: Mapping[str, str]  # option -> content of a file that it names

    def with_files(self, paths: Mapping[str, str]) -> "Imported":
        """A copy whose options name the files that were written, by option."""
        config = self.config
        for name, path in paths.items():
            part = options(type(config))[name].section
            config = replace(config, **{part: replace(getattr(config, part), **{name: path})})
        return replace(self, config=config)

    def of(self, kind: Kind) -> list[KeyOutcome]:
        """The outcomes of one kind."""
        return [outcome for outcome in self.outcomes if outcome.kind == kind]

    def lines(self) -> list[str]:
        """The messages of the page: what changed or was left out, notes, what to fix."""
        to_fix = [Text(TO_FIX, problem=problem) for problem in self.problems]
        changed = [Text("{key}: {text}", key=outcome.key, text=outcome.text) for outcome in self.of("changed")]
        renamed = [
            Text("{key} is now {option}", key=outcome.key, option=outcome.text) for outcome in self.of("renamed")
        ]
        every = ", ".join(self._defaults())
        template = "not in the file, so {trainer} has: {values}"
        defaults = [Text(template, trainer=self.program, values=every)] if every else []
        grouped = _grouped(self.of("ignored"))
        ignored = [Text("ignored: {names}: {reason}", names=names, reason=reason) for reason, names in grouped]
        return [*to_fix, *changed, *renamed, *defaults, *ignored, *self.notes]

    @property
    def program(self) -> str:
        """The trainer without the tab."""
        return self.trainer.partition(" (")[0]

    def _defaults(self) -> list[str]:
        return [f"{outcome.key} ({outcome.text})" for outcome in self.of("default")]

    def account(self) -> JsonObject:
        """The whole report as JSON."""
        outcomes = [{"key": outcome.key, "became": outcome.kind, "text": outcome.text} for outcome in self.outcomes]
        settings = {name: _plain(value) for name, value in flat(changed(self.config)).items()}
        remarks = {"notes": list(self.notes), "problems": list(self.problems), "files": dict(self.texts)}
        head = {"trainer": self.trainer, "script": self.config.script}
        return {**head, "settings": settings, "keys": outcomes, **remarks}

    def report(self) -> str:
        """The whole report as text."""
        blocks = [f"{self.trainer} -> {self.config.script} ({self.config.title})"]
        if kept := self.of("kept"):
            blocks.append(_block("kept", len(kept), [", ".join(f.key for f in kept)]))
        if renamed := self.of("renamed"):
            blocks.append(_block("renamed", len(renamed), [f"{f.key} -> {f.text}" for f in renamed]))
        if changed := self.of("changed"):
            blocks.append(_block("changed", len(changed), [f"{f.key}: {f.text}" for f in changed]))
        if self.of("default"):
            blocks.append(_block(f"defaults of {self.program}", len(self.of("default")), self._defaults()))
        if ignored := self.of("ignored"):
            grouped = [f"{names}: {reason}" for reason, names in _grouped(ignored)]
            blocks.append(_block("ignored", len(ignored), grouped))
        if empty := self.of("empty"):
            blocks.append(f"empty or off: {len(empty)} keys")
        for title, remarks in (("notes", self.notes), ("to fix", self.problems)):
            if remarks:
                blocks.append(_block(title, len(remarks), remarks))
        return "\n".join(blocks)


def settle(builder: ImportBuilder, configs: Configs) -> Imported:
    """Check each value against the options of the script; invalid ones become ignored, with the reason."""
    config, read = configs[builder.script], {}
    for name, value in builder.values.items():
        key = builder.keys[name]
        try:
            read[name] = _accepted(config, name, value, configs)
            if why := "" if builder.keeps_ineffective else _ineffective(config, name, read[name]):
                read.pop(name)
                raise ConfigError("without effect: {why}", why=why)
        except ConfigError as reason:
            named = name == key or any(problem.option == name for problem in reason.problems)
            text = reason.said if named else Text("{key}: {text}", key=name, text=reason.said)
            builder.outcomes[key] = KeyOutcome(key, "empty") if value is False else KeyOutcome(key, "ignored", text)
    notes, problems = list(builder.notes), list[Problem]()
    try:
        made = build(config, read, notes=notes)
    except ConfigError as error:
        made, problems = draft(config, read), error.problems
    outcomes = _outcomes(builder, config, read)
    texts = {name: text for name, text in builder.texts.items() if name in options(config)}
    return Imported(builder.trainer, made, outcomes, tuple(notes), tuple(problems), texts)


def _outcomes(builder: ImportBuilder, config: type[RunConfig], read: JsonMapping) -> tuple[KeyOutcome, ...]:
    """The outcomes under the names in the file; of the trainer's defaults only those that differ from ours."""
    known, outcomes = options(config), []
    differing: dict[str, list[str]] = {}
    for name, key in builder.keys.items():
        if name in read and read[name] != known[name].default:
            differing.setdefault(key, []).append(f"{name} = {known[name].text(read[name])}")
    for key in [*builder.source, *(k for k in builder.outcomes if k not in builder.source)]:
        outcome = builder.outcomes[key]
        if key in builder.absent and key in differing:
            outcome = replace(outcome, kind="default", text=", ".join(differing[key]))
        if key not in builder.absent or key in differing:
            outcomes.append(replace(outcome, key=builder.names[key]) if key in builder.names else outcome)
    return tuple(outcomes)


def _accepted(config: type[RunConfig], name: str, value: Any, configs: Configs) -> Any:
    """The value of an option in its type. Raises ConfigError with the reason when it cannot be set."""
    option: Option | None = options(config).get(name)
    if option is None:
        raise ConfigError(_unknown(config, name, configs))
    if option.kind == "secret":
        raise ConfigError(SECRET)
    try:
        result = option.read(value)
    except ConfigError as error:
        raise ConfigError(
            "{error}; the default is used ({default})",
            error=error.said,
            default=option.text(option.default) or "not set",
        ) from None
    if result != option.default and (why := config.refusal(name, result)):
        raise ConfigError(why)
    return result


def _ineffective(config: type[RunConfig], name: str, value: Any) -> str:
    """Why an option has no effect in this kind of training; "" where it has one, or is not set."""
    is_set = value != options(config)[name].default
    return config.ineffective.get(name) or INEFFECTIVE_EVERYWHERE.get(name, "") if is_set else ""


def _unknown(config: type[RunConfig], name: str, configs: Configs) -> str:
    """Why a name is no option of this kind of training."""
    reasons = {**config.retired, **config.foreign}
    if name in reasons:
        return reasons[name]
    others = [other for other in configs.values() if name in options(other)]
    others.sort(key=lambda other: other.family != config.family)
    if others and all(other.family != config.family for other in others):
        return Text("it is for {title}", title=others[0].title.split()[0])
    return Text("it is for {title} only", title=others[0].title) if others else NOT_HERE


def is_empty(value: Any) -> bool:
    """Whether a value stands for an empty field."""
    return value is None or (isinstance(value, str) and not value.strip()) or value in ([], {}, ())


def is_on(value: JsonValue) -> bool:
    """The value of a switch, which may be text."""
    return str(value).strip().casefold() in ("true", "1", "yes", "on")


def to_number(value: Any) -> float | None:
    """A finite number, which may be text; None for anything else."""
    try:
        return to_float(value)
    except (ValueError, OverflowError):
        return None


def _grouped(outcomes: Iterable[KeyOutcome]) -> list[tuple[str, str]]:
    groups: dict[str, list[str]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.text, []).append(outcome.key)
    return [(reason, ", ".join(keys)) for reason, keys in groups.items()]


def _plain(value: Any) -> Any:
    """A value of an option as JSON."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _block(title: str, count: int, lines: Iterable[str]) -> str:
    wrapper = textwrap.TextWrapper(110, initial_indent="  ", subsequent_indent="    ")
    return "\n".join([f"{title} ({count}):", *map(wrapper.fill, lines)])
