"""Measurements as files: each has a folder in which its process writes how far it is and what came of it.

`<user data>/lab/<kind>-<time>-<hex>/` holds job.json (what it is and how it stands), log.txt, result.json and whatever
the measurement adds (picture.svg, trace.json). The process writes, the page and the shell read. No torch in here.
"""

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from library.config.schema import ConfigError
from library.files import write_atomic
from library.runs import layout, process, reader, registry
from library.runs import start as launching

JOB, RESULT, LOG, PICTURE, TRACE = "job.json", "result.json", "log.txt", "picture.svg", "trace.json"
FOLDER = "KOHYA_JOB_DIR"  # in the environment: the folder that was made for this process
KEPT = 12  # folders that are kept; a trace can have a hundred megabytes
PATIENCE = 20.0  # seconds that a process may take until it says who it is


@dataclass(frozen=True)
class Job:
    """One measurement as it stands now."""

    folder: Path
    facts: Mapping[str, Any] = field(repr=False)

    @property
    def id(self) -> str:
        """Its name."""
        return self.folder.name

    @property
    def kind(self) -> str:
        """The command that it runs: doctor, bench, profile or cache."""
        return str(self.facts.get("kind", ""))

    @property
    def state(self) -> str:
        """One of running, finished, stopped, failed."""
        return str(self.facts.get("state", "failed"))

    @property
    def active(self) -> bool:
        """Whether it still works."""
        return self.state == "running"

    @property
    def result(self) -> dict[str, Any]:
        """What came of it so far."""
        return layout.load(self.folder / RESULT)


# ---- for the process that measures


class Work:
    """A measurement's own side: say what is done, keep what came of it. A context manager that writes down the end."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self._facts = layout.load(folder / JOB) | {"kind": kind, "state": "running", **process.identity()}
        self._facts.setdefault("started", time.time())
        self._write()

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        """What is measured now, and how much of how much is done."""
        self._write(doing={"text": text, "done": done, "total": total})

    def store(self, result: Mapping[str, Any]) -> Path:
        """Keep the result, whole or as far as it is known."""
        layout.store(self.folder / RESULT, result)
        return self.folder / RESULT

    def __enter__(self) -> "Work":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        state, told = "finished", ""
        if isinstance(error, KeyboardInterrupt):
            state = "stopped"
        elif error is not None:
            state = "failed"
            told = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        self._write(state=state, error=told, ended=time.time(), doing=None)

    def _write(self, **news: Any) -> None:
        self._facts |= news
        layout.store(self.folder / JOB, self._facts)


def begin(kind: str, folder: str | Path | None = None) -> Work:
    """Start to measure: in the folder that is given, in the one that the page has made, or in a new one.

    A polite kill then ends the process as Ctrl+C does, so that what was measured so far is kept.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)
    given = folder or os.environ.pop(FOLDER, None)
    return Work(Path(given) if given else new(kind), kind)


def asked_by_page() -> bool:
    """Whether the page waits for this process' result."""
    return FOLDER in os.environ


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


# ---- for everyone else


def home() -> Path:
    """Where the folders are."""
    return registry.home() / "lab"


def new(kind: str) -> Path:
    """A new folder; the oldest ones go."""
    for old in all_jobs()[KEPT - 1 :]:
        if not old.active:
            shutil.rmtree(old.folder, ignore_errors=True)
    folder = home() / layout.new_id(kind)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror or error}): set KOHYA_HOME to a folder of yours"
        ) from error
    return folder


def all_jobs() -> list[Job]:
    """Every measurement that is kept, the newest first."""
    found = [at(path.parent) for path in home().glob(f"*/{JOB}")]
    return sorted(found, key=lambda job: job.facts.get("started", 0), reverse=True)


def newest(kind: str = "") -> Job | None:
    """The last measurement, of one kind or of all."""
    return next((job for job in all_jobs() if not kind or job.kind == kind), None)


def find(job_id: str) -> Job:
    """One measurement by its id. Raises KeyError when there is none."""
    if layout.is_id(job_id) and (home() / job_id / JOB).is_file():
        return at(home() / job_id)
    raise KeyError(f"No measurement is called {job_id!r}.")


def at(folder: Path) -> Job:
    """The measurement in this folder. One whose process is gone without a word is told so."""
    facts = layout.load(folder / JOB)
    if facts.get("state") == "running" and not _lives(facts):
        facts = layout.load(folder / JOB)  # it may have ended well between the two looks
        if facts.get("state") == "running":
            ended = {"state": "failed", "error": "It ended without a word; the log may say why.", "doing": None}
            facts |= ended | {"ended": time.time()}
            layout.store(folder / JOB, facts)
    return Job(folder, facts)


def start(kind: str, arguments: Sequence[str]) -> Job:
    """Run `kohya <arguments>` in a process of its own, with a folder for what comes of it; for the page.

    Raises ConfigError while another measurement or a training is at work, for both would be slower than they are.
    """
    if busy := next((job for job in all_jobs() if job.active), None):
        raise ConfigError(f"{busy.kind} is still running: stop it, or wait until it has ended")
    if kind != "doctor" and (training := reader.active()):
        raise ConfigError(f"{training.id} is training, and both would slow each other down: wait until it has ended")
    folder = new(kind)
    facts = {"id": folder.name, "kind": kind, "state": "running", "started": time.time(), "asked": list(arguments)}
    layout.store(folder / JOB, facts)
    environment, root = {**os.environ, FOLDER: str(folder)}, Path(__file__).resolve().parents[2]
    try:
        child = launching.detached(command(arguments), folder / LOG, environment, str(root))
    except OSError as error:
        raise ConfigError(f"{kind} could not be started: {error.strerror or error}") from error
    with contextlib.suppress(psutil.Error):  # it has ended already, and has written down how
        # The process writes this file too, but not before Python has loaded.
        layout.store(folder / JOB, {**facts, **process.identity(child.pid)})
    return at(folder)


def command(arguments: Sequence[str]) -> list[str]:
    """What runs `kohya <arguments>` with this Python."""
    return [sys.executable, "-m", "kohya_gui.cli", *arguments]


def stop(job: Job) -> Job:
    """End a measurement; what it has measured so far is kept."""
    if not job.active:
        return job
    if living := process.find(dict(job.facts)):
        process.end([living])
    facts = layout.load(job.folder / JOB)
    if facts.get("state") in ("running", "failed"):
        layout.store(job.folder / JOB, facts | {"state": "stopped", "error": "", "ended": time.time(), "doing": None})
    return at(job.folder)


def tail(job: Job, most: int = 20_000) -> str:
    """The end of what the process has printed."""
    with contextlib.suppress(OSError), (job.folder / LOG).open("rb") as log:
        log.seek(max(0, (job.folder / LOG).stat().st_size - most))
        return log.read().decode("utf-8", "replace")
    return ""


def write(path: Path, text: str) -> Path:
    """Write a file of a measurement."""
    return write_atomic(path, text)


def _lives(facts: Mapping[str, Any]) -> bool:
    if "pid" not in facts:  # the process has yet to say who it is
        return time.time() - facts.get("started", 0) < PATIENCE
    return process.alive(dict(facts))
