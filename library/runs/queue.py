"""The queue of trainings: one file that any number of browsers may change, and a worker process that starts its
entries.

`<home>/queue/queue.json` lists the entries in order; beside it are their configs, without tokens (see `keys`),
and copies of the prompt and data set files that they name. Writers of the file hold its lock. The page shows the file
and keeps no state of its own.
"""

import contextlib
import copy
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import read_outside_text
from library.config.problems import ConfigError, Message, MessageLike, Problem, counted
from library.files import remove, write_atomic
from library.runs import gpu_slots, job_files, layout, locking, process, reader, registry, resume, start

RUNNER = [sys.executable, "-m", "library.runs.worker"]
PROJECT_ROOT = Path(__file__).resolve().parents[2]
LOCK_TIMEOUT = 10.0  # seconds to wait for the file's lock
WORKER_START_TIMEOUT = 10.0  # seconds until a started worker must have recorded itself
BY_USER = "by you"  # reason of a requested pause
MAX_WAITING = 500  # maximum waiting entries
MAX_FINISHED_SHOWN = 50  # finished entries to keep
MAX_REMOVED = 20  # removed entries that can be restored
GONE, BUSY = "gone", "busy"  # codes of problems: no such entry or run; it is in another state
SHARED_WITH_JOB = ("script", "title", "name", "output", "how", "folder", "resumes", "preset")  # fields of an entry


@dataclass(frozen=True)
class Estimate:
    """The check's estimate of a training; 0 if unknown."""

    steps: int = 0
    step_seconds: float = 0.0
    memory: float = 0.0  # GiB of GPU memory


@dataclass
class QueueEntry:
    """One training that waits, is active or has ended."""

    id: str
    script: str
    title: str
    name: str
    output: str
    how: JsonObject = field(default_factory=dict)
    folder: str = ""
    resumes: str = ""
    preset: str = ""
    added: float = 0.0
    run: str = ""  # the run's id, once started
    ended: str = ""  # a run's final state, or "failed" if it could not start
    error: MessageLike = ""  # why it could not start
    steps: int = 0  # these three as in Estimate
    step_seconds: float = 0.0
    memory: float = 0.0
    was_at: int = 0  # its index among all entries when it was removed

    @property
    def waits(self) -> bool:
        return not self.run and not self.ended


@dataclass
class Queue:
    """All entries in their order, and the state of the worker."""

    entries: list[QueueEntry] = field(default_factory=list)
    paused: MessageLike = ""  # why nothing is started, "" if not paused
    go_on: bool = True  # continue with the next entry after a failure
    worker: JsonObject = field(default_factory=dict)  # the worker process
    called: float = 0.0  # last start of the worker process
    removed: list[QueueEntry] = field(default_factory=list)  # restorable entries, the last removed last

    @property
    def waiting(self) -> list[QueueEntry]:
        return [entry for entry in self.entries if entry.waits]

    @property
    def is_worked(self) -> bool:
        called = 0 <= time.time() - self.called < WORKER_START_TIMEOUT
        return process.alive(self.worker) if self.worker else called

    @property
    def halted(self) -> bool:
        return bool(self.waiting) and not self.paused and not self.is_worked

    def find(self, entry_id: str) -> QueueEntry:
        """Return an entry by its id. Raises ConfigError if another browser has removed it."""
        for entry in self.entries:
            if entry.id == entry_id:
                return entry
        raise ConfigError(Problem("", "This training is not in the queue any more.", code=GONE))


def queue_folder() -> Path:
    return registry.data_folder() / "queue"


def read_queue() -> Queue:
    # The file is parsed only after a change, as the page asks every second.
    return _queue(layout.load_changed(str(queue_folder() / "queue.json")))


def _queue(content: JsonMapping) -> Queue:
    """Return the queue of a file's content, sharing no objects with it."""
    content = copy.deepcopy(content)
    worker, paused, called = content.get("worker"), content.get("paused"), content.get("called")
    return Queue(
        _entries(content.get("entries")),
        paused if isinstance(paused, str | Message) else "",
        bool(content.get("go_on", True)),
        worker if isinstance(worker, dict) else {},
        float(called or 0.0) if _is_of("called", called) else 0.0,
        _entries(content.get("removed")),
    )


def _entries(stored: Any) -> list[QueueEntry]:
    """Return the valid entries of a list in a file, which somebody may have edited."""
    names = {f.name for f in fields(QueueEntry)}
    required = {f.name for f in fields(QueueEntry) if f.default is MISSING and f.default_factory is MISSING}
    return [
        QueueEntry(**{name: entry[name] for name in names & entry.keys()})
        for entry in (stored if isinstance(stored, list) else ())
        if isinstance(entry, dict) and layout.is_run_id(entry.get("id"))
        if required <= entry.keys() and all(_is_of(name, entry[name]) for name in names & entry.keys())
    ]


