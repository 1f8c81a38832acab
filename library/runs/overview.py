"""A summary of every run for tables. Reads only small records, and each again only after a change."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike
from library.families import config_class, facts_of
from library.runs import layout, notes, reader

TAIL = 65536  # bytes to read from the end of the events if a record has no latest numbers


@dataclass(frozen=True)
class SampleKey:
    """A sample image of a run: the step it was generated after, and the number of its prompt."""

    step: int
    number: int


@dataclass(frozen=True)
class RunSummary:
    """One run in a table. Numbers missing in its record are None, texts ""."""

    id: str
    name: str
    family: str  # the title of its model family
    kind: str  # lora, finetune, textual-inversion or lllite
    title: str  # family and kind as its record names them
    preset: str  # the id of the preset that its settings started from
    state: str
    steps_done: int
    steps_total: int
    speed: float | None  # seconds per step
    eta: float | None  # seconds left when `reported` was written
    reported: float | None  # time of the latest step, in seconds since 1970
    loss: float | None  # average over the last epoch
    held_out_loss: float | None
    last_sample: SampleKey | None
    note: str
    started: float | None  # seconds since 1970, as is `ended`
    ended: float | None
    devices: tuple[str, ...]
    output_folder: str
    folder: str  # of its record
    error: MessageLike = ""
    damaged: bool = False  # whether its record is unreadable; `error` has the reason
    queued: str = ""  # its entry in the queue
    resumes: str = ""  # the run that it resumes

    @property
    def active(self) -> bool:
        return self.state in layout.ACTIVE

    def time_left(self, now: float) -> float | None:
        """Return the seconds left at the time `now`; None unless it trains."""
        if not self.active or self.eta is None:
            return None
        return max(0.0, self.eta - max(0.0, now - (self.reported or now)))


def overview() -> list[RunSummary]:
    """Return the summaries of all runs, the newest first."""
    return summaries(reader.runs())


def summaries(runs: Iterable[reader.RecordedRun]) -> list[RunSummary]:
    return [summary(run) for run in runs]


def summary(run: reader.RecordedRun) -> RunSummary:
    """Return the summary of a run."""
    folder = str(run.folder)
    note_written = layout.signature(os.path.join(folder, notes.NOTE))
    if run.active or not run.facts:
        return _summary(run, _note(folder, note_written))
    # `run_at` marks runs whose process has ended, so that only active ones change without a change of their files.
    return _ended(folder, layout.signature(os.path.join(folder, layout.RUN)), note_written, run.state)


@lru_cache(maxsize=4096)
def _ended(folder: str, written: tuple[int, int, int], note_written: tuple[int, int, int], state: str) -> RunSummary:
    """Return the summary of a run that has ended. `written` and `note_written` are part of the cache key."""
    return _summary(reader.run_at(Path(folder)), _note(folder, note_written))


@lru_cache(maxsize=4096)
def _note(folder: str, written: tuple[int, int, int]) -> str:
    return notes.read_note(Path(folder)) if any(written) else ""


def _summary(run: reader.RecordedRun, note: str) -> RunSummary:
    facts, latest = run.facts, _latest(run)
    script = str(facts.get("script") or "")
    family, kind = family_and_kind(script)
    damaged = not facts
    error: MessageLike = run.error or ""
    if damaged:
        error = Message("The record of this run cannot be read: {file}", file=run.folder / layout.RUN)
    sample = latest.get("sample")
    sample = sample if isinstance(sample, dict) else {}
    return RunSummary(
        id=run.id,
        name=run.name,
        family=family,
        kind=kind,
        title=str(facts.get("title") or script),
        preset=_text(facts.get("preset")),
        state=run.state,
        steps_done=int(facts.get("step") or 0),
        steps_total=int(facts.get("total_steps") or 0),
        speed=layout.finite_number(latest.get("s_it")),
        eta=layout.finite_number(latest.get("eta")),
        reported=layout.finite_number(latest.get("t")),
        loss=layout.finite_number(latest.get("avr_loss", latest.get("loss"))),
        held_out_loss=layout.finite_number(latest.get("held_out_loss")),
        last_sample=SampleKey(_whole(sample.get("step")), _whole(sample.get("number"))) if sample else None,
        note=note,
        started=layout.finite_number(facts.get("started")),
        ended=layout.finite_number(facts.get("ended")),
        devices=tuple(str(device) for device in facts.get("devices") or ()),
        output_folder=_text(facts.get("output_dir")),
        folder=str(run.folder),
        error=error,
        damaged=damaged,
        queued=_text(facts.get("queued")),
        resumes=_text(facts.get("resumes")),
    )


@lru_cache(maxsize=256)
def family_and_kind(script: str) -> tuple[str, str]:
    """Return the title of a script's family and its kind of training, "" for a script that this version lacks."""
    try:
        config = config_class(script)
    except (ConfigError, KeyError):
        return "", ""
    return facts_of(config.family).title, config.kind


def family_folder(script: str) -> str:
    """Return the name of a script's family, "" for a script that this version lacks."""
    try:
        return config_class(script).family
    except (ConfigError, KeyError):
        return ""


def _latest(run: reader.RecordedRun) -> JsonMapping:
    """Return the latest numbers of a run: those in its record or, of a run by an older version, in its last events."""
    latest = run.facts.get("latest")
    if isinstance(latest, dict):
        return latest
    path = os.path.join(run.folder, layout.PROGRESS)
    return _latest_events(path, layout.signature(path)) if run.facts else {}


@lru_cache(maxsize=4096)
def _latest_events(path: str, written: tuple[int, int, int]) -> JsonObject:
    """Return the latest numbers among the last events of a file; `written` is part of the cache key."""
    try:
        with layout.open_record(Path(path)) as file:
            file.seek(max(0, written[1] - TAIL))
            lines = file.read(TAIL).splitlines()
    except OSError:
        return {}
    latest: JsonObject = {}
    for kind in ("validation", "sample", "step"):
        # Parsing all lines would take most of the time of a table.
        mark = f'"kind": "{kind}"'.encode()
        for line in reversed(lines):
            if mark in line and (numbers := layout.latest_of(kind, _event(line))):
                latest |= numbers
                break
    return latest


def _event(line: bytes) -> JsonObject:
    try:
        return layout.parse_facts(line)
    except (ValueError, RecursionError):
        return {}


def _whole(value: Any) -> int:
    return int(layout.finite_number(value) or 0)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def seconds_taken(run: RunSummary, now: float | None = None) -> float | None:
    """Return how long a run took, or has been running until `now`."""
    if run.started is None:
        return None
    end = (time.time() if now is None else now) if run.active else run.ended
    return None if end is None else max(0.0, end - run.started)
