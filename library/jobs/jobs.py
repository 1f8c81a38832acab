"""Commands that the page runs as separate processes: measurements, tools, captioning, probes.

Each has a folder `<user data>/jobs/<kind>-<time>-<hex>/`: job.json (its kind and state), launcher.json (its
process, until it records itself), log.txt (its output), result.json (its result so far), `stop` if it should stop, and
whatever the command adds. The process writes them (work.py), page and shell read them, so a job survives the page and
is found again. Loads no torch.
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

from library.config.command import PROJECT_ROOT
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError
from library.files import write_atomic
from library.runs import layout, process, reader, registry, start

JOB, RESULT, STOP = "job.json", "result.json", "stop"
JOB_FOLDER_VARIABLE = "KOHYA_JOB_DIR"  # environment variable: the folder of this process' job
MAX_FOLDERS_PER_KIND = 12  # folders to keep per kind, as a trace can take a hundred megabytes
LAUNCH_TIMEOUT = 20.0  # seconds until a process' launcher must be on record
GONE = "It ended without a message."


# Files outlive both sides, so a job continues without the page and is found again.
# Why: docs/decisions/2026-11-20-background-jobs-talk-through-files.md
class BackgroundJob(reader.ProcessFolder):
    """A job in its current state; it is never "starting", as its process begins at once."""

    @property
    def kind(self) -> str:
        return str(self.facts.get("kind", ""))  # doctor, bench, profile, cache, tools, caption or probe

    @property
    def started(self) -> float:
        return float(self.facts.get("started", 0.0))

    @property
    def error(self) -> str:
        return self.facts.get("error") or ""

    @property
    def doing(self) -> JsonMapping:
        return self.facts.get("doing") or {}

    @property
    def result(self) -> JsonObject:
        return layout.load_facts(self.folder / RESULT)

    @property
    def log(self) -> str:
        return self.log_end.text

    @property
    def log_end(self) -> reader.LogEnd:
        return reader.log_end(self.folder)


def jobs_folder() -> Path:
    return registry.data_folder() / "jobs"


def jobs_of_kinds(*kinds: str) -> list[BackgroundJob]:
    jobs = [job_at(path.parent) for kind in kinds for path in jobs_folder().glob(f"{kind}-*/{JOB}")]
    return sorted(jobs, key=lambda job: job.started, reverse=True)


def find_job(job_id: Any) -> BackgroundJob:
    """Return one job by its id. Raises ConfigError if there is none."""
    if layout.is_run_id(job_id) and (jobs_folder() / job_id / JOB).is_file():
        return job_at(jobs_folder() / job_id)
    raise ConfigError("This no longer exists: load the page again.")


def job_at(folder: Path) -> BackgroundJob:
    """Return the job in this folder. If its process has ended without a result, mark it as failed."""
    facts, stop_requested = layout.load_facts(folder / JOB), (folder / STOP).exists()
    if facts.get("state") == "running" and not _lives(folder, facts):
        facts = layout.load_facts(folder / JOB)  # it may have ended normally between both reads
        if facts.get("state") == "running":
            ended = {"state": "stopped", "error": ""} if stop_requested else {"state": "interrupted", "error": GONE}
            facts |= {**ended, "ended": time.time(), "doing": None}
            layout.store(folder / JOB, facts)
    if facts.get("state") == "running" and stop_requested:
        facts = {**facts, "state": "stopping"}
    return BackgroundJob(folder, facts)


def _lives(folder: Path, facts: JsonMapping) -> bool:
    if identity := _identity(folder, facts):
        return process.alive(identity)
    return time.time() - facts.get("started", 0) < LAUNCH_TIMEOUT  # it may just be starting


def _identity(folder: Path, facts: JsonMapping) -> JsonObject:
    # The process records itself once it runs; until then only the launcher's record exists.
    return dict(facts) if "pid" in facts else layout.load_facts(folder / layout.LAUNCHER)


def new(kind: str) -> Path:
    """Create a folder; delete the oldest ones of this kind."""
    for old in jobs_of_kinds(kind)[MAX_FOLDERS_PER_KIND - 1 :]:
        if not old.active:
            shutil.rmtree(old.folder, ignore_errors=True)
    folder = jobs_folder() / layout.new_id(kind)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            "{folder} cannot be written ({why}): set KOHYA_HOME to a folder of yours",
            folder=folder,
            why=error.strerror or error,
        ) from error
    return folder


def start_job(
    kind: str, arguments: Sequence[str], folder: Path | None = None, environment: Mapping[str, str] = os.environ
) -> BackgroundJob:
    """Run `kohya <arguments>` as a separate process, in a folder created by `new`."""
    folder = folder or new(kind)
    facts = {"kind": kind, "state": "running", "started": time.time(), "arguments": list(arguments)}
    layout.store(folder / JOB, facts)
    child_environment = {**environment, JOB_FOLDER_VARIABLE: str(folder)}
    try:
        child = start.detached(job_command(arguments), folder / layout.LOG, child_environment, str(PROJECT_ROOT))
    except OSError as error:
        layout.store(folder / JOB, {**facts, "state": "failed", "error": str(error)})
        raise ConfigError("{kind} could not be started: {why}", kind=kind, why=error.strerror or error) from error
    with contextlib.suppress(psutil.Error):  # it has already ended and recorded how
        layout.store(folder / layout.LAUNCHER, process.identity(child.pid))
    return job_at(folder)


def job_command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "library.cli.main", *arguments]


def stop_job(job: BackgroundJob, at_once: bool = False) -> BackgroundJob:
    """Request a job to stop at its next step; the second request, or `at_once`, ends it. Its results so far
    are kept.
    """
    if not job.active:
        return job
    if at_once or job.state == "stopping":
        if living := process.find_process(_identity(job.folder, job.facts)):
            process.end([living])
        facts = layout.load_facts(job.folder / JOB)
        if facts.get("state") != "finished":  # overrides any other state that the process recorded
            ended = {"state": "stopped", "error": "", "ended": time.time(), "doing": None}
            layout.store(job.folder / JOB, {**facts, **ended})
    write_atomic(job.folder / STOP, "")
    return job_at(job.folder)