def _is_of(name: str, value: Any) -> bool:
    """Return whether a stored value has its field's type."""
    if name in ("added", "called", "steps", "step_seconds", "memory", "was_at"):
        return isinstance(value, layout.NUMBER) and math.isfinite(value)
    return isinstance(value, dict if name == "how" else (str, Message) if name == "error" else str)


@contextlib.contextmanager
def changing() -> Iterator[Queue]:
    """Yield the queue for changes and write it back; the lock keeps others out meanwhile."""
    with locking.hold_lock(queue_folder() / "queue.lock", LOCK_TIMEOUT) as is_held:
        if not is_held:
            raise ConfigError("Another program is changing the queue: try again in a moment.")
        queue = _queue(layout.load_facts(queue_folder() / "queue.json"))
        unchanged = asdict(queue)
        yield queue
        if asdict(queue) != unchanged:
            layout.store(queue_folder() / "queue.json", asdict(queue))


@contextlib.contextmanager
def _adding() -> Iterator[Queue]:
    """Yield the queue for another entry that waits, and start the worker unless the queue was halted before."""
    with changing() as queue:
        halted = queue.halted
        yield queue
    if not halted:
        work()


def add_to_queue(job: start.TrainingJob, first: bool = False, estimate: Estimate | None = None) -> QueueEntry:
    """Append a job to the queue (or put it first) with copies of its files, and start the worker unless the queue is
    halted.
    """
    about = {name: getattr(job, name) for name in SHARED_WITH_JOB}
    entry = QueueEntry(_new_id(), added=time.time(), **about, **asdict(estimate or Estimate()))
    with _adding() as queue:
        _refuse_more(queue)
        if twin := twin_problem(queue, entry.output, entry.name):
            raise ConfigError(twin)
        job_files.copy_files(job_files.named_files(job), queue_folder() / entry.id)
        write_atomic(_entry_toml(entry), job.toml)
        waiting = queue.waiting
        queue.entries.insert(queue.entries.index(waiting[0]) if first and waiting else len(queue.entries), entry)
        _forget_old(queue)
    return entry


def _new_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def _refuse_more(queue: Queue) -> None:
    if len(queue.waiting) >= MAX_WAITING:
        template = "{most} trainings wait already: let some of them run first."
        raise ConfigError(Problem("", template, most=MAX_WAITING, code=BUSY))


def twin_problem(queue: Queue, output: str, name: str) -> Problem | None:
    """Return the problem of a training that would write the same files as a waiting one."""
    if all((entry.output, entry.name) != (output, name) for entry in queue.waiting):
        return None
    return Problem("output_name", ": {name} waits in the queue for the same folder; choose another name.", name=name)


def duplicate(entry_id: str) -> QueueEntry:
    """Add a copy of an entry, whatever its state, with an unused output name."""
    with _adding() as queue:
        _refuse_more(queue)
        entry = queue.find(entry_id)
        job = job_of_entry(entry)
        name = job_files.free_name(
            entry.name, entry.output, {e.name for e in queue.entries if e.output == entry.output}
        )
        double = replace(entry, id=_new_id(), name=name, added=time.time(), run="", ended="", error="", resumes="")
        job_files.copy_files(job.files, queue_folder() / double.id)
        write_atomic(_entry_toml(double), job_files.with_options(job.toml, {"output_name": name}))
        queue.entries.insert(queue.entries.index(entry) + 1 if entry.waits else len(queue.entries), double)
    return double


def job_of_entry(entry: QueueEntry) -> start.TrainingJob:
    """Return the job of an entry. Raises ConfigError if its config is gone."""
    try:
        toml = read_outside_text(_entry_toml(entry))
    except ConfigError:
        raise ConfigError(
            "The config of {name} is gone from {folder}: add it again.", name=entry.name, folder=queue_folder()
        ) from None
    about = {name: getattr(entry, name) for name in SHARED_WITH_JOB}
    files = job_files.copied_files(queue_folder() / entry.id)
    return start.TrainingJob(toml=toml, queued=entry.id, files=files, **about)


def remove_entry(entry_id: str) -> QueueEntry:
    """Remove an entry, which can be restored; an active training continues."""
    with changing() as queue:
        entry = queue.find(entry_id)
        entry.was_at = queue.entries.index(entry)
        queue.entries.remove(entry)
        queue.removed.append(entry)
        for forgotten in queue.removed[:-MAX_REMOVED]:
            queue.removed.remove(forgotten)
            forget_config(forgotten)
    return entry


def refuse_active(entry: QueueEntry) -> None:
    """Raise ConfigError for an entry whose run is active."""
    if state_of(entry)[0] in layout.ACTIVE:
        raise ConfigError(Problem("", "{name} is running: stop it first.", name=entry.name, code=BUSY))


