"""Request a run to stop, from any process on its machine. It saves before it ends; a hanging one can be killed."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from library.config import phases
from library.config.json_types import as_float
from library.config.problems import ConfigError, Message, MessageLike, Problem
from library.files import UNFINISHED, write_atomic
from library.runs import layout, process, reader
from library.runs.dates import duration_in_words
from library.runs.lineage import step_of

HANG_TIMEOUT = 120.0  # a run that should end counts as hanging after this many seconds without activity
CONFIRM_FROM = 60.0  # seconds; discarding more work needs a confirmation
ANSWERS = {
    "after_step": "It stops after this step and saves a state to resume from.",
    "now": "It ends this step early, saves what it has learned with a state to resume from, and stops.",
    "kill": "It was killed.",
    "sample": "Sample images are generated after this step.",
    "save": "It saves a file and a state after this step.",
}
BEFORE_FIRST_STEP = {
    "after_step": "No step is done yet: it stops before the first one, or right after it. Caches on disk stay.",
    "now": "It stops at once. No step is done yet, so there is nothing to save; caches on disk stay.",
    "sample": "Sample images are generated after the first step.",
    "save": "It saves a file and a state after the first step.",
}
STEPS = 20  # or after the time of this many steps, if longer


def request(run_id: str, how: str) -> None:
    """Request a run to stop: "after_step" finishes its step, "now" ends the step early; both save what was trained.

    "kill" ends its processes and loses unsaved work. Raises KeyError for an unknown run, ValueError for an unknown
    request, and ConfigError to kill a run on another computer. An ended run is left alone, and an earlier, stronger
    request stays.
    """
    if how not in layout.STOPS[1:]:
        raise ValueError(f"A run stops after_step or now, or by kill, not {how!r}.")
    run = reader.find_run(run_id)
    if not run.active:
        return
    if how == "kill" and not run.is_here:
        raise ConfigError("{run_id} works on another computer: end its processes there.", run_id=run.name)
    if layout.STOPS.index(how) > layout.STOPS.index(layout.stop_asked(run.folder)):
        write_atomic(run.folder / layout.STOP, how)
    if how == "kill":
        _end(run)


def request_output(run_id: str, what: str) -> None:
    """Request a run to generate samples ("sample") or to save a file and a state ("save") after this step.

    Raises KeyError for an unknown run and ValueError for an unknown request. An ended run is left alone.
    """
    if what not in layout.REQUESTS:
        raise ValueError(f"A run can {' or '.join(layout.REQUESTS)} on the way, not {what!r}.")
    run = reader.find_run(run_id)
    if run.active:
        write_atomic(layout.request_file(run.folder, what), "")


def answer_to(run: reader.RecordedRun, what: str) -> str:
    """Return a run's answer to a request, one of ANSWERS."""
    is_early = not has_stepped(reader.progress(run.folder).update())
    return BEFORE_FIRST_STEP.get(what, ANSWERS[what]) if is_early else ANSWERS[what]


def has_stepped(progress: reader.RunProgress) -> bool:
    """Return whether a run has done a step of its own, after those of the run that it resumes."""
    return bool(progress.last)


def lost_now(run: reader.RecordedRun) -> tuple[str, float]:
    """Return what "now" would discard, and how many seconds of work that is.

    "start": loading, caching and compiling, as no step is done; "step": the batches of an unfinished step; "look":
    samples or a validation; "": nothing.
    """
    progress, now = reader.progress(run.folder).update(), time.time()
    last_step_time, phase = progress.last.get("t"), str((progress.phase or {}).get("name") or "")
    if not isinstance(last_step_time, int | float):
        return "start", max(0.0, now - run.facts.get("started", now))
    if phase in (str(phases.GENERATING_SAMPLES), str(phases.VALIDATING)):
        return "look", max(0.0, now - last_step_time)
    accumulated = layout.facts_section(run.facts, "steps").get("gradient_accumulation_steps", 1)
    processes = (run.facts.get("hardware") or {}).get("processes", 1)
    collects = isinstance(accumulated, int) and accumulated > 1 and processes == 1
    return ("step", max(0.0, now - last_step_time)) if collects and not phase else ("", 0.0)


