"""Commands as forms: fields derived from the shell's options, and a filled form as the words of its command."""

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.config.json_types import JsonMapping
from library.config.problems import ConfigError, Message, MessageLike, raise_if_any, with_labels

Maker = Callable[[type[argparse.ArgumentParser]], argparse.ArgumentParser]
# (text, kind, label) -> a permitted path, or the id of a model on the hub, or ConfigError
Guard = Callable[[str, str, str], Path | str]

DEFAULT_IN_BRACKETS = re.compile(
    r" \((?:(?:default: )?%\(default\)s|default: [^()]*)\)$"
)  # which the form's field shows already


@dataclass(frozen=True)
class CommandField:
    """One option."""

    name: str
    flag: str  # "" for a positional one
    kind: str  # file, folder, model, new, files (with weights), flag, choice, number, lines, text
    label: str
    help: str
    default: str
    choices: tuple[str, ...]
    required: bool
    suggestions: Mapping[str, str]
    is_whole: bool = False  # a number without a fraction


@dataclass(frozen=True)
class CommandForm:
    """One subcommand."""

    name: str
    title: str
    about: str
    fields: tuple[CommandField, ...]


class _RaisingParser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of exiting."""

    def error(self, message: str) -> Any:
        raise ConfigError(message)


@dataclass(frozen=True)
class CommandForms:
    """The forms of a command with subcommands, such as `kohya tools`."""

    command: str
    parser: Maker
    titles: Mapping[str, str]
    labels: Mapping[str, str]
    left_out: frozenset[str] = frozenset()
    # Titles and texts to fill into a text field, by subcommand and option.
    suggestions: Mapping[tuple[str, str], Mapping[str, str]] = dataclasses.field(default_factory=dict)

    def all(self) -> dict[str, CommandForm]:
        """Return every subcommand with a title, by name."""
        sub = next(
            a for a in self.parser(argparse.ArgumentParser)._actions if isinstance(a, argparse._SubParsersAction)
        )
        return {
            name: CommandForm(name, self.titles[name], choice.description or "", tuple(self._fields(name, choice)))
            for name, choice in sub.choices.items()
            if name in self.titles
        }

    def words(self, name: str, values: JsonMapping, guard: Guard) -> list[str]:
        """Convert a filled form to the words after `kohya`. Every path passes through `guard`.

        Raises ConfigError with what is missing or wrong, by the field's label.
        """
        forms = self.all()
        if name not in forms:
            raise ConfigError("{name} does not exist: choose {forms}", name=repr(name), forms=", ".join(forms))
        fields = forms[name].fields
        if unknown := sorted(values.keys() - {field.name for field in fields}):
            raise ConfigError("{unknown}: {name} has no such field", unknown=", ".join(unknown), name=name)
        words = [self.command, name, *_form_words(fields, values, guard)]
        self.parser(_RaisingParser).parse_args(words[1:])
        return words

    def labelled(self, name: str, message: MessageLike) -> MessageLike:
        """Return a message about a subcommand with its options replaced by the labels of its form."""
        form = self.all().get(name)
        if form is None or not isinstance(message, Message):
            return message
        return with_labels(message, {field.name: field.label for field in form.fields})

    def _fields(self, command: str, subparser: argparse.ArgumentParser) -> Iterator[CommandField]:
        for action in subparser._actions:
            if action.dest == "help" or action.dest in self.left_out:
                continue
            flag = action.option_strings[0] if action.option_strings else ""
            default = "" if action.default in (None, []) or action.default is False else str(action.default)
            label = self.labels.get(action.dest, action.dest.replace("_", " ").capitalize())
            choices = tuple(map(str, action.choices or ()))
            help_text = DEFAULT_IN_BRACKETS.sub("", action.help or "").replace("%(default)s", default)
            suggestions = self.suggestions.get((command, action.dest), {})
            required, whole = bool(action.required), action.type is int
            yield CommandField(
                action.dest, flag, _field_kind(action), label, help_text, default, choices, required, suggestions, whole
            )


def _form_words(fields: tuple[CommandField, ...], values: JsonMapping, guard: Guard) -> list[str]:
    """Return the words of a form's fields; required ones must be filled in."""
    words, missing = [], []
    for field in fields:
        value = values.get(field.name)
        field_words = list(_field_words(field, value, guard))
        if field.required and not field_words:
            missing.append(Message("{field}: this must be filled in", field=Message(field.label)))
        words += field_words
    raise_if_any(missing)
    return words


def _field_kind(action: argparse.Action) -> str:
    if action.dest == "loras":
        return "files"
    if action.nargs == 0:
        return "flag"
    if action.choices:
        return "choice"
    if action.metavar == "MODEL":
        return "model"
    if action.type is Path:
        return "folder" if action.metavar == "FOLDER" else "new" if action.dest == "out" else "file"
    if isinstance(action, argparse._AppendAction):
        return "lines"
    return "number" if action.type in (int, float) else "text"


def _field_words(field: CommandField, value: Any, guard: Guard) -> Iterator[str]:
    """Return the words of one field; none if it is empty."""
    if field.kind == "flag":
        if value is True:
            yield field.flag
        return
    lines = [line.strip() for line in str(value if value is not None else "").splitlines() if line.strip()]
    if len(lines) > 1 and field.kind not in ("files", "lines"):
        raise ConfigError("{label}: this is one line", label=field.label)
    for line in lines:
        if field.kind == "files":
            yield _weighted_file(line, field, guard)
        elif field.kind in ("file", "folder", "model", "new"):
            path = guard(line, field.kind, field.label)
            yield f"{field.flag}={path}" if field.flag else str(path)
        elif field.kind == "number" and not _is_number(line, field.is_whole):
            number = Message("a whole number") if field.is_whole else Message("a number")
            raise ConfigError("{label}: {value} is not {number}", label=field.label, value=line, number=number)
        elif field.kind == "choice" and line not in field.choices:
            template = "{label}: {value} is none of the choices; choose {choices}"
            raise ConfigError(template, label=field.label, value=repr(line), choices=", ".join(field.choices))
        else:
            yield f"{field.flag}={line}" if field.flag else line


def _is_number(text: str, whole: bool) -> bool:
    try:
        int(text) if whole else float(text)
    except ValueError:
        return False
    return True


def _weighted_file(line: str, field: CommandField, guard: Guard) -> str:
    """Split a file and its weight, "FILE=0.8"; the default weight is 1."""
    path, separator, weight = line.rpartition("=")
    if not separator or line.lower().endswith(".safetensors"):  # a name may contain "="
        path, weight = line, "1"
    try:
        number = float(weight)
    except ValueError:
        raise ConfigError(
            "{label}: the weight of {path} is {weight}, which is not a number",
            label=field.label,
            path=path,
            weight=repr(weight),
        ) from None
    if not math.isfinite(number):
        raise ConfigError("{label}: the weight of {path} must be a finite number", label=field.label, path=path)
    return f"{guard(path, 'file', field.label)}={number:g}"