def restore(entry_id: str) -> QueueEntry:
    """Put a removed entry back in its place. Raises ConfigError if it is forgotten, or its name was taken since."""
    with _adding() as queue:
        entry = next((entry for entry in queue.removed if entry.id == entry_id), None)
        if entry is None:
            raise ConfigError(Problem("", "This training is not in the queue any more.", code=GONE))
        if entry.waits and (twin := twin_problem(queue, entry.output, entry.name)):
            raise ConfigError(twin)
        queue.removed.remove(entry)
        queue.entries.insert(min(entry.was_at, len(queue.entries)), entry)
    return entry


def move_to(entry_id: str, place: int) -> None:
    """Move a waiting entry to a place among the waiting ones, 0 for the first; beyond the last it becomes the last."""
    _move(entry_id, lambda waiting, entry: min(max(0, place), len(waiting) - 1))


def move(entry_id: str, by: int) -> None:
    """Move a waiting entry among the waiting ones: by -1 sooner, by 1 later; no wrap-around."""
    _move(entry_id, lambda waiting, entry: waiting.index(entry) + by)


def _move(entry_id: str, to: Callable[[list[QueueEntry], QueueEntry], int]) -> None:
    with changing() as queue:
        entry, waiting = queue.find(entry_id), queue.waiting
        if entry not in waiting:
            template = "{name} does not wait any more, so it cannot be moved."
            raise ConfigError(Problem("", template, name=entry.name, code=BUSY))
        if 0 <= (place := to(waiting, entry)) < len(waiting):
            other = queue.entries.index(waiting[place])
            queue.entries.remove(entry)
            queue.entries.insert(other, entry)


def clear() -> None:
    """Remove all ended entries."""
    with changing() as queue:
        for entry in [e for e in queue.entries if state_of(e)[0] in layout.FINAL]:
            queue.entries.remove(entry)
            forget_config(entry)


def pause() -> None:
    with changing() as queue:
        queue.paused = BY_USER


def go_on() -> None:
    """Continue after a pause or a reboot."""
    with changing() as queue:
        queue.paused = ""
        for entry in queue.entries:  # failures while no worker ran do not pause the queue
            state = state_of(entry)[0]
            entry.ended = entry.ended or (state if state in layout.FINAL else "")
    work()


def after_failure(go_on: bool) -> None:
    with changing() as queue:
        queue.go_on = go_on


def state_of(entry: QueueEntry) -> tuple[str, MessageLike]:
    """Return the state of an entry, "waiting" or a run's state, and why it failed."""
    if entry.run:
        try:
            run = reader.find_run(entry.run)
        except KeyError:
            return entry.ended or "interrupted", "The folder of its run is gone."
        return run.state, run.error or ""
    return entry.ended or "waiting", entry.error


def queued_sentence(entry: QueueEntry) -> Message:
    """Return the sentence about an entry that was just added."""
    queue = read_queue()
    earlier = [e for e in queue.waiting if e.added < entry.added]
    if queue.paused or queue.halted:
        return Message("{name} is in the queue, which is paused: press Continue in the Runs tab.", name=entry.name)
    template = "{name} is in the queue and starts as soon as there is room. It needs neither the page nor a shell."
    if earlier:
        template = "{name} is in the queue and starts after {others}. It needs neither the page nor a shell."
    return Message(template, name=entry.name, others=counted(len(earlier), "other"))


def work() -> None:
    """Start the worker if none runs. Of two started at once, the one that gets the lock stays."""
    with changing() as queue:
        if not queue.waiting or queue.paused or queue.is_worked:
            return
        queue.called, queue.worker = time.time(), {}
        start.detached(RUNNER, queue_folder() / "worker.txt", os.environ, str(PROJECT_ROOT))


def starts_next(run: reader.RecordedRun) -> QueueEntry | None:
    """Return the entry that starts when this active run has ended, if any."""
    queue = read_queue()
    if queue.paused or queue.halted or not run.is_here:
        return None
    others = [other.facts for other in reader.runs() if other.active and other.is_here and other.id != run.id]
    free = gpu_slots.free_devices(others)
    return next((entry for entry in queue.waiting if gpu_slots.has_room(entry.how, free)), None)


def can_resume(run: reader.RecordedRun, other_runs: Iterable[reader.RecordedRun]) -> bool:
    """Return whether a run has ended unfinished, and neither a run nor an entry resumes it."""
    return resume.is_wanted(run, other_runs) and all(entry.resumes != run.id for entry in read_queue().waiting)


def forget_config(entry: QueueEntry) -> None:
    """Delete the config and the files of an entry that has left the queue."""
    with contextlib.suppress(OSError):  # locked for long by another program; nothing reads it any more
        remove(_entry_toml(entry))
    shutil.rmtree(queue_folder() / entry.id, ignore_errors=True)


def _forget_old(queue: Queue) -> None:
    ended = [entry for entry in queue.entries if entry.ended]
    for entry in ended[: max(0, len(ended) - MAX_FINISHED_SHOWN)]:
        queue.entries.remove(entry)
        forget_config(entry)


def _entry_toml(entry: QueueEntry) -> Path:
    return queue_folder() / f"{entry.id}.toml"
