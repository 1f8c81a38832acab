"""What the commands about runs and the queue share: finding by name, tables, JSON, and questions."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar

from library.bench.report import align_columns
from library.cli.main import EXIT_DONE, EXIT_FAILED, complain
from library.config.problems import ConfigError, Message, MessageLike, one_line
from library.runs import reader
from library.runs.dates import duration_in_words, local_time

Named = TypeVar("Named")
UNKNOWN = "-"  # in a table


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=1, default=lambda value: asdict(value) if is_dataclass(value) else str(value)))


def run_command(command: Callable[[], Any], as_json: bool) -> int:
    """Run a command that returns its exit code, or None for success; a mistake is printed as JSON, too, if wanted."""
    try:
        return command() or EXIT_DONE
    except ConfigError as error:
        if not as_json:
            return complain(str(error), EXIT_FAILED)
        problems = [{"error": str(problem), "field": problem.option} for problem in error.problems]
        print_json({"error": str(error), "field": problems[0]["field"], "problems": problems})
        return EXIT_FAILED


def find_named(name: str, candidates: Sequence[Named], ids: Callable[[Named], tuple[str, str]], what: str) -> Named:
    """Return the only candidate with this id, beginning of an id, or name. `ids` returns both of one."""
    for fits in (lambda i, n: i == name, lambda i, n: n == name, lambda i, n: i.startswith(name)):
        matches = [candidate for candidate in candidates if fits(*ids(candidate))]
        if len(matches) == 1:
            return matches[0]
        if matches:
            several = ", ".join(ids(candidate)[0] for candidate in matches)
            raise ConfigError("{name} is the name of several: write one of {several}", name=name, several=several)
    choices = ", ".join(sorted({ids(candidate)[1] for candidate in candidates})) or "there are none"
    raise ConfigError("no {what} is called {name}: {known}", what=what, name=name, known=choices)


def find_run_named(name: str) -> reader.RecordedRun:
    """Return a run by its id, the beginning of its id, or its output name: of several, the newest or the active one."""
    runs = reader.runs()
    with_name = [run for run in runs if run.facts.get("output_name") == name]
    if with_name and all(run.id != name for run in runs):
        return next((run for run in with_name if run.active), with_name[0])
    return find_named(name, runs, lambda run: (run.id, run.name), "run")


def only_active_run(name: str) -> reader.RecordedRun:
    """Return the run of this name, or without a name the only one that is active."""
    if name:
        return find_run_named(name)
    active = [run for run in reader.runs() if run.active]
    if len(active) != 1:
        names = ", ".join(run.id for run in active)
        raise ConfigError("name one of the runs: {names}", names=names) if active else ConfigError("no run is active")
    return active[0]


def confirm(question: MessageLike, yes: bool) -> bool:
    """Ask a question at the terminal, unless it was answered by --yes. Raises ConfigError where nobody can answer."""
    if yes:
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError("{question} Add --yes if that is meant.", question=question)
    print(f"{question!s} [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def print_table(head: Sequence[str], rows: Sequence[Sequence[MessageLike]]) -> None:
    """Print rows below a head in aligned columns."""
    cells = [[cell if isinstance(cell, Message) else one_line(cell) for cell in row] for row in (head, *rows)]
    for line in align_columns(cells):
        print(line)


def clock(moment: float | None) -> str:
    """Return a time of today, or else a date and time."""
    if moment is None:
        return UNKNOWN
    when = local_time(moment)
    is_today = time.strftime("%x", when) == time.strftime("%x")
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", when)


def duration(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else str(duration_in_words(seconds))


def steps(done: int, total: int) -> str:
    return f"{done}/{total}" if total else str(done) if done else UNKNOWN
