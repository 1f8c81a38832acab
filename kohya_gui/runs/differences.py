"""The settings in which runs differ, from each other or from a preset."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kohya_gui.form import compare
from library.config.json_types import JsonObject
from library.config.problems import ConfigError
from library.recipes import preset_files
from library.runs import overview, reader

MAX_COMPARED = 8  # runs beside each other
MAX_CHOICES = 100  # other runs to compare one with


def choices_for(run: reader.RecordedRun) -> JsonObject:
    """Return the choices to compare a run's settings with: presets, other runs, and the initial choice."""
    summary = overview.summary(run)
    presets = [preset for preset in preset_files.presets_of_kind(summary.kind) if not preset.is_profile]
    family = family_folder(run)
    presets.sort(key=lambda preset: preset.family != family)
    others = [other for other in reader.runs() if other.id != run.id][:MAX_CHOICES]
    own = [preset.id for preset in presets if preset.id == summary.preset or preset.family == family]
    before = next((other.id for other in others if _comes_before(other, run)), "")
    first = f"preset:{summary.preset}" if summary.preset in own else f"run:{before}" if before else ""
    return {
        "presets": [[f"preset:{preset.id}", preset.title] for preset in presets],
        "runs": [[f"run:{other.id}", compare.run_title(other)] for other in others],
        "first": first or next((f"preset:{name}" for name in own), ""),
    }


def _comes_before(other: reader.RecordedRun, run: reader.RecordedRun) -> bool:
    started = other.facts.get("started") or 0
    return other.facts.get("script") == run.facts.get("script") and started < (run.facts.get("started") or 0)


def family_folder(run: reader.RecordedRun) -> str:
    return overview.family_folder(str(run.facts.get("script") or ""))


def differences(keys: Sequence[str], roots: Sequence[Path]) -> JsonObject:
    """Return titles, and for each option with different values its name, its label and the values of all."""
    if not 2 <= len(keys) <= MAX_COMPARED:
        raise ConfigError("Choose two runs or more to compare their settings, at most {most}.", most=MAX_COMPARED)
    for key in keys:
        if key.partition(":")[0] not in ("run", "preset"):
            raise ConfigError("There is no such choice: load the page again.")
    sides = [compare.config_of_key(key, _no_form, roots) for key in keys]
    rows = compare.compare_settings(keys, [config for _, config in sides], roots)
    return {"titles": [title for title, _ in sides], "rows": rows}


def _no_form() -> Any:
    raise ConfigError("There is no such choice: load the page again.")
