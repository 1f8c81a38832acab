"""The contents of a training's prompt and data set files: two files of one name may differ."""

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from library.config.json_types import JsonObject
from library.config.outside_files import read_regular
from library.config.outside_text import with_line_feeds
from library.config.problems import Message, MessageLike
from library.runs import job_files, layout

DIFFER = {"sample_prompts": "prompts differ", "dataset_config": "data sets differ"}
MAX_BYTES = 1_000_000  # bytes of a compared file; the page holds the lines of many
MAX_LINES = 3  # lines shown per file
MAX_LENGTH = 120  # characters shown of a line or a value
CONTEXT = 20  # characters shown before the first difference


@dataclass(frozen=True)
class FileContent:
    """A file of prompts or data sets. Files with the same lines are equal, whatever they are called."""

    name: str = field(compare=False)  # as in the settings
    lines: tuple[str, ...]  # without empty ones and comments


def content_of(path: Path) -> FileContent | None:
    """Return the content of a file; None if it is missing or too large to compare."""
    lines = _lines_of(str(path), layout.signature(str(path)))
    return None if lines is None else FileContent(str(path), lines)


@functools.lru_cache(maxsize=256)
def _lines_of(path: str, written: tuple[int, int, int]) -> tuple[str, ...] | None:
    # `written` is part of the cache's key, as the page asks every second.
    if not written[0] > 0 or written[1] > MAX_BYTES:
        return None
    try:
        text = read_regular(path, MAX_BYTES).decode("utf-8-sig", "replace")
    except OSError:
        return None
    lines = [line.strip() for line in with_line_feeds(text).split("\n")]
    return tuple(line for line in lines if line and not line.startswith("#"))


def with_contents(values: Mapping[str, object], folder: Path) -> JsonObject:
    """Return settings with paths replaced by the contents of their copies in a folder, if it has them."""
    files: Mapping[str, Path] = {}
    with contextlib.suppress(OSError):  # it may be deleted meanwhile
        files = job_files.copied_files(folder)
    contents = {name: content for name, path in files.items() if name in values and (content := content_of(path))}
    return {**values, **{name: replace(content, name=str(values[name])) for name, content in contents.items()}}


def make_comparable(values: Sequence[object]) -> Sequence[object]:
    """Return comparable values: contents if several are known and differ, else paths."""
    contents = [value for value in values if isinstance(value, FileContent)]
    is_unknown = any(value is not None and not isinstance(value, FileContent) for value in values)
    if len(contents) > 1 and not (is_unknown and len(set(contents)) == 1):
        return values
    return [value.name if isinstance(value, FileContent) else value for value in values]


def comparable(value: object) -> FileContent | str | None:
    """Return a form that is equal for equal values, as a run's config and its record may differ in types."""
    return value if isinstance(value, FileContent) else _plain(value)


def describe_difference(option: str, values: Sequence[object]) -> str:
    """Describe the difference between contents of files; "" for other values."""
    return DIFFER.get(option, "") if sum(isinstance(value, FileContent) for value in values) > 1 else ""


def texts_beside(values: Sequence[object]) -> list[MessageLike | None]:
    """Return values as texts that differ if the values do: of files the lines that not all have equally often, and
    whole paths and long values if their short forms are the same. None means not set."""
    contents = [value for value in values if isinstance(value, FileContent)]
    if len(contents) < 2:
        short = {comparable(value): value_text(value) for value in values}
        is_short = len(set(short.values())) == len(short)
        return [value_text(value) if is_short else _plain(value) for value in values]
    common = functools.reduce(Counter.__and__, (Counter(content.lines) for content in contents))
    own = {content: [*(Counter(content.lines) - common)] for content in contents}
    if not any(own.values()):
        orders = {True: Message("in this order"), False: Message("in another order")}
        return [orders[v == contents[0]] if isinstance(v, FileContent) else value_text(v) for v in values]
    same = _length_in_common([lines[0] for lines in own.values() if lines])
    return [_own_lines(own[v], same) if isinstance(v, FileContent) else value_text(v) for v in values]


def _length_in_common(lines: Sequence[str]) -> int:
    """Return how many characters to leave out at the beginning of lines, as all begin with them: a JSON file may be
    one long line."""
    if len(lines) < 2 or max(map(len, lines)) <= MAX_LENGTH:
        return 0
    return max(len(os.path.commonprefix([*lines])) - CONTEXT, 0)


def _own_lines(own: Sequence[str], same: int) -> MessageLike:
    first = [f"… {line[same:]}" if same else line for line in own[:1]]
    shown = "; ".join(map(_shortened, [*first, *own[1:MAX_LINES]]))
    if len(own) > MAX_LINES:
        return Message("{lines}; and {count} more", lines=shown, count=len(own) - MAX_LINES)
    return shown or Message("none of these")


def value_text(value: object) -> str | None:
    """Return a value of a config as text, of a path only its name; None for a value that is not set."""
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
