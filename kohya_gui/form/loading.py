"""Loading a config file into a form: its values, its problems, and its sample prompts."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kohya_gui.form import imported_data, messages, presets, start_preset
from kohya_gui.form.form import SettingsForm, Submission
from kohya_gui.form.mistakes import find_mistakes
from kohya_gui.server import paths
from library import importers
from library.config.building import working_fix
from library.config.commented_toml import to_commented_toml
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import read_settings_text
from library.config.problems import ConfigError, Message, MessageLike, Problem, ngettext
from library.config.schema import changed, flatten_sections, option_values, options_of
from library.importers import Imported
from library.importers.result import WITHOUT_EFFECT, as_message
from library.runs import keys
from library.sampling import prompt_rows

PROMPTS = "sample_prompts"


LOADED = "Loaded {name} for {family} ({changes})."


def load_into_form(
    form: SettingsForm, path: Path, submission: Submission, roots: Sequence[Path], template: str = LOADED
) -> JsonObject:
    """Return a config file's values for the form, and a message with all its problems.

    Mistakes do not prevent loading: each button that fixes one changes what was loaded. Data sets of another trainer
    are saved as a dataset file. Raises ConfigError for files that cannot be parsed, and for another kind of training
    than the form's.
    """
    with presets.without_folders():
        source = importers.parse_file(path)
    if data := imported_data.only_data(source, path):
        return _data_alone(form, data, submission, path.name, roots)
    imported = _with_data(presets.import_fitting(path, form.configs, submission.family, roots), roots)
    base = {key: value for key, value in presets.base(path, roots).items() if key not in keys.ENVIRONMENT}
    launch = form.shown_launch({**importers.read_launch_settings(base), **imported.launch})
    config = imported.config
    problems = config_problems(form, imported, roots, {**submission.launch, **launch})
    problems = [_with_place_beside(problem, imported, path.parent, roots) for problem in problems]
    sentence = Message(
        template,
        name=path.name,
        family=form.families[config.family],
        changes=settings_count(len(flatten_sections(changed(config)))),
    )
    places = form.places(config.family)
    message = messages.loaded_html(
        sentence, problems, places, lambda problem: fix(form, imported, problem), _notes(imported, problems)
    )
    # In other programs' files, several tables may have the same key, such as the shape of each tensor.
    named = [*flatten_sections(source, []), *imported.texts]
    filled = json.loads(form.fill(config, start_preset.loaded_as_start(path.name), named))
    more = {
        "base": base,
        "launch": launch,
        "prompts": _prompt_rows_of(imported),
        "source": _source_of(path, imported),
    }
    return {"message": message, "fill": json.dumps({**filled, **more})}


def _source_of(path: Path, imported: Imported) -> str:
    """Return the text of a file of this trainer, whose comments are kept when the form is saved; without tokens."""
    is_ours = path.suffix.lower() == ".toml" and imported.program == importers.FLAT
    return to_commented_toml(read_settings_text(path).text, imported.config) if is_ours else ""


def config_problems(
    form: SettingsForm, imported: Imported, roots: Sequence[Path], launch: JsonMapping
) -> list[Problem]:
    """Return the problems of a loaded config: broken rules, unknown keys, values that could not be parsed, and all else
    that the form marks at a field, such as files that do not exist."""
    of_file = [
        *imported.problems,
        *imported.missing(),
        *imported.unknown(),
        *(Problem(outcome.key, ": {text}", fix=outcome.fix, text=outcome.text) for outcome in _unread(imported)),
    ]
    named, config = {problem.option for problem in of_file}, imported.config
    filled = Submission(config.family, form.shown(config.family, option_values(config)), launch)
    in_form, _ = find_mistakes(form, filled, roots)
    return [*of_file, *(problem for problem in in_form if problem.option not in named)]


def _with_place_beside(problem: Problem, imported: Imported, folder: Path, roots: Sequence[Path]) -> Problem:
    """The problem of a relative path that is wrong here, with the path beside the config if there is one."""
    option = options_of(type(imported.config)).get(problem.option)
    text = str(option_values(imported.config).get(problem.option) or "")
    if problem.fix or not option or option.kind not in ("file", "folder") or not text or os.path.isabs(text):
        return problem
    try:
        beside = paths.allowed_path(str(folder / text), roots, problem.option)
    except ConfigError:
        return problem
    if not beside.exists():
        return problem
    template = ": {text} is relative to {folder}, where the page was started; beside the config there is {path}"
    facts = {"text": text, "folder": Path.cwd(), "path": beside}
    return Problem(problem.option, template, fix={problem.option: str(beside)}, **facts)


def fix(form: SettingsForm, imported: Imported, problem: Problem) -> Mapping[str, bool | str]:
    """Return the fix for a problem of a loaded config, as values of fields: an unknown key becomes the option that was
    probably meant, and a value that cannot be parsed becomes what it resembles, else the preset's."""
    options = options_of(type(imported.config))
    if not problem.fix and problem.option in {outcome.key for outcome in _unread(imported)}:
        return start_preset.value(form.tab, type(imported.config), problem.option)
    values = working_fix(problem, imported.config) if problem.option in options or not problem.option else problem.fix
    return form.shown(imported.config.family, values)


