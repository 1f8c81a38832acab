"""Commands that the page runs as processes of their own: measurements, tools, captioning, probes.

Each has a folder `<user data>/jobs/<kind>-<time>-<hex>/`: job.json (what it is and how it stands), launcher.json (which
process it is, until that says so itself), log.txt (what it says), result.json (what came of it so far), `stop` when it
was asked to stop, and whatever the command adds. The process writes them (work.py), the page and the shell read, so a
job goes on when the page is closed, and is found again. No torch in here.
"""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from library.config.command import ROOT
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError
from library.files import write_atomic
from library.runs import layout, process, reader, registry
from library.runs import start as launching

JOB, RESULT, STOP = "job.json", "result.json", "stop"
FOLDER = "KOHYA_JOB_DIR"  # in the environment: the folder of the job that this process is
KEPT = 12  # folders of each kind that are kept; a trace can have a hundred megabytes
PATIENCE = 20.0  # seconds that a process may take until its launcher is on record
GONE = "It ended without a message."


# Why: docs/decisions/2026-11-20-background-jobs-talk-through-files.md
class BackgroundJob(reader.ProcessFolder):
    """A job in its present state; it is never "starting", as its process begins at once."""

    @property
    def kind(self) -> str:
        """What it is: doctor, bench, profile, cache, tools, caption or probe."""
        return str(self.facts.get("kind", ""))

    @property
    def started(self) -> float:
        """When it began."""
        return float(self.facts.get("started", 0.0))

    @property
    def error(self) -> str:
        """Why it failed, when it did."""
        return self.facts.get("error") or ""

    @property
    def doing(self) -> JsonMapping:
        """What it does now: text, done and total; empty when it says nothing of that."""
        return self.facts.get("doing") or {}

    @property
    def result(self) -> JsonObject:
        """What came of it so far."""
        return layout.load(self.folder / RESULT)

    @property
    def log(self) -> str:
        """The end of what it has said."""
        return reader.tail(self.folder)


def root() -> Path:
    """The folder of all jobs."""
    return registry.data_folder() / "jobs"


def every(*kinds: str) -> list[BackgroundJob]:
    """The jobs of these kinds that are kept, the newest first."""
    found = [at(path.parent) for kind in kinds for path in root().glob(f"{kind}-*/{JOB}")]
    return sorted(found, key=lambda job: job.started, reverse=True)


def find(job_id: Any) -> BackgroundJob:
    """One job by its id. Raises ConfigError when there is none."""
    if layout.is_id(job_id) and (root() / job_id / JOB).is_file():
        return at(root() / job_id)
    raise ConfigError("This is not there any more: load the page again.")


def at(folder: Path) -> BackgroundJob:
    """The job in this folder. One whose process has ended without recording a result is marked as failed."""
    facts, asked = layout.load(folder / JOB), (folder / STOP).exists()
    if facts.get("state") == "running" and not _lives(folder, facts):
        facts = layout.load(folder / JOB)  # it may have ended normally between the two reads
        if facts.get("state") == "running":
            ended = {"state": "stopped", "error": ""} if asked else {"state": "interrupted", "error": GONE}
            facts |= {**ended, "ended": time.time(), "doing": None}
            layout.store(folder / JOB, facts)
    if facts.get("state") == "running" and asked:
        facts = {**facts, "state": "stopping"}
    return BackgroundJob(folder, facts)


def _lives(folder: Path, facts: JsonMapping) -> bool:
    if known := _identity(folder, facts):
        return process.alive(known)
    return time.time() - facts.get("started", 0) < PATIENCE  # it is being started at this moment


def _identity(folder: Path, facts: JsonMapping) -> JsonObject:
    """The process as it has recorded itself, or before that as its launcher has."""
    return dict(facts) if "pid" in facts else layout.load(folder / layout.LAUNCHER)


def new(kind: str) -> Path:
    """A new folder; the oldest ones of this kind go."""
    for old in every(kind)[KEPT - 1 :]:
        if not old.active:
            shutil.rmtree(old.folder, ignore_errors=True)
    folder = root() / layout.new_id(kind)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            "{folder} cannot be written ({why}): set KOHYA_HOME to a folder of yours",
            folder=folder,
            why=error.strerror or error,
        ) from error
    return folder


def start(
    kind: str, arguments: Sequence[str], folder: Path | None = None, environment: Mapping[str, str] = os.environ
) -> BackgroundJob:
    """Run `kohya <arguments>` as a process of its own, in a folder that `new` has made."""
    folder = folder or new(kind)
    facts = {"kind": kind, "state": "running", "started": time.time(), "arguments": list(arguments)}
    layout.store(folder / JOB, facts)
    given = {**environment, FOLDER: str(folder)}
    try:
        child = launching.detached(command(arguments), folder / layout.LOG, given, str(ROOT))
    except OSError as error:
        layout.store(folder / JOB, {**facts, "state": "failed", "error": str(error)})
        raise ConfigError("{kind} could not be started: {why}", kind=kind, why=error.strerror or error) from error
    with contextlib.suppress(psutil.Error):  # it has ended already and recorded how
        layout.store(folder / layout.LAUNCHER, process.identity(child.pid))
    return at(folder)


def command(arguments: Sequence[str]) -> list[str]:
    """What runs `kohya <arguments>` with this Python."""
    return [sys.executable, "-m", "library.cli.main", *arguments]


def stop(job: BackgroundJob, at_once: bool = False) -> BackgroundJob:
    """Ask a job to stop at its next step; asked again, or with `at_once`, end it. Its results so far are kept."""
    if not job.active:
        return job
    if at_once or job.state == "stopping":
        if living := process.find(_identity(job.folder, job.facts)):
            process.end([living])
        facts = layout.load(job.folder / JOB)
        if facts.get("state") != "finished":  # whatever state the ended process has recorded
            ended = {"state": "stopped", "error": "", "ended": time.time(), "doing": None}
            layout.store(job.folder / JOB, {**facts, **ended})
    write_atomic(job.folder / STOP, "")
    return at(job.folder)
