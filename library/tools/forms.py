"""The tools as forms: fields derived from the options of `kohya tools`, and a filled form as its command line."""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.config.schema import ConfigError
from library.tools.shell import parser

# What a form has no use for: results are always new files, and are shown as text.
LEFT_OUT = {"help", "json", "in_place", "yes"}
TITLES = {
    "merge": "Merge", "extract": "Extract", "resize": "Resize", "convert": "Convert names", "verify": "Verify",
    "metadata": "Metadata",
}  # fmt: skip
LABELS = {
    "loras": "LoRA files", "lora": "LoRA file", "out": "New file", "base": "Base model", "tuned": "Tuned model",
    "dtype": "Stored as", "conv_rank": "Rank of convolutions", "min_diff": "Smallest difference", "to": "Names",
    "set": "Set", "remove": "Remove",
}  # fmt: skip

Guard = Callable[[str, str, str], Path]  # (text, kind, label) -> the path that may be used, or ConfigError


@dataclass(frozen=True)
class Field:
    """One option of a tool."""

    name: str
    flag: str  # "" for a positional one
    kind: str  # file, new, files (with weights), flag, choice, number, lines
    label: str
    help: str
    default: str
    choices: tuple[str, ...]
    required: bool


@dataclass(frozen=True)
class Tool:
    """One tool."""

    name: str
    title: str
    about: str
    fields: tuple[Field, ...]


class _Telling(argparse.ArgumentParser):
    """A parser that says what is wrong as the rest of the project does, instead of ending the process."""

    def error(self, message: str) -> Any:
        raise ConfigError(message)


def tools() -> dict[str, Tool]:
    """All tools by name."""
    sub = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {
        name: Tool(name, TITLES.get(name, name), one.description or "", tuple(_fields(one)))
        for name, one in sub.choices.items()
    }


def command(name: str, values: Mapping[str, Any], guard: Guard) -> list[str]:
    """A filled form -> the words after `kohya`. Every path goes through `guard`.

    Raises ConfigError with what is missing or wrong, by the field's label.
    """
    tool = tools().get(name)
    if tool is None:
        raise ConfigError(f"{name!r} is no tool: choose {', '.join(tools())}")
    if unknown := sorted(values.keys() - {field.name for field in tool.fields}):
        raise ConfigError(f"{', '.join(unknown)}: {name} has no such field")
    words, missing = ["tools", name], []
    for field in tool.fields:
        given = values.get(field.name)
        made = list(_words(field, given, guard))
        if field.required and not made:
            missing.append(f"{field.label}: this must be filled in")
        words += made
    if missing:
        raise ConfigError("\n".join(missing))
    parser(_Telling).parse_args(words[1:])
    return words


def _fields(one: argparse.ArgumentParser) -> Iterator[Field]:
    for action in one._actions:
        if action.dest in LEFT_OUT:
            continue
        flag = action.option_strings[0] if action.option_strings else ""
        default = "" if action.default is None or action.default == [] else str(action.default)
        text = (action.help or "").replace("%(default)s", default)
        yield Field(
            action.dest, flag, _kind(action), LABELS.get(action.dest, action.dest.replace("_", " ").capitalize()),
            text, default, tuple(map(str, action.choices or ())), action.required,
        )  # fmt: skip


def _kind(action: argparse.Action) -> str:
    if action.dest == "loras":
        return "files"
    if action.nargs == 0:
        return "flag"
    if action.choices:
        return "choice"
    if action.type is Path:
        return "new" if action.dest == "out" else "file"
    if isinstance(action, argparse._AppendAction):
        return "lines"
    return "number" if action.type in (int, float) else "text"


def _words(field: Field, given: Any, guard: Guard) -> Iterator[str]:
    """The words of one field; none when nothing is in it."""
    if field.kind == "flag":
        if given is True:
            yield field.flag
        return
    lines = [line.strip() for line in str(given if given is not None else "").splitlines() if line.strip()]
    if len(lines) > 1 and field.kind not in ("files", "lines"):
        raise ConfigError(f"{field.label}: this is one line")
    for line in lines:
        if field.kind == "files":
            yield _weighted(line, field, guard)
        elif field.kind in ("file", "new"):
            path = guard(line, field.kind, field.label)
            yield f"{field.flag}={path}" if field.flag else str(path)
        else:
            yield f"{field.flag}={line}" if field.flag else line


def _weighted(line: str, field: Field, guard: Guard) -> str:
    """A file with its weight, "FILE=0.8"; without one it counts once."""
    path, found, weight = line.rpartition("=")
    if not found or line.lower().endswith(".safetensors"):  # a name may have a = in it
        path, weight = line, "1"
    try:
        number = float(weight)
    except ValueError:
        raise ConfigError(f"{field.label}: the weight of {path} is {weight!r}, which is no number") from None
    if not math.isfinite(number):
        raise ConfigError(f"{field.label}: the weight of {path} must be a finite number")
    return f"{guard(path, 'file', field.label)}={number:g}"
