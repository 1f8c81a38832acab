"""Parsers for `compile_blocks` and `compile_from_step`.

`kinds` maps a family's words for its blocks to their classes.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from library.config.problems import ConfigError, Message, Problem
from library.config.values import did_you_mean, quoted

# Class of block, first and last (None: all), and their backend, or "".
BlockChoice = tuple[str, tuple[int, int] | None, str]


def classes_by_word(kinds: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    # "transformer" means all kinds in a family that distinguishes several.
    return {"transformer": tuple(kinds.values())} | {name: (cls,) for name, cls in kinds.items()}


def chosen_blocks(text: str, kinds: Mapping[str, str]) -> list[BlockChoice]:
    """Parse "double:0-9,single:all=aot_eager". Raises ConfigError for an unknown kind, range or backend."""
    choices: list[BlockChoice] = []
    classes, kind = classes_by_word(kinds), ""
    for part in _split_choices(text):
        where, equals, backend = (text.strip() for text in part.partition("="))
        name, colon, numbers = where.rpartition(":")
        kind = name.strip() if colon else kind  # without a kind, as in double:0-3,7 it is the one before
        if not kind and where in classes:
            raise _no_range(where, where)
        if kind not in classes:
            raise _no_blocks(
                ": there are no blocks called {name}{hint}; choose from {names}, such as {first}:0-9",
                name=quoted(kind or part),
                hint=did_you_mean(kind or part, kinds),
                names=", ".join(kinds),
                first=next(iter(kinds)),
            )
        if equals and not backend:
            raise _no_blocks(": {part} names no backend; write {where}=aot_eager, or {where}", part=part, where=where)
        block_range = None if numbers.strip() == "all" else _parse_range(kind, numbers)
        choices.extend((cls, block_range, backend) for cls in classes[kind])
    if text and not choices:
        example, shown = f"{next(iter(kinds), 'blocks')}:all", quoted(text)
        raise _no_blocks(": {given} names no blocks; write {such}, or nothing", given=shown, such=example)
    return choices


def steps_by_word(text: str, kinds: Mapping[str, str]) -> list[tuple[str, int]]:
    """Parse "transformer:20, resnet:80" into steps by word; "" is the word of a lone step. Raises ConfigError."""
    steps: dict[str, int] = {}
    classes, assigned = classes_by_word(kinds), set[str]()
    for part in _split_choices(text):
        name, colon, step = (t.strip() for t in part.rpartition(":"))
        if not re.fullmatch(r"\d{1,9}", step) or (colon and name not in classes):
            raise ConfigError(
                Problem(
                    "compile_from_step",
                    ": {part} is not a step; write 40, or a kind of block and its step, such as {first}:40",
                    part=quoted(part),
                    first=next(iter(kinds), "transformer"),
                )
            )
        step_classes = {*classes[name]} if colon else {""}
        if assigned & step_classes:
            raise ConfigError(
                Problem(
                    "compile_from_step",
                    ": {part} is a second step for the same blocks; give one for each kind",
                    part=quoted(part),
                )
            )
        assigned |= step_classes
        steps[name] = int(step)
    if text and not steps:
        raise ConfigError(
            Problem(
                "compile_from_step",
                ": {given} names no step; write 40, or nothing to compile from the beginning",
                given=quoted(text),
            )
        )
    return [*steps.items()]


def never_begun(text: str, kinds: Mapping[str, str], last: int) -> Iterator[Problem]:
    """Return blocks that stay eager because the training ends with step `last` before they would be compiled."""
    steps = steps_by_word(text, kinds)
    late = {word: step for word, step in steps if step > last}
    listed_classes = {cls for word, _ in steps if word for cls in classes_by_word(kinds)[word]}
    if late and len(late) == len(steps) and ("" in late or listed_classes == {*kinds.values()}):
        yield Problem(
            "compile_from_step",
            ": nothing is compiled, as the training ends with step {last} and compiling begins with step {first}; "
            "use {last} at most, or leave it empty to compile from the beginning",
            first=min(late.values()),
            last=last,
            fix={"compile_from_step": None},
        )
        return
    for word, first in late.items():
        yield Problem(
            "compile_from_step",
            ": {what} are not compiled, as the training ends with step {last} and their compiling begins with step "
            "{first}; use {last} at most",
            what=Message("{word} blocks", word=word) if word else Message("other blocks"),
            first=first,
            last=last,
        )


def _split_choices(text: str) -> Iterator[str]:
    return filter(None, (part.strip() for part in text.split(",")))


def _no_blocks(template: str, **arguments: Any) -> ConfigError:
    return ConfigError(Problem("compile_blocks", template, **arguments))


def _parse_range(kind: str, text: str) -> tuple[int, int]:
    """Parse 3 or "0-9" into the first and the last."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise _no_range(kind, f"{kind}:{text.strip()}")
    return first, last


def _no_range(kind: str, text: str) -> ConfigError:
    return _no_blocks(": {given} is not a range of blocks; write {kind}:all or {kind}:0-9", kind=kind, given=text)
