"""Which run another one resumes, and from which step."""

import json
import tomllib
from pathlib import Path

from library.config.json_types import JsonMapping, JsonObject
from library.files import STATE_FACTS
from library.runs import layout, registry


def step_of(state: Path) -> int | None:
    """After which step a state was saved; None for what is no state."""
    try:
        step = json.loads((state / STATE_FACTS).read_text(encoding="utf-8"))["current_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def earlier(folder: Path) -> tuple[Path, int | None] | None:
    """The folder of the run that the one in `folder` goes on with, and after which step, where that is known."""
    facts = layout.load(folder / layout.RUN)
    state, at = _state(folder, facts), _before_first(folder)
    if at is None and state:  # later its folder may hold another state
        at = step_of(state)
    found = _named(facts) or (_maker(facts, state, at or 0) if state else None)
    if found is None or not _began(found) < _began(facts):  # a run resumes an older one, so there are no cycles
        return None
    return Path(found["at"]), at


def _before_first(folder: Path) -> int | None:
    """The step before the first that a run has told of."""
    try:
        with (folder / layout.PROGRESS).open(encoding="utf-8") as lines:
            first = next((line for line in lines if '"kind": "step"' in line and line.endswith("\n")), "{}")
        step = json.loads(first).get("step")
    except (OSError, ValueError, AttributeError):
        return None
    return step - 1 if isinstance(step, int) else None


def _state(folder: Path, facts: JsonMapping) -> Path | None:
    """The state that a run begins with; what the page has prepared says so in its TOML only."""
    config = facts.get("config")
    if not isinstance(config, dict):
        try:
            config = tomllib.loads((folder / layout.TOML).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
    steps = config.get("steps")
    given = (steps if isinstance(steps, dict) else config).get("resume")
    return Path(str(facts.get("folder") or ".")) / given if isinstance(given, str) and given else None


def _named(facts: JsonMapping) -> JsonObject | None:
    """The run that the page says is gone on with."""
    try:
        place = registry.folder(facts["resumes"])
    except KeyError:
        return None
    return {**layout.load(place / layout.RUN), "at": place}


def _maker(facts: JsonMapping, state: Path, at: int) -> JsonObject | None:
    """The newest older run that has written states of this name there, and got as far."""
    wanted = state.parent.absolute()
    every = [{**layout.load(place / layout.RUN), "at": place} for place in registry.folders().values()]
    found = [
        one
        for one in every
        if one.get("output_dir") == str(wanted)
        and state.name.startswith(f"{one.get('output_name')}-")
        and _number(one.get("step")) >= at
        and _began(one) < _began(facts)
    ]
    return max(found, key=_began, default=None)


def _began(facts: JsonMapping) -> float:
    return _number(facts.get("started"))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