def lost_by_kill(run: reader.RecordedRun) -> tuple[int | None, float]:
    """Return the step of the newest state, None without one, and the seconds of work since then."""
    events = reader.progress(run.folder).update().events.get("saved", ())
    saved = [(event.get("t", 0.0), step_of(Path(str(event.get("file") or "")))) for event in events]
    when, step = max(((t, step) for t, step in saved if step is not None), default=(None, None))
    return step, max(0.0, time.time() - (when or run.facts.get("started", time.time())))


def question_before(run: reader.RecordedRun, how: str) -> MessageLike:
    """Return the question to confirm before such a stop; "" if almost nothing is lost."""
    if how == "kill":
        step, seconds = lost_by_kill(run)
        if not has_stepped(reader.progress(run.folder).update()):
            return "No step is done yet, so nothing that it has learned is lost. Kill it?"
        if step is None:
            template = "No state was saved: all that was learned in {time} is lost. Kill it?"
            return Message(template, time=duration_in_words(seconds))
        template = "What was learned after step {step} is lost, {time} of work. Kill it?"
        return Message(template, step=step, time=duration_in_words(seconds))
    what, seconds = lost_now(run) if how == "now" else ("", 0.0)
    if seconds <= CONFIRM_FROM:
        return ""
    lost = {
        "start": "{time} of loading, caching and compiling are lost; caches on disk stay. Stop it?",
        "step": "{time} of work on this step are lost; what was learned before is saved. Stop it?",
        "look": "{time} of work on samples or validation are lost; what was learned is saved. Stop it?",
    }
    return Message(lost[what], time=duration_in_words(seconds))


def refuse_ended(run: reader.RecordedRun) -> None:
    """Raise ConfigError for a run that has ended."""
    if not run.active:
        template = "{run} has ended and takes no more requests."
        raise ConfigError(Problem("", template, run=run.name, code="busy"))


def refuse_early_kill(run: reader.RecordedRun) -> None:
    """Raise ConfigError unless a run that should end hangs."""
    if not hangs(run):
        raise ConfigError(Problem("", "It has reported in the last few minutes: let it save and stop.", code="busy"))


def hangs(run: reader.RecordedRun) -> bool:
    """Return whether a run that should end has been silent for too long."""
    if not run.active or layout.stop_asked(run.folder) not in ("now", "kill"):
        return False
    progress = reader.progress(run.folder).update()
    limit = max(HANG_TIMEOUT, STEPS * as_float(progress.last.get("s_it")))
    return time.time() - max(_activity(run, progress)) > limit


def _activity(run: reader.RecordedRun, progress: reader.RunProgress) -> Iterator[float]:
    """Yield times of the request, of the newest lines, and of writes to files being saved."""
    yield 0.0
    yield from (t for part in (progress.last, progress.phase or {}) if isinstance(t := part.get("t"), int | float))
    yield from (event.get("t", 0.0) for event in list(progress.events.get("saved", ()))[-1:])
    yield _modified_time(run.folder / layout.STOP)
    output = run.facts.get("output_dir")
    for path in Path(output).iterdir() if output and Path(output).is_dir() else ():
        if UNFINISHED.fullmatch(path.name):
            yield _modified_time(path)
            yield from map(_modified_time, path.iterdir() if path.is_dir() else ())


def _modified_time(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _end(run: reader.RecordedRun) -> None:
    records = (layout.load_facts(run.folder / layout.LAUNCHER), run.facts)
    if not process.kill([p for p in map(process.find_process, records) if p is not None]):
        return  # the process still exists, so it is shown as stopping until it has ended
    facts = layout.load_facts(run.folder / layout.RUN)
    if facts.get("state") in layout.ACTIVE:
        layout.store(run.folder / layout.RUN, facts | {"state": "stopped", "ended": time.time(), "phase": None})
