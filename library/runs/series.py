"""A run's measurements by step, as columns for charts. Long runs are thinned; reading is incremental."""

import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from library.config.json_types import JsonMapping, JsonObject
from library.runs import layout, lineage, reader

MAX_POINTS = 3000  # maximum points of a column; beyond it every second one is left out
MAX_RATES = 8  # maximum learning rates
MAX_COLUMNS = 50  # a record of a stranger may name other rates at each step
STEP_PARTS = ("data_s", "transfer_s", "compute_s")  # seconds of a step
MAX_COMPARISONS = 20  # newest file comparisons to read
MAX_COMPARISON_BYTES = 5_000_000
STEP_TITLE = re.compile(r"step (\d[\d,]{0,11})")  # of a column of a comparison

Value = float | None


@dataclass
class Columns:
    """Values by name for increasing steps, with the training seconds up to each."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: dict[str, list[Value]] = field(default_factory=dict)

    def append(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Add a point; columns without a value get None."""
        for name in values.keys() - self.values.keys():
            if len(self.values) < MAX_COLUMNS:
                self.values[name] = [None] * len(self.steps)
        self.steps.append(step)
        self.seconds.append(seconds)
        for name, column in self.values.items():
            column.append(values.get(name))

    def cut(self, keep: Iterable[int]) -> None:
        """Keep only the points at these indices."""
        places = [*keep]
        self.steps, self.seconds = [self.steps[at] for at in places], [self.seconds[at] for at in places]
        self.values = {name: [column[at] for at in places] for name, column in self.values.items()}

    def from_place(self, at: int) -> JsonObject:
        """Return the points from this index on, as JSON."""
        return {
            "steps": self.steps[at:],
            "seconds": [round(seconds, 2) for seconds in self.seconds[at:]],
            "values": {name: column[at:] for name, column in self.values.items()},
        }