def _unread(imported: Imported) -> list[importers.KeyOutcome]:
    """Return the options whose values could not be parsed, and are at their defaults."""
    options = options_of(type(imported.config))
    return [
        outcome
        for outcome in imported.of("ignored")
        if outcome.is_refused
        and outcome.key in options
        and options[outcome.key].kind != "secret"
        and as_message(outcome.text).template != WITHOUT_EFFECT
    ]


def _with_data(imported: Imported, roots: Sequence[Path]) -> Imported:
    """Return the same config with a new dataset file."""
    text = imported.texts.get(imported_data.DATASET_OPTION)
    if not text:
        return imported
    try:
        return imported.with_files(
            {imported_data.DATASET_OPTION: str(imported_data.write_imported_data(text, imported.config, roots))}
        )
    except ConfigError as error:
        return replace(imported, problems=(*imported.problems, *error.problems))


def _data_alone(
    form: SettingsForm, data: imported_data.ConvertedData, submission: Submission, name: str, roots: Sequence[Path]
) -> JsonObject:
    """Data sets without a training: they replace those of the form, which keeps everything else."""
    path = imported_data.write_imported_data(data.text, form.lenient_config(submission), roots)
    values = {**dict.fromkeys(imported_data.REPLACED, ""), imported_data.DATASET_OPTION: str(path)}
    sentence = Message("The data sets of {name} are in {path} now.", name=name, path=path)
    filled = {"family": submission.family, "values": form.shown(submission.family, values)}
    return {"message": messages.good(sentence, data.notes, undo=True), "fill": json.dumps(filled)}


def _notes(imported: Imported, problems: list[Problem]) -> list[MessageLike]:
    """Return notes about the other keys."""
    reported_options = {problem.option for problem in problems}
    other_outcomes = tuple(
        outcome
        for outcome in imported.outcomes
        if outcome.kind not in ("unknown", "ignored") or outcome.key not in reported_options
    )
    notes = presets.import_notes(replace(imported, outcomes=other_outcomes, problems=()))
    if imported_data.DATASET_OPTION in imported.texts and (file := imported.config.data.dataset_config):
        notes.insert(0, Message("The data sets are in {path}.", path=file))
    return notes


def _prompt_rows_of(imported: Imported) -> list[dict[str, str]]:
    """Return the sample prompts in another trainer's file, as rows of the prompt form, which saves them."""
    if PROMPTS not in imported.texts:
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.txt"
        path.write_text(imported.texts[PROMPTS], encoding="utf-8")
        return prompt_rows.prompt_rows_of_file(path)


def settings_count(count: int) -> Message:
    return ngettext("{count} setting differs from the defaults", "{count} settings differ from the defaults", count)
