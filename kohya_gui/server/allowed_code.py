"""Code of packages that are not listed: the page runs it only after a confirmation on this computer."""

from collections.abc import Sequence
from pathlib import Path

from kohya_gui.server import allowed_folders
from library.config import code_names
from library.config.problems import Message, Problem
from library.config.run_config import RunConfig

ALLOWED = allowed_folders.CODE


def code_problems(config: RunConfig, roots: Sequence[Path]) -> list[Problem]:
    """A problem for each option that names code which was not allowed, with the question whether it may run."""
    asks = isinstance(roots, allowed_folders.Roots) and roots.asks
    allowed_names = allowed_folders.remembered_code() if asks else ()
    unlisted = {option: name for option, name in code_names.unlisted(config).items() if name not in allowed_names}
    # For a missing package, the check reports that and starts nothing.
    absent = {
        option for option, name in unlisted.items() if option != code_names.BACKEND and code_names.is_absent(name)
    }
    return [_code_problem(option, name, asks) for option, name in unlisted.items() if option not in absent]


def _code_problem(option: str, name: str, asks: bool) -> Problem:
    if why := refuse_code(option, name):
        return Problem(option, ": {why}", why=why)
    if not asks:
        template = ": {name} is code that this program does not list; it runs only in a training started in a shell"
        return Problem(option, template, name=name)
    template = ": {name} is code that this program does not list, and can do all that you can. Allow it to run?"
    return Problem(option, template, name=name, folder=f"{ALLOWED}{name}", code="allow")


def refuse_code(option: str, name: str) -> Message | str:
    """Why code cannot be what an option expects, or ""; none of it is run."""
    if option == code_names.BACKEND:
        return ""
    if option in code_names.MODULES:
        return code_names.why_not_network(name)
    module, _, class_name = name.rpartition(".")
    return code_names.why_not_class(module, class_name, option)
