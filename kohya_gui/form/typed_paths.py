"""Checks of the files and folders that a form names, while the user types."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from kohya_gui.server import named_paths, paths
from kohya_gui.server.allowed_folders import ABSENT
from library.config.pasted import expand_home, pasted_path
from library.config.problems import ConfigError, Problem
from library.config.values import Option
from library.files import nearest_existing

MODEL_OPTION = "pretrained_model_name_or_path"  # checked by its contents
IN_PLACE = "data:"  # the beginning of an inlined image


def find_path_problems(
    options: Mapping[str, Option], values: Mapping[str, object], roots: Sequence[Path], typing: str
) -> dict[str, Problem]:
    """Return the problems of the paths among a form's values, by option. `typing` is the option whose field is being
    edited: the beginning of an existing path is no mistake there."""
    problems: dict[str, Problem] = {}
    for name, option in options.items():
        text = option.path_in(values.get(name) or "").strip()
        if not text or option.kind not in ("file", "folder") or name == MODEL_OPTION:
            continue
        if problem := _find_path_problem(option, text, roots, name == typing):
            problems[name] = problem
    return problems


def _find_path_problem(option: Option, text: str, roots: Sequence[Path], is_typed: bool) -> Problem | None:
    if problem := paths.foreign_path_problem(text, option.name):
        return problem
    if text.startswith(IN_PLACE) or named_paths.is_hub_id(option, text):
        return None
    try:
        path = paths.allowed_path(text, roots, option.name)
    except ConfigError as error:
        problem = error.problems[0]
        return None if is_typed and may_become_right(text, problem, roots) else problem
    if option.name in named_paths.CREATED_BY_TRAINING:
        return _unwritable(option, path)
    if not path.exists():
        return None if is_typed and is_begun(path) else Problem(option.name, ": {path} does not exist", path=path)
    if option.kind == "folder" and not path.is_dir():
        return Problem(option.name, ": {path} is not a folder", path=path)
    return None


def may_become_right(text: str, problem: Problem, roots: Sequence[Path]) -> bool:
    return leads_to(text, roots) or (problem.code == ABSENT and is_begun(pasted_path(text)))


def leads_to(text: str, roots: Sequence[Path]) -> bool:
    path = os.path.normcase(expand_home(text))
    return any(os.path.normcase(root).startswith(path) for root in roots)


def is_begun(path: Path) -> bool:
    """Return whether something exists whose name begins like the path."""
    try:
        begin = os.path.normcase(path.name)
        return any(os.path.normcase(name).startswith(begin) for name in os.listdir(path.parent))
    except OSError:
        return False


def _unwritable(option: Option, path: Path) -> Problem | None:
    """Return the problem if a training cannot create this folder or file."""
    nearest = nearest_existing(path)
    if nearest is None:
        return Problem(option.name, ": there is no {drive} here; choose a folder on another disk", drive=path.anchor)
    is_file = option.kind == "file" and nearest == path
    if not nearest.is_dir() and not is_file:
        return Problem(option.name, ": {nearest} is a file; choose a folder", nearest=nearest)
    if not os.access(nearest, os.W_OK):
        return Problem(option.name, ": {folder} cannot be written to; choose another folder", folder=nearest)
    return None
