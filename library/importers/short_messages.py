"""Messages of an import at a length that people read, whatever names and values a file holds."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from library.config.problems import ConfigError, Message, MessageLike, Problem
from library.importers.result import Imported

MAX_SHOWN = 300  # characters of a name or a value


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Shorten what a ConfigError within this context repeats of a file."""
    try:
        yield
    except ConfigError as e:
        raise ConfigError(*map(_short_problem, e.problems)) from e


def short_report(imported: Imported) -> Imported:
    """Return a result whose report repeats little of a file. The config is the same."""
    outcomes = tuple(
        replace(outcome, key=_short(outcome.key), text=short_message(outcome.text)) for outcome in imported.outcomes
    )
    return replace(
        imported,
        outcomes=outcomes,
        notes=tuple(map(short_message, imported.notes)),
        problems=tuple(map(_short_problem, imported.problems)),
        guess=short_message(imported.guess),
    )


def short_message(message: MessageLike) -> MessageLike:
    """Return a message whose names and values are cut at MAX_SHOWN characters."""
    if isinstance(message, Problem):
        return _short_problem(message)
    return message.changed(_short) if isinstance(message, Message) else _short(message)


def _short_problem(problem: Problem) -> Problem:
    return problem.changed(_short).replaced(option=_short(problem.option))


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
