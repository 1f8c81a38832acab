"""The section about compiling in plain words: the profiles as buttons, and the effect of the current settings."""

from collections.abc import Iterator
from html import escape

from kohya_gui.panel import history
from library import families
from library.config import compile_modes
from library.config.formats import read_toml
from library.config.json_types import JsonObject
from library.config.problems import Message, MessageLike, counted
from library.config.run_config import RunConfig
from library.recipes import preset_files
from library.runs import layout, reader

MAX_RUNS_SEARCHED = 30  # earlier runs to look through


def compile_section() -> str:
    """Return the start of the section: the sentence and the profiles."""
    buttons = "".join(
        f'<button type="button" class="profile" data-preset="{preset.id}"><b>{escape(name(preset))}</b>'
        f"<small>{escape(str(preset.description.short()))}</small></button>"
        for preset in preset_files.profiles()
    )
    lines = '<p class="outlook" role="status"></p><p class="compile-log" hidden></p>'
    return f'<div class="compiling">{lines}<div class="profiles">{buttons}</div></div>'


def name(preset: preset_files.Preset) -> str:
    # Balanced, of "Compile, balanced: ..."
    title = str(preset.title)
    return title.partition(", ")[2].capitalize() or title


def running() -> MessageLike:
    """Return what the running training has compiled; "" if there is nothing to show."""
    run = reader.active()
    if run is None:
        return ""
    progress = reader.progress(run.folder).update()
    line = history.compile_totals(run, progress, list(progress.events.get("compile", ())))
    return Message("{run} now: {line}", run=run.name, line=line) if line else ""


def outlook(config: RunConfig) -> MessageLike:
    """Return the outlook on compiling for a training with this config, in one line."""
    options = config.compile
    if not options.compile:
        return "Compiling is off. Balanced suits most trainings of more than a few minutes."
    if options.compile_backend in ("eager", "aot_eager"):
        return Message(
            "{backend} generates no code: it finds mistakes, and makes nothing faster.",
            backend=options.compile_backend,
        )
    # Without a run on this machine, use the family's figures.
    graphs, seconds, run = newest_compiling(config) or (*families.compiling_cost(config), "")
    if options.compile_scope == "model" and not run:
        return "One graph of the whole model, kept for next time; how long that takes is known after a first run."
    if compile_modes.tunes_kernels(options) and not run:
        seconds *= 8  # tuning times several kernels for each operation
    when = Message("for each image size" if options.compile_dynamic == "false" else "once")
    basis = Message("as in {run}", run=run) if run else Message("an estimate")
    template = "{graphs}, about {time} {when}, kept for next time ({basis})."
    return Message(template, graphs=counted(graphs, "graph"), time=rounded_duration(seconds), when=when, basis=basis)


def newest_compiling(config: RunConfig) -> tuple[int, float, str] | None:
    """Return graphs and seconds of the newest run that compiled the same family in the same way, and its id."""
    default = type(config.compile)()
    for run, compile_facts in _earlier(config.script):
        try:
            settings = read_toml(run.folder / layout.TOML)
        except ValueError:
            continue
        # A record has only the differences from the defaults.
        if all(
            settings.get(key, getattr(default, key)) == getattr(config.compile, key) for key in compile_modes.TIMED_BY
        ):
            return int(compile_facts["num_graphs"]), float(compile_facts.get("seconds") or 0), run.id
    return None


def _earlier(script: str) -> Iterator[tuple[reader.RecordedRun, JsonObject]]:
    for run in reader.runs()[:MAX_RUNS_SEARCHED]:
        compile_facts = run.facts.get("compile") or {}
        if run.facts.get("script") == script and compile_facts.get("num_graphs"):
            yield run, compile_facts


def rounded_duration(seconds: float) -> Message:
    short = seconds < 90
    return Message("{count} s" if short else "{count} min", count=f"{seconds if short else seconds / 60:.0f}")
