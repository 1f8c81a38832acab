"""Find the run that another one resumes, and the step."""

from pathlib import Path

from library.config.json_types import JsonMapping, JsonObject, as_float
from library.config.outside_files import load_toml, read_regular
from library.config.problems import ConfigError
from library.files import STATE_FACTS
from library.runs import layout, registry


def step_of(state: Path) -> int | None:
    """Return the step after which a state was saved; None if it is no state."""
    try:
        step = layout.parse_facts(read_regular(state / STATE_FACTS, layout.MAX_RECORD)).get("current_step")
    except (OSError, ValueError):
        return None
    return step if isinstance(step, int) else None


def parent_run(folder: Path) -> tuple[Path, int | None] | None:
    """Return the folder of the run that the one in `folder` resumes, and the step, if known."""
    facts = layout.load_changed(str(folder / layout.RUN))
    state, at = _state(folder, facts), _before_first(folder)
    if at is None and state:  # read now, as the folder may contain another state later
        at = step_of(state)
    parent = _named_parent(facts) or (_maker(facts, state, at or 0) if state else None)
    if parent is None or not _began(parent) < _began(facts):  # a run resumes an older one, so there are no cycles
        return None
    return Path(parent["at"]), at


def _before_first(folder: Path) -> int | None:
    """Return the step before the first recorded step of a run."""
    try:
        with layout.open_record(folder / layout.PROGRESS) as file:
            first = next((line for line, _ in layout.event_lines(file) if b'"kind": "step"' in line), b"{}")
        step = layout.parse_facts(first).get("step")
    except (OSError, ValueError):
        return None
    return step - 1 if isinstance(step, int) else None


def _state(folder: Path, facts: JsonMapping) -> Path | None:
    """Return the state that a run resumes; a run prepared by the page has it only in its TOML."""
    config = facts.get("config")
    if not isinstance(config, dict):
        try:
            config = load_toml(folder / layout.TOML)
        except ConfigError:
            return None
    steps = config.get("steps")
    resume = (steps if isinstance(steps, dict) else config).get("resume")
    return Path(str(facts.get("folder") or ".")) / resume if isinstance(resume, str) and resume else None


def _named_parent(facts: JsonMapping) -> JsonObject | None:
    """Return the resumed run named by the page."""
    try:
        folder = registry.folder_of_run(facts["resumes"])
    except KeyError:
        return None
    return {**layout.load_changed(str(folder / layout.RUN)), "at": folder}


def _maker(facts: JsonMapping, state: Path, at: int) -> JsonObject | None:
    """Return the newest older run that wrote states of this name there, and got as far."""
    output_dir = state.parent.absolute()
    known_runs = [
        {**layout.load_changed(str(folder / layout.RUN)), "at": folder} for folder in registry.run_folders().values()
    ]
    candidates = [
        run
        for run in known_runs
        if run.get("output_dir") == str(output_dir)
        and state.name.startswith(f"{run.get('output_name')}-")
        and as_float(run.get("step")) >= at
        and _began(run) < _began(facts)
    ]
    return max(candidates, key=_began, default=None)


def _began(facts: JsonMapping) -> float:
    return as_float(facts.get("started"))