class RunSeries:
    """The columns of one run, preceded by those of the run that it resumes. `update` reads only new events.

    `steps` has a point for each step, `checks` one for each validation. `generation` changes whenever points that a
    client may already have are thinned or replaced.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.generation, self.resumed = folder, 0, list[int]()
        self.steps, self.checks = Columns(), Columns()
        self._offset, self._read, self._stride, self._seen = 0, (0, 0, 0), 1, 0
        self._began: float | None = None  # time at which the training had zero seconds
        self._path = os.path.join(folder, layout.PROGRESS)
        self._lock = threading.Lock()
        self._follows = True  # whether to look for the resumed run

    def update(self) -> "RunSeries":
        """Read events since the last call. Thread-safe."""
        with self._lock:
            written = layout.signature(self._path)
            if written == self._read:
                return self
            if self._follows:
                self._follow()
            self._read, before = written, self._offset
            for event, end in reader.new_events(self.folder, before):
                self._take(event)
                self._offset = end
        return self

    def since(self, generation: int, steps: int, checks: int) -> JsonObject:
        """Return the points that a client with this number of steps and checks lacks, or all if its generation is
        outdated."""
        with self._lock:
            if generation != self.generation or steps > len(self.steps.steps) or checks > len(self.checks.steps):
                steps = checks = 0
            return {
                "generation": self.generation,
                "from": [steps, checks],
                "steps": self.steps.from_place(steps),
                "checks": self.checks.from_place(checks),
                "resumed": self.resumed,
            }

    def _follow(self) -> None:
        """Begin with the points of the resumed run, up to the step of its state."""
        folder, at = lineage.parent_run(self.folder) or (None, None)
        self._follows = folder is not None and at is None  # the first step tells
        if folder is None or at is None:
            return
        before = series_of(folder).update()
        with before._lock:
            for own, earlier in ((self.steps, before.steps), (self.checks, before.checks)):
                own.steps, own.seconds = [*earlier.steps], [*earlier.seconds]
                own.values = {name: [*column] for name, column in earlier.values.items()}
                own.cut(place for place, step in enumerate(earlier.steps) if step <= at)
            self._stride = before._stride
            self.resumed = [*(step for step in before.resumed if step < at), *([at] if self.steps.steps else [])]

    def _take(self, event: JsonMapping) -> None:
        step, when = event.get("step"), layout.finite_number(event.get("t"))
        if event.get("kind") not in ("step", "validation") or not isinstance(step, int) or isinstance(step, bool):
            return
        seconds = self._seconds_at(when)
        if event["kind"] == "validation":
            if (loss := layout.finite_number(event.get("loss"))) is not None:
                self._append(self.checks, step, seconds, {"loss": loss})
            return
        self._seen += 1
        if (self._seen - 1) % self._stride == 0:
            self._append(self.steps, step, seconds, values_of_step(event))
            if len(self.steps.steps) > MAX_POINTS:
                self.steps.cut(range(0, len(self.steps.steps), 2))
                self._stride, self.generation = 2 * self._stride, self.generation + 1

    def _seconds_at(self, when: float | None) -> float:
        before = self.steps.seconds[-1] if self.steps.seconds else 0.0
        if when is None:
            return before
        if self._began is None:
            self._began = when - before
        return max(before, when - self._began)

    def _append(self, columns: Columns, step: int, seconds: float, values: Mapping[str, float]) -> None:
        if columns.steps and step <= columns.steps[-1]:  # repeated after a state was loaded, or by a damaged record
            columns.cut(place for place, earlier in enumerate(columns.steps) if earlier < step)
            self.generation += 1
        columns.append(step, seconds, values)


def values_of_step(event: JsonMapping) -> dict[str, float]:
    """Return the numbers of a step that charts show, by the name of their column."""
    names = {"loss": "loss", "grad_norm": "gradient", "memory_gb": "memory"}
    values = {column: layout.finite_number(event.get(name)) for name, column in names.items()}
    parts = [layout.finite_number(event.get(name)) for name in STEP_PARTS]
    measured = [part for part in parts if part is not None]
    values["pace"] = sum(measured) if len(measured) == len(parts) else layout.finite_number(event.get("s_it"))
    rates = [*reader.rates_by_name(event.get("lr")).items()][:MAX_RATES]
    if len({rate for _, rate in rates}) == 1:  # equal rates share a line
        rates = [("", rates[0][1])]
    values |= {f"rate {name}".strip(): layout.finite_number(rate) for name, rate in rates}
    return {name: value for name, value in values.items() if value is not None}


@lru_cache(maxsize=32)
def series_of(folder: Path) -> RunSeries:
    """Return the RunSeries of a folder, which all readers of this process share."""
    return RunSeries(folder)


def likeness_of_files(folder: Path) -> list[tuple[int, float]]:
    """Return the step and the likeness to the training images of a run's files, from its newest comparison."""
    comparisons = sorted(folder.glob("compare-*/comparison.json"), key=lambda path: path.parent.name)[-MAX_COMPARISONS:]
    for path in reversed(comparisons):
        if points := _likeness(str(path), layout.signature(str(path))):
            return points
    return []


@lru_cache(maxsize=256)
def _likeness(path: str, written: tuple[int, int, int]) -> list[tuple[int, float]]:
    """Return the points of one comparison; `written` is part of the cache key."""
    if written[1] > MAX_COMPARISON_BYTES:
        return []
    comparison = layout.load_facts(Path(path))
    columns, likeness = comparison.get("columns"), comparison.get("likeness")
    if not isinstance(columns, list) or not isinstance(likeness, list):
        return []
    points: dict[int, float] = {}
    for title, value in zip(columns, likeness, strict=False):
        match, number = STEP_TITLE.fullmatch(str(title)), layout.finite_number(value)
        if match and number is not None:
            points[int(match[1].replace(",", ""))] = number
    return sorted(points.items())
