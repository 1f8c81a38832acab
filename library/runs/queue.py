"""The queue of trainings: one file that any number of browsers may change, and a worker process that starts its
entries.

`<home>/queue/queue.json` says what waits and in which order; beside it lies each entry's config, without tokens (see
`keys`). Whoever changes the file holds its lock. The page shows what the file says and keeps nothing itself.
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
ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 10.0  # seconds that another browser may hold the file
ARRIVAL = 10.0  # seconds until a worker that was started must have recorded itself
BY_USER = "by you"  # why it is paused, when it was told to
MOST = 500  # entries that may wait
KEPT = 50  # entries that have ended and are still shown


@dataclass
class QueueEntry:
    """One training that waits, works or has ended."""

    id: str
    script: str
    title: str
    name: str
    output: str
    how: JsonObject = field(default_factory=dict)
    folder: str = ""
    resumes: str = ""
    added: float = 0.0
    run: str = ""  # the run's id, once it was started
    ended: str = ""  # how it ended: a run's final state, or "failed" where it could not even begin
    error: MessageLike = ""  # why it could not begin

    @property
    def waits(self) -> bool:
        """Whether it was not started yet."""
        return not self.run and not self.ended


@dataclass
class Queue:
    """All entries in their order, and the state of the worker."""

    entries: list[QueueEntry] = field(default_factory=list)
    paused: MessageLike = ""  # why nothing is started, "" when it goes on
    go_on: bool = True  # with the next one, when one fails
    worker: JsonObject = field(default_factory=dict)  # the process that works it off
    called: float = 0.0  # when that process was started last

    @property
    def waiting(self) -> list[QueueEntry]:
        """What was not started yet, in order."""
        return [entry for entry in self.entries if entry.waits]

    @property
    def is_worked(self) -> bool:
        """Whether its process lives."""
        called = 0 <= time.time() - self.called < ARRIVAL
        return process.alive(self.worker) if self.worker else called

    @property
    def halted(self) -> bool:
        """Whether something waits and no worker runs, as after a reboot."""
        return bool(self.waiting) and not self.paused and not self.is_worked

    def find(self, entry_id: str) -> QueueEntry:
        """An entry by its id. Raises ConfigError when another browser has removed it."""
        for entry in self.entries:
            if entry.id == entry_id:
                return entry
        raise ConfigError("This training is not in the queue any more.")


def place() -> Path:
    """The folder of the queue."""
    return registry.data_folder() / "queue"


def read() -> Queue:
    """The queue as it stands. Its file is read when it was written since the last time: the page asks every second."""
    return _queue(layout.load_changed(str(place() / "queue.json")))


def _queue(found: JsonMapping) -> Queue:
    """The queue that a file holds, which shares nothing with what was read of it."""
    found = copy.deepcopy(found)
    known = {f.name for f in fields(QueueEntry)}
    given = [entry for entry in found.get("entries") or [] if isinstance(entry, dict) and layout.is_id(entry.get("id"))]
    entries = [QueueEntry(**{name: entry[name] for name in known & entry.keys()}) for entry in given]
    worker = found.get("worker")
    return Queue(
        entries,
        found.get("paused") or "",
        bool(found.get("go_on", True)),
        worker if isinstance(worker, dict) else {},
        float(found.get("called") or 0.0),
    )


@contextlib.contextmanager
def changing() -> Iterator[Queue]:
    """The queue, to be changed and written back; nobody else changes it meanwhile."""
    with locking.held(place() / "queue.lock", PATIENCE) as mine:
        if not mine:
            raise ConfigError("The queue is being changed by another program: try again in a moment.")
        found = _queue(layout.load(place() / "queue.json"))
        before = asdict(found)
        yield found
        if asdict(found) != before:
            layout.store(place() / "queue.json", asdict(found))


def add(job: start.TrainingJob, first: bool = False) -> QueueEntry:
    """Put a job at the end of the queue (or in front), and start the worker unless the queue was halted."""
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
        if len(queue.waiting) >= MOST:
            raise ConfigError("{most} trainings wait already: let some of them run first.", most=MOST)
        if twin := twin_problem(queue, entry.output, entry.name):
            raise ConfigError(twin)
        halted = queue.halted
        write_atomic(_toml(entry), job.toml)
        waiting = queue.waiting
        queue.entries.insert(queue.entries.index(waiting[0]) if first and waiting else len(queue.entries), entry)
        _forget_old(queue)
    if not halted:
        work()
    return entry


def twin_problem(queue: Queue, output: str, name: str) -> Problem | None:
    """The problem of a training whose files would have the folder and name of those of a waiting one."""
    if all((entry.output, entry.name) != (output, name) for entry in queue.waiting):
        return None
    return Problem("output_name", ": {name} waits in the queue for the same folder; choose another name.", name=name)


def job_of(entry: QueueEntry) -> start.TrainingJob:
    """What an entry is to start. Raises ConfigError when its config is gone."""
    try:
        toml = _toml(entry).read_text(encoding="utf-8")
    except OSError:
        raise ConfigError(
            "The config of {name} is gone from {folder}: add it again.", name=entry.name, folder=place()
        ) from None
    return start.TrainingJob(
        entry.script, entry.title, entry.name, entry.output, toml, entry.how, {}, entry.folder, entry.resumes, entry.id
    )


def remove(entry_id: str) -> None:
    """Take an entry out; a training that works goes on."""
    with changing() as queue:
        entry = queue.find(entry_id)
        queue.entries.remove(entry)
        forget(entry)


def move(entry_id: str, by: int) -> None:
    """Move a waiting entry among those that wait: by -1 it comes sooner, by 1 later; at the ends it stays."""
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
    """Take out all that has ended."""
    with changing() as queue:
        for entry in [e for e in queue.entries if state_of(e)[0] in layout.FINAL]:
            queue.entries.remove(entry)
            forget(entry)


def pause() -> None:
    """Start nothing more. What works goes on."""
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
    """Whether the next training starts when one has failed."""
    with changing() as queue:
        queue.go_on = go_on


def state_of(entry: QueueEntry) -> tuple[str, MessageLike]:
    """How an entry stands, "waiting" or a run's state, and why it failed."""
    if entry.run:
        try:
            run = reader.run(entry.run)
        except KeyError:
            return entry.ended or "interrupted", "The folder of its run is gone."
        return run.state, run.error or ""
    return entry.ended or "waiting", entry.error


