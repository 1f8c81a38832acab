"""Runs as the API shows them, and those that have changed since an earlier answer."""

import secrets
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pydantic import Field, create_model

from kohya_gui.api import answers
from library.config.json_types import JsonObject
from library.runs import explain, overview

Run: Any = create_model(
    "Run",
    __base__=answers.model_of(overview.RunSummary, "Run"),
    time_left=(float | None, Field(description="Seconds")),
    seconds=(float | None, Field(description="How long it took, or has been running")),
)


def shown_run(summary: overview.RunSummary, now: float) -> JsonObject:
    """Return a run with its times. The result is cached and shared, so callers must not change it."""
    taken, left = overview.seconds_taken(summary, now), summary.time_left(now)
    return _shown(summary, *(None if value is None else round(value) for value in (left, taken)))


@lru_cache(maxsize=4096)
def _shown(summary: overview.RunSummary, left: int | None, taken: int | None) -> JsonObject:
    error = explain.advice(summary.error)
    return {**answers.plain(summary), "error": error, "time_left": left, "seconds": taken}


class RunChanges:
    """Finds runs that have changed since an answer, by its mark: this object's name, and the number of the answer."""

    def __init__(self) -> None:
        self._name, self._number = secrets.token_hex(4), 0
        self._runs: dict[str, tuple[JsonObject, int]] = {}  # with the number of the first answer
        self._order, self._ordered = list[str](), 0
        self._lock = threading.Lock()

    def since(self, runs: Sequence[JsonObject], mark: str) -> tuple[list[JsonObject], list[str] | None, str]:
        """Return the runs that have changed since a mark (all for an unknown one), all ids in their order (None if
        unchanged), and the current mark."""
        with self._lock:
            self._number += 1
            before, order = self._runs, [run["id"] for run in runs]
            before_by_run = {run["id"]: before.get(run["id"], (None,))[0] for run in runs}
            same = {run["id"] for run in runs if before_by_run[run["id"]] is run or before_by_run[run["id"]] == run}
            self._runs = {run["id"]: before[run["id"]] if run["id"] in same else (run, self._number) for run in runs}
            if order != self._order:
                self._order, self._ordered = order, self._number
            name, _, number = mark.rpartition("-")
            seen = int(number) if name == self._name and number.isdecimal() and len(number) < 16 else 0
            changed = [run for run, changed_at in self._runs.values() if changed_at > seen]
            return changed, order if self._ordered > seen else None, f"{self._name}-{self._number}"
