"""The section about compiling in plain words: the profiles as buttons, and the effect of the current settings."""

from collections.abc import Iterator
from html import escape

from kohya_gui.panel import history
from library import families
from library.config.formats import read_toml
from library.config.json_types import JsonObject
from library.config.problems import Message, MessageLike, counted
from library.config.run_config import RunConfig
from library.recipes import preset_files
from library.runs import layout, reader

MAX_RUNS_SEARCHED = 30  # earlier runs to look through
# Options that the seconds depend on.
TIMED_BY = ("compile_backend", "compile_mode", "compile_dynamic", "compile_blocks", "compile_scope")


def compile_section() -> str:
    """The start of the section: the sentence and the profiles."""
    made = "".join(
        f'<button type="button" class="profile" data-preset="{preset.id}"><b>{escape(name(preset))}</b>'
        f"<small>{escape(about(preset))}</small></button>"
        for preset in preset_files.profiles()
    )
    lines = '<p class="outlook" role="status"></p><p class="compile-log" hidden></p>'
    return f'<div class="compiling">{lines}<div class="profiles">{made}</div></div>'


def name(preset: preset_files.Preset) -> str:
    """The short name of a profile: Balanced, of "Compile, balanced: ..."."""
    return preset.title.partition(", ")[2].capitalize() or preset.title


def about(preset: preset_files.Preset) -> str:
    """The sentence after the title."""
    rest = preset.sentence.partition(": ")[2]
    return rest[:1].upper() + rest[1:] if rest.split(",")[0].split(" ")[0].isalpha() else rest


def running() -> MessageLike:
    """What the running training has compiled; "" if there is nothing to show."""
    run = reader.active()
    if run is None:
        return ""
    progress = reader.progress(run.folder).update()
    line = history.compile_totals(run, progress, list(progress.events.get("compile", ())))
    return Message("{run} now: {line}", run=run.facts.get("output_name") or run.id, line=line) if line else ""


def outlook(config: RunConfig) -> MessageLike:
    """The outlook on compiling for a training with this config, in one line."""
    options = config.compile
    if not options.compile:
        return "Compiling is off. Balanced suits most trainings of more than a few minutes."
    if options.compile_backend in ("eager", "aot_eager"):
        return Message(
            "{backend} generates no code: it finds mistakes, and makes nothing faster.",
            backend=options.compile_backend,
        )
    # Without a run on this machine, use the family's figures.
    graphs, seconds, run = remembered(config) or (*families.compiling(config), "")
    if options.compile_scope == "model" and not run:
        return "One graph of the whole model, kept for next time; how long that takes is known after a first run."
    if options.compile_mode.startswith("max-autotune") and not run:
        seconds *= 8
    when = Message("for each image size" if options.compile_dynamic == "false" else "once")
    basis = Message("as in {run}", run=run) if run else Message("an estimate")
    template = "{graphs}, about {time} {when}, kept for next time ({basis})."
    return Message(template, graphs=counted(graphs, "graph"), time=duration(seconds), when=when, basis=basis)


def remembered(config: RunConfig) -> tuple[int, float, str] | None:
    """Graphs and seconds of the newest run that compiled the same family in the same way, and its id."""
    default = type(config.compile)()
    for run, made in _earlier(config.script):
        try:
            theirs = read_toml(run.folder / layout.TOML)
        except ValueError:
            continue
        # A record has only the differences from the defaults.
        if all(theirs.get(key, getattr(default, key)) == getattr(config.compile, key) for key in TIMED_BY):
            return int(made["num_graphs"]), float(made.get("seconds") or 0), run.id
    return None


def _earlier(script: str) -> Iterator[tuple[reader.RecordedRun, JsonObject]]:
    for run in reader.runs()[:MAX_RUNS_SEARCHED]:
        made = run.facts.get("compile") or {}
        if run.facts.get("script") == script and made.get("num_graphs"):
            yield run, made


def duration(seconds: float) -> Message:
    """Seconds in words: 25 s, 3 min."""
    short = seconds < 90
    return Message("{count} s" if short else "{count} min", count=f"{seconds if short else seconds / 60:.0f}")
