"""The queue as page, shell and HTTP show it: a row for each entry, with its forecast and its differences."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from library.config.command import named_gpus
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import read_outside_text
from library.config.problems import ConfigError, MessageLike
from library.config.schema import flatten_sections
from library.runs import explain, file_contents, forecast, gpu_slots, job_files, layout, queue, reader, resume

# Options that differ between any two trainings.
OWN_NAMES = ("output_name", "output_dir", "logging_dir", "resume")
MAX_DIFFERENCES = 40  # per row


@dataclass(frozen=True)
class Difference:
    """An option that two trainings set differently; None where it has its default."""

    option: str
    before: MessageLike | None
    value: MessageLike | None
    words: str = ""  # the difference if the option names a file, such as "prompts differ"


@dataclass(frozen=True)
class QueueRow:
    """One entry of the queue. Times are seconds since 1970, durations seconds, memory is in GiB; None if unknown."""

    id: str
    name: str
    title: str
    script: str
    state: str
    waits: bool
    why: MessageLike  # why it failed or ended
    run: str  # the run's id, once started
    gpus: tuple[str, ...]  # used or to be used; empty for a CPU
    gpu_count: int
    names_gpus: bool  # it waits for these GPUs, whichever others are free
    step: int
    total_steps: int
    step_seconds: float | None
    memory: float | None
    seconds: float | None  # of the whole training: measured or expected
    start: float | None
    end: float | None
    added: float
    can_resume: bool
    resume_words: MessageLike  # label of the button that continues it, "" if impossible
    resume_hint: MessageLike  # a note before continuing, or ""
    compared_with: str  # name of the preceding training of the same kind, or ""
    differences: tuple[Difference, ...]


def queue_rows(shown: queue.Queue) -> list[QueueRow]:
    """Return all entries: active ones, waiting ones in their order, and then ended ones, the newest first."""
    runs = reader.runs()
    expected = forecast.expected_times(shown, runs)
    rows = [_row(entry, shown, runs, expected.get(entry.id)) for entry in shown.entries]
    waiting = [row for row in rows if row.waits]
    active = [row for row in rows if row.state in layout.ACTIVE]
    return [*active, *waiting, *reversed([row for row in rows if not row.waits and row.state not in layout.ACTIVE])]


def _row(
    entry: queue.QueueEntry,
    shown: queue.Queue,
    runs: Sequence[reader.RecordedRun],
    expected: forecast.Expected | None,
) -> QueueRow:
    state, why = queue.state_of(entry)
    run = next((run for run in runs if run.id == entry.run), None) if entry.run else None
    resumed = run if run and queue.can_resume(run, runs) else None
    resume_words, resume_hint = resume.describe_resume(resumed) if resumed else ("", "")
    before = _training_before(entry, shown, runs)
    devices = (run.facts.get("devices") or ()) if run else expected.devices if expected else ()
    return QueueRow(
        id=entry.id,
        name=entry.name,
        title=entry.title,
        script=entry.script,
        state=state,
        waits=entry.waits,
        why=explain.advice(why) if state != "finished" else "",
        run=entry.run,
        gpus=tuple(str(device) for device in devices if device != gpu_slots.CPU),
        gpu_count=gpu_slots.wanted_processes(entry.how),
        names_gpus=bool(named_gpus(entry.how)),
        memory=entry.memory if entry.memory and gpu_slots.has_gpu() else None,  # the estimate is of a GPU
        added=entry.added,
        can_resume=bool(resumed),
        resume_words=resume_words,
        resume_hint=resume_hint,
        compared_with=before[0],
        differences=differences(before[1], entry_contents(entry)) if before[0] else (),
        **_progress(entry, run, runs, expected),
    )


def _progress(
    entry: queue.QueueEntry,
    run: reader.RecordedRun | None,
    runs: Sequence[reader.RecordedRun],
    expected: forecast.Expected | None,
) -> JsonObject:
    """Return the fields of a row about steps and time."""
    seconds = forecast.seconds_of_entry(entry, runs)
    facts: JsonObject = {"step": 0, "total_steps": entry.steps, "step_seconds": entry.step_seconds or None}
    if run is None:
        start, end = (expected.start, expected.end) if expected else (None, None)
        return {**facts, "seconds": seconds, "start": start, "end": end}
    last, start = reader.progress(run.folder).update().last, run.facts.get("started")
    facts |= {"step": int(run.facts.get("step") or 0), "total_steps": int(run.facts.get("total_steps") or entry.steps)}
    if isinstance(last.get("s_it"), int | float):
        facts["step_seconds"] = last["s_it"]
    if run.active:
        left = forecast.seconds_left(run)
        end = None if left is None else forecast.now() + left
    else:
        end = run.facts.get("ended") or run.facts.get("heartbeat")
    return {**facts, "seconds": end - start if start and end else seconds, "start": start, "end": end}


def _training_before(
    entry: queue.QueueEntry, shown: queue.Queue, runs: Sequence[reader.RecordedRun]
) -> tuple[str, JsonMapping]:
    """Return the training that comes before an entry, of the same script, in the queue or else among the runs."""
    earlier = [e for e in shown.entries[: shown.entries.index(entry)] if e.script == entry.script]
    if earlier:
        return earlier[-1].name, entry_contents(earlier[-1])
    entries = {e.run for e in shown.entries if e.run}
    for run in runs if entry.waits else ():
        if run.facts.get("script") == entry.script and run.id not in entries:
            return run.name, run_contents(run)
    return "", {}


def run_values(run: reader.RecordedRun) -> JsonObject:
    """Return the settings of a run that are not at their defaults, by option."""
    path = run.folder / layout.TOML
    values = _values_of_file(str(path), layout.signature(str(path)))
    return values or flatten_sections(resume.run_settings(run), [])


def run_contents(run: reader.RecordedRun) -> JsonObject:
    """Return the settings of a run with the paths of files replaced by their contents at its start.

    Paths without copies stay, as the files may have changed since.
    """
    return file_contents.with_contents(run_values(run), run.folder)


def entry_contents(entry: queue.QueueEntry) -> JsonObject:
    """Return the settings of an entry with the paths of files replaced by their contents."""
    path = queue.queue_folder() / f"{entry.id}.toml"
    values = _values_of_file(str(path), layout.signature(str(path)))
    return file_contents.with_contents(values, queue.queue_folder() / entry.id)


@lru_cache(maxsize=1024)
def _values_of_file(path: str, written: tuple[int, int, int]) -> JsonObject:
    # `written` is part of the cache's key, as the page asks every second.
    try:
        return job_files.values_of(read_outside_text(path))
    except ConfigError:
        return {}


def differences(before: JsonMapping, values: JsonMapping) -> tuple[Difference, ...]:
    """Return the options that differ, first those that the training sets itself."""
    names = [name for name in {**values, **before} if name not in OWN_NAMES and before.get(name) != values.get(name)]
    rows = []
    for name in names[:MAX_DIFFERENCES]:
        both = file_contents.make_comparable((before.get(name), values.get(name)))
        if both[0] != both[1]:
            words = file_contents.describe_difference(name, both)
            rows.append(Difference(name, *file_contents.texts_beside(both), words=words))
    return tuple(rows)
