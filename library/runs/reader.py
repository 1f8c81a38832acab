"""Read runs: the list, their states, and new events since the last read."""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, MessageLike
from library.runs import explain, layout, lineage, process, registry

SILENCE = 60.0  # a run on another machine counts as ended after this many seconds without a heartbeat
FRESH = 6.0  # a heartbeat this recent (seconds) outweighs a differing start time of the process
LAUNCH_TIMEOUT = 30.0  # seconds until a prepared run's launcher must be on record
MAX_EVENTS_PER_KIND = 5000  # maximum events per kind
MAX_KINDS = 50  # a run has fewer
MAX_HELD_BYTES = 20_000_000  # of the lines of the events in memory; real runs have a tenth of it
MAX_RATES, MAX_RATE_NAME = 200, 200  # learning rates of a step, and the characters of their names

POINTS = 1500  # maximum points; a longer curve is thinned, as no screen can show more


class Curve:
    """Loss and learning rates by step.

    `before` is the curve of the resumed run, and `at` the step of its state, if known. The first own step settles it.
    """

    def __init__(self, before: Self | None = None, at: int | None = None) -> None:
        self.points: list[tuple[int, float, float]] = []  # step, loss, smoothed loss
        self.rates: list[tuple[int, dict[str, float]]] = []  # step, rates by name
        self.resumed: list[int] = []  # steps after which it was resumed
        self._smooth, self._stride, self._seen = 0.0, 1, 0
        self._before = before
        if at is not None:
            self._follow(at)

    def add(self, step: int, loss: float, rates: Any) -> None:
        """Add a step."""
        if self._before is not None:
            self._follow(step - 1)
            self._before = None
        # The window of the running mean grows with the run, up to some hundred steps, so that short runs are not
        # flattened.
        self._smooth += (loss - self._smooth) * max(0.02, 8 / (self._seen + 8))
        if self._seen % self._stride == 0:
            self.points.append((step, loss, self._smooth))
            self.rates.append((step, rates_by_name(rates)))
        self._seen += 1
        if len(self.points) > POINTS:
            self.points, self.rates, self._stride = self.points[::2], self.rates[::2], self._stride * 2

    def _follow(self, at: int) -> None:
        """Prepend the points of the preceding run up to this step."""
        if self._before is None:
            return
        self.points = [point for point in self._before.points if point[0] <= at]
        self.rates = [row for row in self._before.rates if row[0] <= at]
        self.resumed = [step for step in self._before.resumed if step < at]
        if self.points:
            self.resumed.append(at)
            # The smoothing continues as after this many steps.
            self._smooth, self._stride, self._seen = self.points[-1][2], self._before._stride, at


@dataclass(frozen=True)
class ProcessFolder:
    """The folder of a process that others follow, and the content of its main file."""

    folder: Path
    facts: JsonObject = field(repr=False)

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def state(self) -> str:
        return str(self.facts.get("state") or "interrupted")

    # A record alone cannot tell: a killed process leaves it unfinished.
    # Why: docs/decisions/2026-11-20-run-is-active-while-its-process-lives.md
    @property
    def active(self) -> bool:
        return self.state in layout.ACTIVE


class RecordedRun(ProcessFolder):
    """One run in its current state."""

    @property
    def name(self) -> str:
        """Name for users; not unique."""
        return str(self.facts.get("output_name") or self.id)

    @property
    def is_here(self) -> bool:
        return self.facts.get("host", process.HOST) == process.HOST

    @property
    def error(self) -> str | None:
        return self.facts.get("error")


def runs() -> list[RecordedRun]:
    recorded = [run_at(folder) for folder in registry.run_folders().values()]
    return sorted(recorded, key=lambda run: run.facts.get("started", 0), reverse=True)


def find_run(run_id: str) -> RecordedRun:
    """Return one run by its id. Raises KeyError if there is none."""
    return run_at(registry.folder_of_run(run_id))


def existing_run(run_id: str) -> RecordedRun:
    """Return one run by its id. Raises ConfigError if it is gone."""
    try:
        return find_run(run_id)
    except KeyError:
        raise ConfigError("This run no longer exists: {run}", run=run_id) from None


