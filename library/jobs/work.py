"""The process of a job: records its progress, result and end, and handles requests to stop."""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Report
from library.jobs.jobs import JOB, JOB_FOLDER_VARIABLE, RESULT, STOP, new
from library.runs import layout, process

EXIT_MISUSED = 2  # exit code of a command without arguments
MIN_RECORD_INTERVAL = 0.2  # minimum seconds between two records of the same phase


class JobRecord:
    """The record of a command in its job's folder; without a folder it writes nothing. A context manager."""

    def __init__(self, kind: str, folder: Path | None) -> None:
        self.kind = kind
        self._last_phase: tuple[MessageLike, float] = "", 0.0
        self.folder: Any = folder  # a Path; None to write nothing
        self._facts: JsonObject = {}
        self._end = {"state": "finished", "error": ""}
        self._previous_handler: Any = None  # the previous SIGTERM handler
        self._is_handed_on = False

    def __enter__(self) -> "JobRecord":
        # SIGTERM ends the command like Ctrl+C, so that it stores partial results and cleans up. Only the main thread
        # may set handlers.
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, _interrupt)
        if self.folder:
            self._facts = {"started": time.time(), **layout.load_facts(self.folder / JOB)}
            self._write(kind=self.kind, state="running", **process.identity())
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._is_handed_on:
            self._write(**(_end_state(error) if error else self._end), ended=time.time(), doing=None)
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)

    def phase(self, text: Message, done: int = 0, total: int = 0) -> None:
        """Record the current phase and its progress. Raises KeyboardInterrupt if the job should stop."""
        before, when = self._last_phase
        if not self.folder or (text == before and time.monotonic() - when < MIN_RECORD_INTERVAL and done != total):
            return
        self._last_phase = text, time.monotonic()
        self._write(doing={"text": text, "done": done, "total": total})
        if (self.folder / STOP).exists():
            raise KeyboardInterrupt

    def wait(self, text: Message) -> None:
        """Record what the job waits for; in a shell it is printed once."""
        if not self.folder and self._last_phase[0] != text:
            print(text, flush=True)
            self._last_phase = text, 0.0
        self.phase(text)

    def store(self, result: JsonMapping) -> None:
        if self.folder:
            layout.store(self.folder / RESULT, result)

    def hand_on(self) -> None:
        self._is_handed_on = True

    def fail(self) -> None:
        # The command has already printed its error.
        self._end = {"state": "failed", "error": ""}

    def _write(self, **news: Any) -> None:
        self._facts |= news
        if self.folder:
            layout.store(self.folder / JOB, self._facts)


def join_work(kind: str) -> JobRecord:
    """Return the record of a command that has a folder only if the page started it."""
    folder = os.environ.pop(JOB_FOLDER_VARIABLE, None)  # child processes must not inherit it
    return JobRecord(kind, Path(folder) if folder else None)


def ahead_of(kind: str) -> JobRecord:
    """Return the record of a command that starts another process, which then joins it; until then this one may wait."""
    folder = os.environ.get(JOB_FOLDER_VARIABLE)
    return JobRecord(kind, Path(folder) if folder else None)


def run_command(
    kind: str,
    parser: argparse.ArgumentParser,
    argv: list[str],
    work: Callable[[argparse.Namespace, Report], int],
) -> int:
    """Run a command for the shell or the page; without arguments, print its help. Return the exit code."""
    if not argv:
        parser.print_help()
        return EXIT_MISUSED
    arguments = parser.parse_args(argv)
    with join_work(kind) as record:
        return work(arguments, record.phase if record.folder else progress_line())


def begin_work(kind: str, folder: Path | None = None) -> JobRecord:
    record = join_work(kind)
    return JobRecord(kind, folder or record.folder or new(kind))


def _end_state(error: BaseException) -> JsonObject:
    if isinstance(error, KeyboardInterrupt):
        return {"state": "stopped", "error": ""}
    if isinstance(error, ConfigError):
        return {"state": "failed", "error": error.said}
    texts = {MemoryError: "there is not enough memory for this", SystemExit: ""}
    message = next(
        (text for kind, text in texts.items() if isinstance(error, kind)), f"{type(error).__name__}: {error}"
    )
    return {"state": "failed", "error": message}


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def progress_line() -> Report:
    """Return a report that writes to stderr, apart from the result: one line that is rewritten in a terminal, and one
    line per phase in a file or a pipe, however many images it has."""
    phase: list[MessageLike] = [""]
    width = [0]  # of the line that is in the terminal now; 0: none is open

    def report(message: Message, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            if message != phase[0]:
                print(f"{message} ({total})" if total > 1 else str(message), file=sys.stderr, flush=True)
        else:
            if width[0] and message != phase[0]:
                print(file=sys.stderr)
                width[0] = 0
            line = f"{message} {done} / {total}" if total > 1 else str(message)
            is_over = done >= total
            print(f"\r{line.ljust(width[0])}", end="\n" if is_over else "", file=sys.stderr, flush=True)
            width[0] = 0 if is_over else len(line)
        phase[0] = message

    return report
