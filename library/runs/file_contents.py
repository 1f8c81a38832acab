"""What the files of prompts and data sets say that trainings name: two of one name may differ."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from library.config.json_types import JsonObject
from library.config.problems import Message, MessageLike
from library.runs import job_files, layout

DIFFER = {"sample_prompts": "prompts differ", "dataset_config": "data sets differ"}
MAX_LINES = 3  # of a file that are shown
MAX_LENGTH = 120  # characters of a line or a value that are shown


@dataclass(frozen=True)
class FileContent:
    """A file of prompts or data sets. Files with the same lines are equal, whatever they are called."""

    name: str = field(compare=False)
    lines: tuple[str, ...]  # without empty ones and comments


def content_of(path: Path) -> FileContent | None:
    """Return what a file says; None if it is not there, or too large to be compared."""
    lines = _lines_of(str(path), layout.signature(str(path)))
    return None if lines is None else FileContent(path.name, lines)


@lru_cache(maxsize=256)
def _lines_of(path: str, written: tuple[int, int, int]) -> tuple[str, ...] | None:
    # `written` is part of the cache's key, as the page asks every second.
    if not written[0] > 0 or written[1] > job_files.MAX_BYTES:
        return None
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            lines = [line.strip() for line in file]
    except OSError:
        return None
    return tuple(line for line in lines if line and not line.startswith("#"))


def with_contents(values: Mapping[str, object], files: Mapping[str, Path]) -> JsonObject:
    """Return settings with the contents of files in place of their paths."""
    contents = {name: content for name, path in files.items() if name in values and (content := content_of(path))}
    return {**values, **contents}


def comparable(value: object) -> FileContent | str | None:
    """Return what is equal for equal values: a run's config and its record may have other types."""
    return value if isinstance(value, FileContent) else _plain(value)


def words_of(option: str, values: Sequence[object]) -> str:
    """Return what differs in words, where values are contents of files; "" where they are settings."""
    return DIFFER.get(option, "") if sum(isinstance(value, FileContent) for value in values) > 1 else ""


def texts_beside(values: Sequence[object]) -> list[MessageLike | None]:
    """Return values as texts beside each other, which differ where the values do: of files the lines that not all of
    them have, and of paths and long values the whole where their short forms are the same. None is not set."""
    contents = [value for value in values if isinstance(value, FileContent)]
    if len(contents) < 2:
        short = {comparable(value): value_text(value) for value in values}
        is_short = len(set(short.values())) == len(short)
        return [value_text(value) if is_short else _plain(value) for value in values]
    common = set(contents[0].lines).intersection(*(content.lines for content in contents))
    is_order = all(common.issuperset(content.lines) for content in contents)
    return [
        value_text(value)
        if not isinstance(value, FileContent)
        else _in_order(value, contents[0])
        if is_order
        else _own_lines(value, common)
        for value in values
    ]


def _in_order(content: FileContent, first: FileContent) -> Message:
    return Message("in this order" if content == first else "in another order")


def _own_lines(content: FileContent, common: set[str]) -> MessageLike:
    own = [line for line in dict.fromkeys(content.lines) if line not in common]
    shown = "; ".join(map(_shortened, own[:MAX_LINES]))
    if len(own) > MAX_LINES:
        return Message("{lines}; and {count} more", lines=shown, count=len(own) - MAX_LINES)
    return shown or Message("none of these")


def value_text(value: object) -> str | None:
    """Return a value of a config as text, of a path only its name; None for a value that is not set."""
    if isinstance(value, FileContent):
        return value.name
    text = _plain(value)
    return text and _shortened(os.path.basename(text) or text if os.path.isabs(text) else text)


def _plain(value: object) -> str | None:
    if value is None or isinstance(value, bool):
        return None if value is None else str(value).lower()
    if isinstance(value, FileContent):
        return value.name
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]} …"