def queued_sentence(entry: QueueEntry) -> Message:
    """What became of an entry that was just added, in a sentence."""
    queue = read()
    before = [e for e in queue.waiting if e.added < entry.added]
    if queue.paused or queue.halted:
        return Message("{name} is in the queue, which is paused: press Continue in the Queue tab.", name=entry.name)
    template = "{name} is in the queue and starts as soon as there is room. It does not need this page to be open."
    if before:
        template = "{name} is in the queue and starts after {others}. It does not need this page to be open."
    return Message(template, name=entry.name, others=counted(len(before), "other"))


def work() -> None:
    """Start the worker if none runs. Of two that start at once, the one that gets the lock stays."""
    with changing() as queue:
        if not queue.waiting or queue.paused or queue.is_worked:
            return
        queue.called, queue.worker = time.time(), {}
        start.detached(RUNNER, place() / "worker.txt", os.environ, str(ROOT))


def forget(entry: QueueEntry) -> None:
    """Remove an entry's config."""
    _toml(entry).unlink(missing_ok=True)


def _forget_old(queue: Queue) -> None:
    ended = [entry for entry in queue.entries if entry.ended]
    for entry in ended[: max(0, len(ended) - KEPT)]:
        queue.entries.remove(entry)
        forget(entry)


def _toml(entry: QueueEntry) -> Path:
    return place() / f"{entry.id}.toml"
