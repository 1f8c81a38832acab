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
from library.config.schema import changed, flat, options
from library.importers import Imported
from library.runs import keys
from library.sampling import prompt_rows

PROMPTS = "sample_prompts"


def loaded(form: SettingsForm, path: Path, given: Submission, roots: Sequence[Path]) -> JsonObject:
    """A config file -> what to fill into the form, and a message with all that is wrong in the file.

    Its mistakes are no reason to refuse it: each button that mends one changes what was loaded. Data sets of another
    trainer are written as a dataset file. Raises ConfigError for what cannot be read, and for another kind of training
    than the form is for.
    """
    source = importers.parse(path)
    if data := imported_data.only_data(source, path):
        return _data_alone(form, data, given, path.name, roots)
    made = _with_data(presets.fitting(path, form.configs, given.family, roots), roots)
    config, found = made.config, problems(made)
    said = Message(
        "Loaded {name} for {family} ({changes}).",
        name=path.name,
        family=form.families[config.family],
        changes=differing(len(flat(changed(config)))),
    )
    places = form.places(config.family)
    shown = messages.loaded(said, found, places, lambda one: fix(form, made, one), _notes(made, found))
    base = {key: value for key, value in presets.base(path, roots).items() if key not in keys.ENVIRONMENT}
    # Of other programs several tables may have a key, as each tensor of a LoRA has a shape.
    named = [*flat(source, []), *made.texts]
    filled = json.loads(form.fill(config, start_preset.loaded(path.name), named))
    more = {"base": base, "launch": form.shown_launch(importers.launch(base)), "prompts": _prompts(made)}
    return {"message": shown, "fill": json.dumps({**filled, **more})}


def problems(made: Imported) -> list[Problem]:
    """What has to be fixed in a config that was loaded: rules that it breaks, keys that are no options, and values that
    could not be read."""
    return [*made.problems, *made.unknown(), *(Problem(one.key, ": {text}", text=one.text) for one in _unread(made))]


def fix(form: SettingsForm, made: Imported, problem: Problem) -> Mapping[str, bool | str]:
    """What would mend a problem of a loaded config, as fields hold it: a key that is no option becomes the one that was
    probably meant, and a value that cannot be read that of the preset."""
    known = options(type(made.config))
    if problem.option in {one.key for one in _unread(made)}:
        return start_preset.value(form.tab, type(made.config), problem.option)
    wanted = working_fix(problem, made.config) if problem.option in known or not problem.option else problem.fix
    return form.shown(made.config.family, wanted)


def _unread(made: Imported) -> list[importers.KeyOutcome]:
    """The options whose values could not be read, and are at their defaults."""
    known = options(type(made.config))
    return [one for one in made.of("ignored") if one.key in known and known[one.key].kind != "secret"]


def _with_data(made: Imported, roots: Sequence[Path]) -> Imported:
    """The same with the dataset file that its config names, which is written now."""
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
    """Data sets without a training: they become those of the form, which keeps everything else."""
    path = imported_data.write_new(data.text, form.lenient_config(given), roots)
    values = {**dict.fromkeys(imported_data.REPLACED, ""), imported_data.OPTION: str(path)}
    said = Message("The data sets of {name} are in {path} now.", name=name, path=path)
    filled = {"family": given.family, "values": form.shown(given.family, values)}
    return {"message": messages.good(said, data.notes, undo=True), "fill": json.dumps(filled)}


def _notes(made: Imported, found: list[Problem]) -> list[MessageLike]:
    """What became of the other keys."""
    said = {problem.option for problem in found}
    rest = tuple(one for one in made.outcomes if one.kind not in ("unknown", "ignored") or one.key not in said)
    notes = presets.report(replace(made, outcomes=rest, problems=()))
    if imported_data.OPTION in made.texts and (file := made.config.data.dataset_config):
        notes.insert(0, Message("The data sets are in {path}.", path=file))
    return notes


def _prompts(made: Imported) -> list[dict[str, str]]:
    """The sample prompts that a file of another trainer holds, as rows of the prompt form, which writes their file."""
    if PROMPTS not in made.texts:
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.txt"
        path.write_text(made.texts[PROMPTS], encoding="utf-8")
        return prompt_rows.rows(path)


def differing(count: int) -> Message:
    """How many settings a file holds, in words."""
    return ngettext("{count} setting differs from the defaults", "{count} settings differ from the defaults", count)
