"""A config file that is loaded into a form: its values, what has to be fixed in it, and its sample prompts."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kohya_gui.form import imported_data, messages, presets, start_preset
from kohya_gui.form.form import SettingsForm, Submission
from library import importers
from library.config.building import working_fix
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Problem, ngettext
from library.config.schema import changed, flatten_sections, options_of
from library.importers import Imported
from library.runs import keys
from library.sampling import prompt_rows

PROMPTS = "sample_prompts"


def load_into_form(form: SettingsForm, path: Path, submission: Submission, roots: Sequence[Path]) -> JsonObject:
    """A config file -> what to fill into the form, and a message with all that is wrong in the file.

    Its mistakes are no reason to refuse it: each button that mends one changes what was loaded. Data sets of another
    trainer are written as a dataset file. Raises ConfigError for what cannot be read, and for another kind of training
    than the form is for.
    """
    source = importers.parse_file(path)
    if data := imported_data.only_data(source, path):
        return _data_alone(form, data, submission, path.name, roots)
    imported = _with_data(presets.import_fitting(path, form.configs, submission.family, roots), roots)
    config, found = imported.config, find_loaded_problems(imported)
    said = Message(
        "Loaded {name} for {family} ({changes}).",
        name=path.name,
        family=form.families[config.family],
        changes=settings_count(len(flatten_sections(changed(config)))),
    )
    places = form.places(config.family)
    shown = messages.loaded_html(said, found, places, lambda one: fix(form, imported, one), _notes(imported, found))
    base = {key: value for key, value in presets.base(path, roots).items() if key not in keys.ENVIRONMENT}
    # Of other programs several tables may have a key, as each tensor of a LoRA has a shape.
    named = [*flatten_sections(source, []), *imported.texts]
    filled = json.loads(form.fill(config, start_preset.loaded_as_start(path.name), named))
    more = {
        "base": base,
        "launch": form.shown_launch(importers.read_launch_settings(base)),
        "prompts": _prompt_rows_of(imported),
    }
    return {"message": shown, "fill": json.dumps({**filled, **more})}


def find_loaded_problems(imported: Imported) -> list[Problem]:
    """What has to be fixed in a config that was loaded: rules that it breaks, keys that are no options, and values that
    could not be read."""
    return [
        *imported.problems,
        *imported.unknown(),
        *(Problem(one.key, ": {text}", text=one.text) for one in _unread(imported)),
    ]


def fix(form: SettingsForm, imported: Imported, problem: Problem) -> Mapping[str, bool | str]:
    """What would mend a problem of a loaded config, as fields hold it: a key that is no option becomes the one that was
    probably meant, and a value that cannot be read that of the preset."""
    options = options_of(type(imported.config))
    if problem.option in {one.key for one in _unread(imported)}:
        return start_preset.value(form.tab, type(imported.config), problem.option)
    wanted = working_fix(problem, imported.config) if problem.option in options or not problem.option else problem.fix
    return form.shown(imported.config.family, wanted)


def _unread(imported: Imported) -> list[importers.KeyOutcome]:
    """The options whose values could not be read, and are at their defaults."""
    options = options_of(type(imported.config))
    return [one for one in imported.of("ignored") if one.key in options and options[one.key].kind != "secret"]


def _with_data(imported: Imported, roots: Sequence[Path]) -> Imported:
    """The same with the dataset file that its config names, which is written now."""
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
    """Data sets without a training: they become those of the form, which keeps everything else."""
    path = imported_data.write_imported_data(data.text, form.lenient_config(submission), roots)
    values = {**dict.fromkeys(imported_data.REPLACED, ""), imported_data.DATASET_OPTION: str(path)}
    said = Message("The data sets of {name} are in {path} now.", name=name, path=path)
    filled = {"family": submission.family, "values": form.shown(submission.family, values)}
    return {"message": messages.good(said, data.notes, undo=True), "fill": json.dumps(filled)}


def _notes(imported: Imported, problems: list[Problem]) -> list[MessageLike]:
    """What became of the other keys."""
    said = {problem.option for problem in problems}
    rest = tuple(
        outcome
        for outcome in imported.outcomes
        if outcome.kind not in ("unknown", "ignored") or outcome.key not in said
    )
    notes = presets.import_notes(replace(imported, outcomes=rest, problems=()))
    if imported_data.DATASET_OPTION in imported.texts and (file := imported.config.data.dataset_config):
        notes.insert(0, Message("The data sets are in {path}.", path=file))
    return notes


def _prompt_rows_of(imported: Imported) -> list[dict[str, str]]:
    """The sample prompts that a file of another trainer holds, as rows of the prompt form, which writes their file."""
    if PROMPTS not in imported.texts:
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.txt"
        path.write_text(imported.texts[PROMPTS], encoding="utf-8")
        return prompt_rows.prompt_rows_of_file(path)


def settings_count(count: int) -> Message:
    """How many settings a file holds, in words."""
    return ngettext("{count} setting differs from the defaults", "{count} settings differ from the defaults", count)
