"""Commands that the page runs as processes of their own: tools for LoRA files, and captioning.

Each has a folder `<user data>/jobs/<id>/`: job.json (what was asked), progress.json (how far it is), log.txt (what it
says), end.json (its exit code), and `stop` when it was asked to stop. The page only reads and writes these files, so a
job goes on when the page is closed, and is found again. No torch in here; `run.py` is the process itself.
"""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from library.config.schema import ConfigError
from library.files import write_atomic
from library.runs import layout, process, registry, start

JOB, PROGRESS, LOG, END, STOP = "job.json", "progress.json", "log.txt", "end.json", "stop"
FOLDER = "KOHYA_WORK_DIR"  # in the environment: the folder of the job that this process is
STOPPED = 130  # the exit code
KEPT = 30
TAIL = 60_000  # bytes of a log that are read


@dataclass(frozen=True)
class Job:
    """A job as it stands."""

    id: str
    command: tuple[str, ...]
    state: str  # running, stopping, finished, failed, stopped, interrupted
    started: float
    phase: str
    done: int
    total: int
    log: str


def begin(command: Sequence[str], name: str) -> str:
    """Start `kohya COMMAND` (its first word is tools or caption) as a process of its own; the job's id."""
    _forget_old()
    folder = root() / layout.new_id(name)
    try:
        folder.mkdir(parents=True)
        layout.store(folder / JOB, {"command": list(command), "started": time.time()})
        environment = {**os.environ, FOLDER: str(folder), "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
        arguments = [sys.executable, "-m", "library.jobs.run", str(folder)]
        started = start.detached(arguments, folder / LOG, environment, str(Path(__file__).resolve().parents[2]))
        with contextlib.suppress(psutil.Error):  # it has ended already, and has written down how
            layout.store(folder / JOB, {**layout.load(folder / JOB), **process.identity(started.pid)})
    except OSError as error:
        raise ConfigError(f"this could not be started: {error}") from error
    return folder.name


def root() -> Path:
    """The folder of all jobs."""
    return registry.home() / "jobs"


def read(job_id: str) -> Job:
    """How a job stands. Raises ConfigError for one that is not known."""
    folder = _folder(job_id)
    facts, end, progress = (layout.load(folder / name) for name in (JOB, END, PROGRESS))
    if "code" in end:
        state = {0: "finished", STOPPED: "stopped"}.get(end["code"], "failed")
    elif not process.alive(facts):
        state = "stopped" if (folder / STOP).exists() else "interrupted"
    else:
        state = "stopping" if (folder / STOP).exists() else "running"
    done, total = int(progress.get("done", 0)), int(progress.get("total", 0))
    said, phase = _tail(folder / LOG), str(progress.get("phase", ""))
    return Job(folder.name, tuple(facts.get("command", ())), state, facts.get("started", 0.0), phase, done, total, said)


def stop(job_id: str) -> None:
    """Ask a job to stop at its next step; asked again, end it. Raises ConfigError for an unknown one."""
    folder = _folder(job_id)
    facts = layout.load(folder / JOB)
    if (folder / STOP).exists() and (found := process.find(facts)) is not None and not (folder / END).exists():
        process.end([found])
    write_atomic(folder / STOP, "")


def _folder(job_id: str) -> Path:
    folder = root() / job_id if layout.is_id(job_id) else root()
    if folder == root() or not (folder / JOB).is_file():
        raise ConfigError("this job is not known here any more")
    return folder


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _forget_old() -> None:
    """Keep the last jobs only: of those that have ended, the folders that were made first go."""
    try:
        folders = sorted(root().iterdir(), key=lambda folder: folder.stat().st_mtime)
    except OSError:
        return
    ended = [folder for folder in folders if (folder / END).exists() or not process.alive(layout.load(folder / JOB))]
    for folder in ended[: max(0, len(folders) - KEPT)]:
        shutil.rmtree(folder, ignore_errors=True)


def report_of(environment: Any = os.environ) -> Any:
    """The report of a job's process: writes how far it is, and ends it (KeyboardInterrupt) when it was asked to stop.

    None when this process is no job.
    """
    given = environment.get(FOLDER)
    if not given:
        return None
    folder, last = Path(given), [0.0, ""]

    def report(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - float(last[0]) < 0.2 and what == last[1] and done != total:
            return
        last[:] = [now, what]
        layout.store(folder / PROGRESS, {"phase": what, "done": done, "total": total})
        if (folder / STOP).exists():
            raise KeyboardInterrupt

    return report