def path_in_run(run: RecordedRun, path: object) -> Path:
    """Return a path that a run has recorded; a relative one starts in the folder in which it was started."""
    return Path(str(run.facts.get("folder") or ".")) / str(path or "")


def output_folder(run: RecordedRun) -> Path:
    """Return the output folder of a run; without a recorded one, the folder of its record."""
    return path_in_run(run, run.facts["output_dir"]) if run.facts.get("output_dir") else run.folder


def saved_files(run: RecordedRun, events: Iterable[JsonMapping]) -> list[Path]:
    """Return the files and states of a run's `saved` events that exist, each once."""
    paths = dict.fromkeys(path_in_run(run, event.get("file")) for event in events if event.get("file"))
    return [path for path in paths if os.path.exists(path)]  # Path.exists raises for a name that is too long


def active() -> RecordedRun | None:
    return next((run for run in runs() if run.active), None)


def run_at(folder: Path) -> RecordedRun:
    """Return the run in this folder. If its process has ended without recording that, mark it as ended, in its file,
    too.
    """
    path = os.path.join(folder, layout.RUN)  # faster than folder / layout.RUN, and called for every run every second
    facts = layout.load_changed(path) or registry.working_without_folder(folder.name)
    if facts.get("state") not in layout.ACTIVE:
        return RecordedRun(folder, facts)
    if ended := _how_it_ended(folder, facts):
        # The trainer may have recorded its end between our read of the file and our check of the process.
        facts = layout.load_facts(Path(path))
        if facts.get("state") in layout.ACTIVE:
            facts |= {"state": ended[0], "error": ended[1], "ended": facts.get("heartbeat", time.time())}
            with contextlib.suppress(OSError, ConfigError):  # on a full disk the next read tries again
                layout.store(Path(path), facts)
    elif layout.stop_asked(folder):
        facts = {**facts, "state": "stopping"}
    return RecordedRun(folder, facts)


def _how_it_ended(folder: Path, facts: JsonObject) -> tuple[str, MessageLike | None] | None:
    """Return state and cause of a run that is recorded as active but whose process has ended; None if it is active."""
    begun = "pid" in facts  # the trainer has taken over the record
    process_facts = facts if begun else layout.load_facts(folder / layout.LAUNCHER)
    if process_facts.get("host", process.HOST) != process.HOST:
        silent = time.time() - facts.get("heartbeat", 0) > SILENCE
        return ("interrupted", "The other computer has not reported for some time.") if silent else None
    if not process_facts and time.time() - facts.get("started", 0) < LAUNCH_TIMEOUT:
        return None
    if process.alive(process_facts) or (begun and _is_beating(facts)):
        return None
    message = explain.cause(tail(folder))
    if request := layout.stop_asked(folder):
        return ("failed", message) if message and request != "kill" else ("stopped", None)
    if not begun:
        return "failed", message or "The process ended before the training began. See its log."
    return ("failed", message) if message else ("interrupted", "The training was interrupted: its process is gone.")


def _is_beating(facts: JsonObject) -> bool:
    # Its start time is no evidence, as it changes when the clock is set.
    return abs(time.time() - facts.get("heartbeat", 0)) < FRESH and process.exists(facts.get("pid"))


class LogEnd(NamedTuple):
    """The last lines of a log, and the file if it holds more than these, otherwise ""."""

    text: str
    longer_file: str


def log_end(folder: Path, lines: int = 200, size: int = 65536) -> LogEnd:
    """Return the end of a run's log. Reads only the end of the file."""
    file = folder / layout.LOG
    try:
        with layout.open_record(file) as log:
            log.seek(0, 2)
            begin = max(0, log.tell() - size)
            log.seek(begin)
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return LogEnd("", "")
    written = text.split("\n")
    # A progress bar overwrites its line, so only its last state counts.
    shown = "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in written[-lines:])
    return LogEnd(shown, str(file) if begin or len(written) > lines else "")


