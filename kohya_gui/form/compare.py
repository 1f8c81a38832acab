"""The differences between two settings: the form, a run, a preset, or a settings file of any trainer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kohya_gui.form import presets
from kohya_gui.i18n import dates
from kohya_gui.server import paths
from library import importers
from library.config.building import build, draft
from library.config.formats import read_toml
from library.config.problems import ConfigError, Message, MessageLike
from library.config.schema import flat, options
from library.families import RUNS, config_class, facts
from library.recipes import preset_files
from library.runs import layout, reader

FORM = "form"
RUNS_SHOWN = 30


def choices(trains: str) -> list[tuple[MessageLike, str]]:
    """The settings that can be compared: title and key."""
    runs = [(_named(run), f"run:{run.id}") for run in reader.runs()[:RUNS_SHOWN]]
    ready = [(p.title, f"preset:{p.id}") for p in preset_files.presets(trains) if not p.is_profile]
    return [("This form", FORM), *runs, *ready]


def _named(run: reader.RecordedRun) -> Message:
    when = dates.moment(run.facts.get("started", 0))
    return Message("{name} · {when}", name=run.facts.get("output_name") or run.id, when=when)


def config_of(key: str, form: Callable[[], Any], roots: Sequence[Path]) -> tuple[str, Any]:
    """The title and config of a key. Any other text is taken as the path of a settings file."""
    kind, _, name = key.partition(":")
    if key == FORM:
        return "This form", form()
    if kind == "run" and layout.is_id(name):
        return name, _of_run(name)
    if kind == "preset":
        found = preset_files.by_id(name)
        if found is None:
            raise ConfigError("there is no preset called {name}", name=name)
        script = next(s for s in facts(found.family).scripts if config_class(s).kind == found.kind)
        return found.title, build(config_class(script), read_toml(found.path), notes=[])
    path = paths.readable(key, roots, importers.SUFFIXES)
    runs = {script: config_class(script) for script in RUNS}
    return path.name, importers.load(path, runs, may_read=presets.readable_below(roots)).config


def _of_run(run_id: str) -> Any:
    try:
        run = reader.run(run_id)
        config, path = config_class(str(run.facts.get("script"))), run.folder / layout.TOML
        # A run started in a shell has no TOML, but its record has the differences from the defaults.
        values = read_toml(path) if path.is_file() else flat(run.facts.get("config") or {})
    except KeyError as error:
        raise ConfigError("there is no run called {run_id}", run_id=run_id) from error
    known, read = options(config), {}
    for name, value in values.items():  # an older version may have had other options
        if name in known:
            read[name] = known[name].read(value)
    return draft(config, read)


def rows(first: Any, second: Any) -> list[list[str]]:
    """Option, label and both values as text, for all options that differ."""
    known = {**options(type(second)), **options(type(first))}
    return [
        [name, known[name].label if name in known else name, str(one), str(two)]
        for name, one, two in importers.differences(first, second)
    ]
