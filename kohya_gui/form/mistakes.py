"""Find the problems of a form's fields, which are red in the form and counted in messages."""

from collections.abc import Sequence
from pathlib import Path

from kohya_gui.form import adapter, typed_paths
from kohya_gui.form.form import SettingsForm, Submission
from kohya_gui.form.typed_paths import MODEL_OPTION
from kohya_gui.server import named_paths, paths
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Problem, either
from library.config.schema import options_of
from library.config.sections import AdapterRun
from library.families.recognition import index_of, proposed_options, recognise_file


def find_mistakes(
    form: SettingsForm, submission: Submission, roots: Sequence[Path], typing: str = ""
) -> tuple[list[Problem], JsonObject]:
    """Return the problems of a form's fields, and the type of its base model's file. `typing` is the option whose field
    is being edited: the beginning of an existing path is no mistake there."""
    config = form.lenient_config(submission)
    problems = form.wrong(submission)
    if isinstance(config, AdapterRun):
        problems += adapter.adapter_problems(config)
    problems += typed_paths.find_path_problems(options_of(type(config)), submission.values, roots, typing).values()
    model, model_problem = _base_model(form, submission, roots, typing == MODEL_OPTION)
    places = form.places(submission.family)
    return [problem for problem in (*problems, *filter(None, [model_problem])) if problem.option in places], model


def is_id_on_hub(form: SettingsForm, name: str, text: str) -> bool:
    return any(f.option.name == name and named_paths.is_hub_id(f.option, text) for f in form.fields)


def _base_model(
    form: SettingsForm, submission: Submission, roots: Sequence[Path], is_typed: bool
) -> tuple[JsonObject, Problem | None]:
    """Return the type of the base model's file, if the page may read it, or the problem with it."""
    text = str(submission.values.get(MODEL_OPTION) or "").strip()
    if not text or is_id_on_hub(form, MODEL_OPTION, text):
        return {}, None
    try:
        path = paths.allowed_path(text, roots, MODEL_OPTION)
    except ConfigError as error:
        problem = error.problems[0]
        return {}, None if is_typed and typed_paths.may_become_right(text, problem, roots) else problem
    try:
        if not path.suffix and not path.exists():
            raise ConfigError(Problem(MODEL_OPTION, ": {path} does not exist", path=path))
        if not path.is_dir():
            path = paths.existing_file(text, roots, (".safetensors",), MODEL_OPTION)
        recognition = recognise_file(path)
    except ConfigError as error:
        is_begun = is_typed and not path.exists() and typed_paths.is_begun(path)
        return {}, None if is_begun else _as_model_problem(error.problems[0])
    family = recognition.family
    if not family:
        template = ": the file is {kind}, not a model that is trained here."
        is_model = path.is_file() or index_of(path) or not is_typed  # the user may still be typing
        return {}, Problem(MODEL_OPTION, template, kind=recognition.words) if is_model else None
    if family not in form.configs:
        template = ": the file is {kind}; this tab trains {families}."
        names = either(form.families[name] for name in form.configs)
        return {}, Problem(MODEL_OPTION, template, kind=recognition.words, families=names)
    return {
        "path": text,
        "family": family,
        "words": recognition.words,
        "options": form.shown(family, recognition.options),
        "proposed": form.shown(family, proposed_options(path, recognition)),
    }, None


def _as_model_problem(problem: Problem) -> Problem:
    """Return a problem of a file, which names no option, as one of the base model."""
    return problem if problem.option else problem.replaced(option=MODEL_OPTION, template=f": {problem.template}")
