"""The result of an import: the config, the outcome of each key, and the report on all of them."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import Message, MessageLike, Problem, as_message, counted, join_messages, option_name
from library.config.run_config import RunConfig
from library.config.schema import changed, flatten_sections, options_of

Kind = Literal["kept", "renamed", "changed", "ineffective", "ignored", "unknown", "empty", "default"]
TO_FIX = "to fix: {problem}"
WITHOUT_EFFECT = "without effect: {why}"  # of options that do nothing in this training, which is no mistake
MISSING = ("this file was not found", "none of its data sets")  # how reasons begin that ask for something instead


@dataclass(frozen=True, slots=True)
class KeyOutcome:
    """The outcome of one key, and a sentence about it unless it was kept or empty."""

    key: str
    kind: Kind
    text: MessageLike = ""
    fix: JsonMapping = field(default_factory=dict)  # what was probably meant: the option of an unknown key, or a value
    is_refused: bool = False  # ignored, as the option cannot have this value


@dataclass(frozen=True, slots=True)
class Imported:
    """A file of another trainer as a config, and the report on its keys."""

    trainer: str  # with the tab that wrote it, as in "kohya_ss (LoRA)"
    config: RunConfig
    outcomes: tuple[KeyOutcome, ...]
    notes: tuple[MessageLike, ...]
    problems: tuple[Problem, ...]  # problems to fix before a training, such as rules across options
    texts: Mapping[str, str]  # option -> content of a file that it names
    guess: MessageLike = ""  # why the script is only a guess; "" where the file states it
    launch: JsonMapping = field(default_factory=dict)  # values of `Launch` that a command states

    def with_files(self, paths: Mapping[str, str]) -> "Imported":
        """Return a copy whose options name the files that were written, by option."""
        config = self.config
        for name, path in paths.items():
            part = options_of(type(config))[name].section
            config = replace(config, **{part: replace(getattr(config, part), **{name: path})})
        return replace(self, config=config)

    def of(self, kind: Kind) -> list[KeyOutcome]:
        return [outcome for outcome in self.outcomes if outcome.kind == kind]

    def lines(self) -> list[MessageLike]:
        """Return the messages for the page: what to fix, what was guessed, changed or left out, and notes."""
        grouped = _group_by_reason(self.of("ignored"))
        to_fix = [Message(TO_FIX, problem=problem) for problem in (*self.problems, *self.missing())]
        changed = [
            Message("{key}: {text}", key=outcome.key, text=as_message(outcome.text)) for outcome in self.of("changed")
        ]
        renamed = [
            Message("{key} is now {option}", key=outcome.key, option=option_name(str(outcome.text)))
            for outcome in self.of("renamed")
        ]
        defaults_text = join_messages(self._defaults())
        template = "not in the file, so {trainer} has: {values}"
        defaults = [Message(template, trainer=self.program, values=defaults_text)] if defaults_text else []
        ignored = [
            Message("ignored: {keys}: {reason}", keys=keys, reason=as_message(reason))
            for reason, keys in grouped
            if not _is_missing(reason)
        ]
        guessed = [self.guess] if self.guess else []
        first = [*to_fix, *guessed, *self.unknown(), *changed, *renamed, *defaults]
        return [*first, *self._idle(), *ignored, *self.notes]

    def missing(self) -> list[Problem]:
        """Return the problems of files that were not found and of which something has to take the place."""
        return [
            Problem(outcome.key, ": {text}", text=as_message(outcome.text))
            for outcome in self.of("ignored")
            if _is_missing(outcome.text)
        ]

    def unknown(self) -> list[Problem]:
        template = "is not an option{hint}"
        return [Problem(outcome.key, template, hint=outcome.text, fix=outcome.fix) for outcome in self.of("unknown")]

    def _idle(self) -> list[Message]:
        """Return a message for each reason why options have no effect."""
        grouped = _group_by_reason(self.of("ineffective"))
        template = "without effect: {keys}: {reason}"
        return [Message(template, keys=keys, reason=as_message(reason)) for reason, keys in grouped]

    @property
    def program(self) -> str:
        return self.trainer.partition(" (")[0]

    def _defaults(self) -> list[Message]:
        return [
            Message("{key} ({values})", key=outcome.key, values=as_message(outcome.text))
            for outcome in self.of("default")
        ]

    def account(self) -> JsonObject:
        """Return the whole report as JSON."""
        outcomes = [
            {"key": outcome.key, "became": outcome.kind, "text": outcome.text, **_fix_as_json(outcome)}
            for outcome in self.outcomes
        ]
        settings = {name: _as_json(value) for name, value in flatten_sections(changed(self.config)).items()}
        remarks = {"notes": list(self.notes), "problems": list(self.problems), "files": dict(self.texts)}
        head = {"trainer": self.trainer, "script": self.config.script, "guessed": self.guess}
        return {**head, "settings": settings, "keys": outcomes, **remarks}

    def report(self) -> str:
        """Return the whole report as text."""
        reasons = {
            kind: [f"{names}: {reason}" for reason, names in _group_by_reason(self.of(kind))]
            for kind in ("ineffective", "ignored")
        }
        empty = self.of("empty")
        blocks = [
            f"{self.trainer} -> {self.config.script} ({self.config.title})",
            *_block("guessed", [self.guess] if self.guess else [], [self.guess]),
            *_block("kept", self.of("kept"), [", ".join(outcome.key for outcome in self.of("kept"))]),
            *_block("renamed", self.of("renamed"), [f"{o.key} -> {o.text}" for o in self.of("renamed")]),
            *_block("changed", self.of("changed"), [f"{o.key}: {o.text}" for o in self.of("changed")]),
            *_block(f"defaults of {self.program}", self.of("default"), self._defaults()),
            *_block("kept, but without effect", self.of("ineffective"), reasons["ineffective"]),
            *_block("unknown", self.unknown(), self.unknown()),
            *_block("ignored", self.of("ignored"), reasons["ignored"]),
            *([f"empty or off: {counted(len(empty), 'key')!s}"] if empty else []),
            *_block("notes", self.notes, self.notes),
            *_block("to fix", self.problems, self.problems),
        ]
        return "\n".join(blocks)


def _is_missing(reason: MessageLike) -> bool:
    return as_message(reason).template.startswith(MISSING)


def _group_by_reason(outcomes: Iterable[KeyOutcome]) -> list[tuple[MessageLike, str]]:
    """Return the keys by reason; a reason stays a message, as the page translates it."""
    groups: dict[MessageLike, list[str]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.text, []).append(outcome.key)
    return [(reason, ", ".join(keys)) for reason, keys in groups.items()]


def _fix_as_json(outcome: KeyOutcome) -> JsonObject:
    return {"fix": {name: _as_json(value) for name, value in outcome.fix.items()}} if outcome.fix else {}


def _as_json(value: Any) -> Any:
    """Return a value of an option as JSON."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _block(title: str, members: Sized, lines: Iterable[MessageLike]) -> Iterator[str]:
    """Yield the text of a group of keys or remarks, unless it has no members."""
    if members:
        wrapper = textwrap.TextWrapper(110, initial_indent="  ", subsequent_indent="    ")
        yield "\n".join([f"{title} ({len(members)}):", *(wrapper.fill(str(line)) for line in lines)])
