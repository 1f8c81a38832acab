"""Find the state and the settings to resume a run with."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from library.config.json_types import JsonObject
from library.config.outside_files import read_outside_text
from library.config.problems import FAILS_AGAIN, ConfigError, Message, MessageLike, Problem
from library.runs import layout, reader
from library.runs.lineage import step_of

FAILS_AGAIN_HINT = "With the same settings it is likely to fail again: change them first with Use these settings."


def newest_state(run: reader.RecordedRun) -> Path | None:
    """Return this run's state folder with the most steps, else the one it started from; None without either."""
    events = reader.progress(run.folder).update().events
    steps_by_folder: dict[Path, int] = {}
    for kind in ("saved", "saving"):  # a run killed between the two has a complete state, too
        for event in events.get(kind, ()):
            path = Path(run.facts.get("folder") or ".", str(event.get("file") or ""))
            if path in steps_by_folder or not path.name.endswith("-state"):
                continue
            step = step_of(path)
            # A folder that should have been replaced may still belong to another run.
            if step is not None and (kind == "saved" or step == event.get("step")):
                steps_by_folder[path] = step
    if steps_by_folder:
        return max(steps_by_folder, key=steps_by_folder.__getitem__)
    started_from = run_settings(run).get("steps", {}).get("resume")
    if isinstance(started_from, str) and started_from and step_of(Path(started_from)) is not None:
        return Path(started_from)
    return None


def describe_resume(run: reader.RecordedRun) -> tuple[MessageLike, MessageLike]:
    """Return the label of the button that continues an ended run, and the note to read before."""
    state = newest_state(run)
    words = Message("Resume from step {step}", step=step_of(state)) if state else "Start again"
    return words, FAILS_AGAIN_HINT if fails_again(run) else ""


def fails_again(run: reader.RecordedRun) -> bool:
    """Return whether a run has failed in a way that the same settings are likely to cause again."""
    error = run.facts.get("error")
    return run.state == "failed" and isinstance(error, Problem) and error.code == FAILS_AGAIN


def run_settings(run: reader.RecordedRun) -> JsonObject:
    config = run.facts.get("config")
    return {name: values for name, values in (config or {}).items() if isinstance(values, dict)}


def is_wanted(run: reader.RecordedRun, other_runs: Iterable[reader.RecordedRun]) -> bool:
    is_unfinished = run.state in ("interrupted", "stopped", "failed") and not run.active
    return is_unfinished and not any(other.facts.get("resumes") == run.id for other in other_runs)


def run_launch_options(run: reader.RecordedRun) -> JsonObject:
    options = run.facts.get("launch")
    return options if isinstance(options, dict) else {}


def run_toml(run: reader.RecordedRun) -> str:
    """Return the config file of a run started by the page, "" for others."""
    try:
        return read_outside_text(run.folder / layout.TOML)
    except ConfigError:
        return ""


def find_run_problems(run: reader.RecordedRun) -> Iterator[Message]:
    """Return what prevents resuming."""
    if run.active:
        yield Message("{run} is still {state}: stop it first.", run=run.name, state=Message(run.state))
    if not run.facts.get("script"):
        yield Message("{run} has no script in its record: start it again from its config.", run=run.name)
