"""The queue of trainings: one file that any number of browsers may change, and a worker process that starts its
entries.

`<home>/queue/queue.json` lists what waits in order; beside it are the entries' configs, without tokens (see `keys`).
Writers of the file hold its lock. The page shows the file and keeps no state of its own.
"""

import contextlib
import copy
import os
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Problem, counted
from library.files import write_atomic
from library.runs import layout, locking, process, reader, registry, start

RUNNER = [sys.executable, "-m", "library.runs.worker"]
PROJECT_ROOT = Path(__file__).resolve().parents[2]
LOCK_TIMEOUT = 10.0  # seconds to wait for the file's lock
WORKER_START_TIMEOUT = 10.0  # seconds until a started worker must have recorded itself
BY_USER = "by you"  # reason of a requested pause
MAX_WAITING = 500  # maximum waiting entries
MAX_FINISHED_SHOWN = 50  # finished entries to keep


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
    added: float = 0.0
    run: str = ""  # the run's id, once started
    ended: str = ""  # a run's final state, or "failed" if it could not start
    error: MessageLike = ""  # why it could not start

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
        raise ConfigError("This training is not in the queue any more.")


def queue_folder() -> Path:
    return registry.data_folder() / "queue"


def read_queue() -> Queue:
    # The file is parsed only after a change, as the page asks every second.
    return _queue(layout.load_changed(str(queue_folder() / "queue.json")))


def _queue(content: JsonMapping) -> Queue:
    """Return the queue of a file's content, sharing no objects with it."""
    content = copy.deepcopy(content)
    field_names = {f.name for f in fields(QueueEntry)}
    valid_entries = [
        entry for entry in content.get("entries") or [] if isinstance(entry, dict) and layout.is_run_id(entry.get("id"))
    ]
    entries = [QueueEntry(**{name: entry[name] for name in field_names & entry.keys()}) for entry in valid_entries]
    worker = content.get("worker")
    return Queue(
        entries,
        content.get("paused") or "",
        bool(content.get("go_on", True)),
        worker if isinstance(worker, dict) else {},
        float(content.get("called") or 0.0),
    )


@contextlib.contextmanager
def changing() -> Iterator[Queue]:
    """Yield the queue for changes and write it back; the lock keeps others out meanwhile."""
    with locking.hold_lock(queue_folder() / "queue.lock", LOCK_TIMEOUT) as is_held:
        if not is_held:
            raise ConfigError("The queue is being changed by another program: try again in a moment.")
        queue = _queue(layout.load_facts(queue_folder() / "queue.json"))
        unchanged = asdict(queue)
        yield queue
        if asdict(queue) != unchanged:
            layout.store(queue_folder() / "queue.json", asdict(queue))


def add_to_queue(job: start.TrainingJob, first: bool = False) -> QueueEntry:
    """Append a job to the queue (or put it first), and start the worker unless the queue is halted."""
    entry = QueueEntry(
        f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
        job.script,
        job.title,
        job.name,
        job.output,
        dict(job.how),
        job.folder,
        job.resumes,
        time.time(),
    )
    with changing() as queue:
        if len(queue.waiting) >= MAX_WAITING:
            raise ConfigError("{most} trainings wait already: let some of them run first.", most=MAX_WAITING)
        if twin := twin_problem(queue, entry.output, entry.name):
            raise ConfigError(twin)
        halted = queue.halted
        write_atomic(_entry_toml(entry), job.toml)
        waiting = queue.waiting
        queue.entries.insert(queue.entries.index(waiting[0]) if first and waiting else len(queue.entries), entry)
        _forget_old(queue)
    if not halted:
        work()
    return entry


def twin_problem(queue: Queue, output: str, name: str) -> Problem | None:
    """Return the problem of a training that would write the same files as a waiting one."""
    if all((entry.output, entry.name) != (output, name) for entry in queue.waiting):
        return None
    return Problem("output_name", ": {name} waits in the queue for the same folder; choose another name.", name=name)


def job_of_entry(entry: QueueEntry) -> start.TrainingJob:
    """Return the job of an entry. Raises ConfigError if its config is gone."""
    try:
        toml = _entry_toml(entry).read_text(encoding="utf-8")
    except OSError:
        raise ConfigError(
            "The config of {name} is gone from {folder}: add it again.", name=entry.name, folder=queue_folder()
        ) from None
    return start.TrainingJob(
        entry.script, entry.title, entry.name, entry.output, toml, entry.how, {}, entry.folder, entry.resumes, entry.id
    )


def remove_entry(entry_id: str) -> None:
    """Remove an entry; an active training continues."""
    with changing() as queue:
        entry = queue.find(entry_id)
        queue.entries.remove(entry)
        forget_config(entry)


def move(entry_id: str, by: int) -> None:
    """Move a waiting entry among the waiting ones: by -1 sooner, by 1 later; no wrap-around."""
    with changing() as queue:
        entry, waiting = queue.find(entry_id), queue.waiting
        if entry not in waiting:
            raise ConfigError("{name} does not wait any more, so it cannot be moved.", name=entry.name)
        to = waiting.index(entry) + by
        if 0 <= to < len(waiting):
            other = queue.entries.index(waiting[to])
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
    """Describe what happened to a just added entry."""
    queue = read_queue()
    earlier = [e for e in queue.waiting if e.added < entry.added]
    if queue.paused or queue.halted:
        return Message("{name} is in the queue, which is paused: press Continue in the Queue tab.", name=entry.name)
    template = "{name} is in the queue and starts as soon as there is room. It does not need this page to be open."
    if earlier:
        template = "{name} is in the queue and starts after {others}. It does not need this page to be open."
    return Message(template, name=entry.name, others=counted(len(earlier), "other"))


def work() -> None:
    """Start the worker if none runs. Of two started at once, the one that gets the lock stays."""
    with changing() as queue:
        if not queue.waiting or queue.paused or queue.is_worked:
            return
        queue.called, queue.worker = time.time(), {}
        start.detached(RUNNER, queue_folder() / "worker.txt", os.environ, str(PROJECT_ROOT))


def forget_config(entry: QueueEntry) -> None:
    _entry_toml(entry).unlink(missing_ok=True)


def _forget_old(queue: Queue) -> None:
    ended = [entry for entry in queue.entries if entry.ended]
    for entry in ended[: max(0, len(ended) - MAX_FINISHED_SHOWN)]:
        queue.entries.remove(entry)
        forget_config(entry)


def _entry_toml(entry: QueueEntry) -> Path:
    return queue_folder() / f"{entry.id}.toml"