def tail(folder: Path, lines: int = 200, size: int = 65536) -> str:
    return log_end(folder, lines, size).text


def read_events(folder: Path) -> list[JsonObject]:
    """Return all events of a run of this program's own. Those of others may fill the memory: read them one by one with
    `new_events`.
    """
    return [event for event, _ in new_events(folder) if event]


def new_events(folder: Path, since: int = 0) -> Iterator[tuple[JsonObject, int]]:
    """Yield the events after byte `since` of a run's progress.jsonl, each with the byte to continue from, and at last
    that byte alone. An incomplete line waits for the next call; a broken one is skipped.
    """
    try:
        with layout.open_record(folder / layout.PROGRESS) as progress:
            length = progress.seek(0, 2)
            end = since if 0 <= since <= length else 0
            progress.seek(end)
            for line, end in layout.event_lines(progress):
                with contextlib.suppress(ValueError):
                    if event := layout.parse_facts(line):
                        yield event, end
    except OSError:
        end = 0
    yield {}, end


class RunProgress:
    """All events of a run so far, reduced to what the panel shows. `update` reads only new ones."""

    def __init__(self, folder: Path, line: Curve | None = None) -> None:
        self.folder, self.offset = folder, 0
        self.line = line or Curve()
        self.last: JsonObject = {}  # the newest step line
        self.phase: JsonObject | None = None  # current work outside the steps
        self.events: dict[str, deque[JsonObject]] = {}  # the newest events of every other kind
        self._sizes: dict[str, deque[int]] = {}  # bytes of their lines
        self._held = 0  # sum of these
        self._path = os.path.join(folder, layout.PROGRESS)
        self._read = (0, 0, 0)  # signature of the file at the last read
        self._lock = threading.Lock()

    @property
    def curve(self) -> list[tuple[int, float, float]]:
        return self.line.points  # step, loss, smoothed loss; those of the resumed run come first

    def update(self) -> "RunProgress":
        """Read events since the last call. Thread-safe."""
        with self._lock:
            written = layout.signature(self._path)
            if written == self._read:
                return self
            self._read = written  # later writes change the signature
            for event, end in new_events(self.folder, self.offset):
                if event:
                    self._take(event, max(end - self.offset, 0))
                self.offset = end
        return self

    def _take(self, event: JsonObject, size: int = 0) -> None:
        kind = event.get("kind")
        if kind == "step":
            self.last, self.phase = event, None
            if isinstance(event.get("loss"), int | float) and isinstance(event.get("step"), int):
                self.line.add(event["step"], float(event["loss"]), event.get("lr"))
        elif kind == "phase":
            self.phase = event
        elif str(kind) in self.events or len(self.events) < MAX_KINDS:
            self._hold(str(kind), event, size)

    def _hold(self, kind: str, event: JsonObject, size: int) -> None:
        """Keep an event, and forget the oldest of its kind beyond the limits."""
        events, sizes = self.events.setdefault(kind, deque()), self._sizes.setdefault(kind, deque())
        events.append(event)
        sizes.append(size)
        self._held += size
        while events and (len(events) > MAX_EVENTS_PER_KIND or self._held > MAX_HELD_BYTES):
            events.popleft()
            self._held -= sizes.popleft()


@lru_cache(maxsize=16)
def progress(folder: Path) -> RunProgress:
    """Return the RunProgress of a folder, which all readers of this process share."""
    parent = lineage.parent_run(folder)
    if parent is None:
        return RunProgress(folder)
    parent_folder, at = parent
    return RunProgress(folder, Curve(progress(parent_folder).update().line, at))


def rates_by_name(rates: Any) -> dict[str, float]:
    """Return learning rates by name, from one number or several."""
    if isinstance(rates, int | float):
        return {"": float(rates)}
    if not isinstance(rates, Mapping):
        return {}
    # The record of a stranger may have any number of them.
    first = [(str(name), rate) for name, rate in islice(rates.items(), MAX_RATES) if isinstance(rate, int | float)]
    return {name: float(rate) for name, rate in first if len(name) <= MAX_RATE_NAME}
