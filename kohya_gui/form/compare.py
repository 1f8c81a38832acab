"""The differences between two settings: the form, a run, a preset, or a settings file of any trainer."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kohya_gui.form import presets
from kohya_gui.server import paths
from library import importers
from library.config.building import build_config
from library.config.choice_words import CHOICE_WORDS
from library.config.formats import read_toml
from library.config.problems import ConfigError, Message, MessageLike
from library.config.schema import option_values, options_of
from library.config.values import Option
from library.families import RUNS, config_class, facts_of
from library.recipes import preset_files
from library.runs import dates, file_contents, job_files, layout, queue_rows, reader
from library.runs.file_contents import FileContent
from library.trainings import reopening

FORM = "form"
RUNS_SHOWN = 30
CONTENT_SUFFIXES = (".txt", ".toml", ".json")
NOT_SET = "not set"


def comparable_configs(trains: str) -> list[tuple[MessageLike, str]]:
    """Return the settings that can be compared: title and key."""
    runs = [(run_title(run), f"run:{run.id}") for run in reader.runs()[:RUNS_SHOWN]]
    ready = [(p.title, f"preset:{p.id}") for p in preset_files.presets_of_kind(trains) if not p.is_profile]
    return [("This form", FORM), *runs, *ready]


def run_title(run: reader.RecordedRun) -> Message:
    when = dates.moment(run.facts.get("started", 0))
    return Message("{name} · {when}", name=run.name, when=when)


def config_of_key(key: str, form: Callable[[], Any], roots: Sequence[Path]) -> tuple[MessageLike, Any]:
    """Return the title and config of a key. Any other text is taken as the path of a settings file."""
    kind, _, name = key.partition(":")
    if key == FORM:
        return "This form", form()
    if kind == "run" and layout.is_run_id(name):
        try:
            run = reader.find_run(name)
        except KeyError as error:
            raise ConfigError("there is no run called {run_id}", run_id=name) from error
        return run_title(run), reopening.started_config(run).config
    if kind == "preset":
        preset = preset_files.by_id(name)
        if preset is None:
            raise ConfigError("there is no preset called {name}", name=name)
        script = next(s for s in facts_of(preset.family).scripts if config_class(s).kind == preset.kind)
        return preset.title, build_config(config_class(script), read_toml(preset.path), notes=[])
    path = paths.readable(key, roots, importers.SUFFIXES)
    runs = {script: config_class(script) for script in RUNS}
    return path.name, importers.import_file(path, runs, may_read=presets.readable_below(roots)).config


def contents_of_key(key: str, config: Any, roots: Sequence[Path]) -> dict[str, FileContent]:
    """Return the contents of the prompt and data set files that a key's settings name, by option; of a run, those at
    its start."""
    kind, _, name = key.partition(":")
    if kind == "run" and layout.is_run_id(name):
        values = queue_rows.run_contents(reader.find_run(name))
        return {option: value for option, value in values.items() if isinstance(value, FileContent)}
    contents = {}
    for option, value in option_values(config).items():
        if option not in job_files.COPIED or not value:
            continue
        with contextlib.suppress(ConfigError):  # compare a file that the page may not show by its path
            path = paths.existing_file(str(value), roots, CONTENT_SUFFIXES, option)
            contents |= {option: content} if (content := file_contents.content_of(path)) else {}
    return contents


def content_rows(configs: Sequence[Any], contents: Sequence[Mapping[str, FileContent]]) -> dict[str, list[MessageLike]]:
    """Return the rows of files that are compared by their contents, by option, each as in `difference_rows`; empty for
    files with equal contents."""
    rows: dict[str, list[MessageLike]] = {}
    for option in job_files.COPIED:
        plain = [option_values(config).get(option) for config in configs]
        values = file_contents.make_comparable([f.get(option, value) for f, value in zip(contents, plain, strict=True)])
        words = file_contents.describe_difference(option, values)
        if not words:
            continue
        texts = [NOT_SET if text is None else text for text in file_contents.texts_beside(values)]
        differ = len({file_contents.comparable(value) for value in values}) > 1
        rows[option] = [option, Message(words).capitalized(), *texts] if differ else []
    return rows


def compare_settings(keys: Sequence[str], configs: Sequence[Any], roots: Sequence[Path]) -> list[list[MessageLike]]:
    """Return a row for each option that differs from the first of some settings: its name, its label, and its value in
    all.

    Files of prompts and data sets are compared by their contents, and come first.
    """
    contents = [contents_of_key(key, config, roots) for key, config in zip(keys, configs, strict=True)]
    of_files = content_rows(configs, contents)
    first, *others = configs
    rows: dict[str, list[MessageLike]] = {}
    for at, other in enumerate(others):
        for name, label, value, other_value in difference_rows(first, other):
            if name not in of_files:
                rows.setdefault(name, [name, label, *[value] * len(configs)])[3 + at] = other_value
    return [*filter(None, of_files.values()), *rows.values()]


def difference_rows(first: Any, second: Any) -> list[list[str]]:
    """Return option, label and both values as text, for all options that differ."""
    options = {**options_of(type(second)), **options_of(type(first))}
    return [
        [
            name,
            options[name].label,
            _value_in_words(options[name], first_text),
            _value_in_words(options[name], second_text),
        ]
        for name, first_text, second_text in importers.compare_configs(first, second)
    ]


def _value_in_words(option: Option, text: str) -> str:
    if option.type is bool and text in CHOICE_WORDS:
        return CHOICE_WORDS[text]
    return text if option.many else option.word(text)
