"""Loading a config file into a form: its values, its problems, and its sample prompts."""

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
from library.config.schema import changed, flat, options
from library.importers import Imported
from library.runs import keys
from library.sampling import prompt_rows

PROMPTS = "sample_prompts"


def loaded(form: SettingsForm, path: Path, given: Submission, roots: Sequence[Path]) -> JsonObject:
    """A config file -> values for the form, and a message with all problems of the file.

    Mistakes do not prevent loading: each button that fixes one changes what was loaded. Data sets of another trainer
    are saved as a dataset file. Raises ConfigError for files that cannot be parsed, and for another kind of training
    than the form's.
    """
    source = importers.parse(path)
    if data := imported_data.only_data(source, path):
        return _data_alone(form, data, given, path.name, roots)
    made = _with_data(presets.fitting(path, form.configs, given.family, roots), roots)
    config, found = made.config, config_problems(made)
    said = Message(
        "Loaded {name} for {family} ({changes}).",
        name=path.name,
        family=form.families[config.family],
        changes=differing(len(flat(changed(config)))),
    )
    places = form.places(config.family)
    shown = messages.loaded(said, found, places, lambda one: fix(form, made, one), _notes(made, found))
    base = {key: value for key, value in presets.base(path, roots).items() if key not in keys.ENVIRONMENT}
    # In other programs' files, several tables may have the same key, such as the shape of each tensor.
    named = [*flat(source, []), *made.texts]
    filled = json.loads(form.fill(config, start_preset.loaded(path.name), named))
    more = {"base": base, "launch": form.shown_launch(importers.launch(base)), "prompts": _prompts(made)}
    return {"message": shown, "fill": json.dumps({**filled, **more})}


def config_problems(made: Imported) -> list[Problem]:
    """The problems of a loaded config: broken rules, unknown keys, and values that could not be parsed."""
    return [*made.problems, *made.unknown(), *(Problem(one.key, ": {text}", text=one.text) for one in _unread(made))]


def fix(form: SettingsForm, made: Imported, problem: Problem) -> Mapping[str, bool | str]:
    """The fix for a problem of a loaded config, as values of fields: an unknown key becomes the option that was
    probably meant, and a value that cannot be parsed becomes the preset's."""
    known = options(type(made.config))
    if problem.option in {one.key for one in _unread(made)}:
        return start_preset.value(form.tab, type(made.config), problem.option)
    wanted = working_fix(problem, made.config) if problem.option in known or not problem.option else problem.fix
    return form.shown(made.config.family, wanted)


def _unread(made: Imported) -> list[importers.KeyOutcome]:
    """The options whose values could not be parsed, and are at their defaults."""
    known = options(type(made.config))
    return [one for one in made.of("ignored") if one.key in known and known[one.key].kind != "secret"]


def _with_data(made: Imported, roots: Sequence[Path]) -> Imported:
    """The same config with a new dataset file."""
    text = made.texts.get(imported_data.OPTION)
    if not text:
        return made
    try:
        return made.with_files({imported_data.OPTION: str(imported_data.write_new(text, made.config, roots))})
    except ConfigError as error:
        return replace(made, problems=(*made.problems, *error.problems))


def _data_alone(
    form: SettingsForm, data: imported_data.ConvertedData, given: Submission, name: str, roots: Sequence[Path]
) -> JsonObject:
    """Data sets without a training: they replace those of the form, which keeps everything else."""
    path = imported_data.write_new(data.text, form.lenient_config(given), roots)
    values = {**dict.fromkeys(imported_data.REPLACED, ""), imported_data.OPTION: str(path)}
    said = Message("The data sets of {name} are in {path} now.", name=name, path=path)
    filled = {"family": given.family, "values": form.shown(given.family, values)}
    return {"message": messages.good(said, data.notes, undo=True), "fill": json.dumps(filled)}


def _notes(made: Imported, found: list[Problem]) -> list[MessageLike]:
    """Notes about the other keys."""
    said = {problem.option for problem in found}
    rest = tuple(one for one in made.outcomes if one.kind not in ("unknown", "ignored") or one.key not in said)
    notes = presets.report(replace(made, outcomes=rest, problems=()))
    if imported_data.OPTION in made.texts and (file := made.config.data.dataset_config):
        notes.insert(0, Message("The data sets are in {path}.", path=file))
    return notes


def _prompts(made: Imported) -> list[dict[str, str]]:
    """The sample prompts in another trainer's file, as rows of the prompt form, which saves them."""
    if PROMPTS not in made.texts:
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.txt"
        path.write_text(made.texts[PROMPTS], encoding="utf-8")
        return prompt_rows.rows(path)


def differing(count: int) -> Message:
    """The number of settings in a file, in words."""
    return ngettext("{count} setting differs from the defaults", "{count} settings differ from the defaults", count)
