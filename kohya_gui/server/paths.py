"""The one guard for each path from a browser: files are listed, read, written and deleted in chosen folders only."""

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from typing import Any

from kohya_gui.server import allowed_folders, named_paths
from kohya_gui.server.allowed_folders import outside_roots
from kohya_gui.server.hidden import has_hidden_part, is_reserved_name
from library.config import code_names, dataset
from library.config.building import Reading, draft
from library.config.command import quote_argument
from library.config.hub_names import about_address
from library.config.pasted import meant_on_drive, pasted_path, strip_pasted
from library.config.problems import ConfigError, Message, Problem, either, raise_if_any
from library.config.run_config import RunConfig
from library.config.schema import option_values, options_of
from library.config.values import LONGEST_FILE_NAME, RESERVED, WINDOWS, name_length, quoted

MAX_PATH_LENGTH = 2000
WEIGHTS = (".safetensors",)  # only their headers are read
MAX_CONFIG_BYTES = 1_000_000  # bytes of a config; a real one has a few thousand
CONFIGS = (".toml",)


# Places of models and images outside the home: other disks, and mounts of rented machines.
PLACES = (
    "/workspace",
    "/data",
    "/mnt",
    "/media",
    "/run/media",
    "/storage",
    "/srv",
    "/Volumes",
    *(f"{letter}:\\" for letter in "DEFGHIJKLMNOPQRSTUVWXYZ"),
)

RELATIVE = (
    ": {text} is relative to {folder}, where the page was started, and there it is outside the folders that the page "
    "may use; write the whole path"
)


def find_roots(start_folders: Sequence[str | Path] = ()) -> tuple[Path, ...]:
    """Return the folders that files may be in: the user's home, the current folder unless it holds the home, those
    given at the start (or in KOHYA_ROOTS), the cache of Hugging Face, and other disks."""
    here = [Path.cwd()] if not Path.home().resolve().is_relative_to(Path.cwd().resolve()) else []  # such as /
    candidates = [Path.home(), *here, *named_roots(start_folders), *_existing_places()]
    return tuple(dict.fromkeys(folder.resolve() for folder in candidates))


def named_roots(start_folders: Sequence[str | Path]) -> list[Path]:
    """Return the folders given at the start and those in KOHYA_ROOTS, whether they exist or not."""
    named = [*start_folders, *filter(None, os.environ.get("KOHYA_ROOTS", "").split(os.pathsep))]
    return [Path(os.path.expanduser(folder)) for folder in named]


def _existing_places() -> Iterator[Path]:
    home = Path(os.path.expanduser(os.environ.get("HF_HOME", "~/.cache/huggingface")))
    for place in (Path(os.environ.get("HF_HUB_CACHE", home / "hub")), *map(Path, PLACES)):
        with contextlib.suppress(OSError):
            if place.is_dir() and any(place.iterdir()):
                yield place


def allowed_path(text: Any, roots: Sequence[Path], what: str = "path", is_new: bool = False) -> Path:
    """Return the real path of a path from a browser, with symbolic links resolved, or raise ConfigError.

    It is one of `roots` or below one, and not in a hidden folder, as those hold other programs' settings and keys.
    Its contents are not read. `what` names the field in messages; `is_new` allows a folder that does not exist yet,
    such as that of an option whose folder a training creates.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(Problem(what, ": write where it is"))
    text = strip_pasted(text)
    if problem := foreign_path_problem(text, what):
        raise ConfigError(problem)
    if meant := meant_on_drive(text):
        template = "has no backslash after the drive, {value}: write {meant}"
        raise ConfigError(Problem(what, template, value=quoted(text), meant=meant, fix={what: meant}))
    if len(text) > MAX_PATH_LENGTH or not text.isprintable():
        raise ConfigError(Problem(what, ": this is not a path on this computer"))
    if WINDOWS and is_strange_network(text, roots):
        template = (
            ": {path} is on another computer; give that share a drive letter, or start the page with --root FOLDER"
        )
        raise ConfigError(Problem(what, template, path=text[:120]))
    try:
        path = pasted_path(text).resolve()
        if any(map(os.path.islink, (path, *path.parents))):
            raise OSError(errno.ELOOP, "links that lead to each other")  # as resolve() raises before Python 3.13
    except (OSError, RuntimeError, ValueError):
        raise ConfigError(Problem(what, ": this is not a path on this computer")) from None
    # The innermost root, as a named root may be in a hidden folder of another.
    innermost = max((root for root in roots if path.is_relative_to(root)), key=lambda r: len(r.parts), default=None)
    if innermost is None:
        problem = outside_roots(what, path, roots, is_new or what in named_paths.CREATED_BY_TRAINING)
        if not pasted_path(text).is_absolute() and not allowed_folders.asked_folder(problem):
            problem = Problem(what, RELATIVE, text=text, folder=Path.cwd(), code=problem.code)
        raise ConfigError(problem)
    below = path.relative_to(innermost)
    if any(name_length(part) > LONGEST_FILE_NAME for part in below.parts):
        raise ConfigError(Problem(what, ": a name in this path is longer than file systems allow"))
    if has_hidden_part(innermost, below):
        raise ConfigError(_hidden_problem(what, path, below))
    return path


def _hidden_problem(what: str, path: Path, below: Path) -> Problem:
    """Return the problem of a hidden path, with the option to start the page with if its folder may be a root."""
    # Some programs store models there, such as in AppData.
    folder = allowed_folders.folder_to_allow(path)
    if any(map(is_reserved_name, below.parts)) or has_hidden_part(folder, path.relative_to(folder)):
        return Problem(what, ": {below} is hidden or reserved; choose another place", below=below)
    template = ": {below} is hidden; choose another place, or start the page with --root {folder}"
    return Problem(what, template, below=below, folder=quote_argument(str(folder)))


def is_allowed(text: str, roots: Sequence[Path]) -> bool:
    """Return whether `allowed_path` accepts a path."""
    try:
        return bool(allowed_path(text, roots))
    except ConfigError:
        return False


def plain_name(name: str) -> str:
    """Return the name of an uploaded file, safe to create on every system."""
    safe = re.sub(r"[^\w.+-]+", "_", re.split(r"[\\/]", name)[-1])[-100:].lstrip(".")
    return f"_{safe}" if RESERVED.fullmatch(safe) else safe or "config"


def existing_folder(text: Any, roots: Sequence[Path], what: str = "folder") -> Path:
    """Like `allowed_path`, for a folder that must exist."""
    path = allowed_path(text, roots, what)
    if not os.path.isdir(path):
        template = ": {path} is not a folder" if os.path.exists(path) else ": {path} does not exist"
        raise ConfigError(Problem(what, template, path=path))
    return path


def file(text: Any, roots: Sequence[Path], endings: Iterable[str], what: str = "file", is_new: bool = False) -> Path:
    """Like `allowed_path`, for a file with one of `endings` (lower case, such as ".safetensors"), existing or new."""
    path, endings = allowed_path(text, roots, what, is_new), tuple(endings)
    if path.suffix.lower() not in endings:
        template = ": {name} must end in {endings}"
        raise ConfigError(Problem(what, template, name=path.name or text, endings=either(endings)))
    return path


def existing_file(text: Any, roots: Sequence[Path], endings: Iterable[str], what: str = "file") -> Path:
    """Like `file`, for one that must exist."""
    path = file(text, roots, endings, what)
    if not os.path.isfile(path):
        template = ": {path} is not a file" if os.path.exists(path) else ": {path} does not exist"
        raise ConfigError(Problem(what, template, path=path))
    return path


def config_file(text: Any, roots: Sequence[Path], endings: Sequence[str] = CONFIGS, is_new: bool = True) -> Path:
    """Like `file`, for a config to be saved."""
    if not isinstance(text, str) or not text.strip():
        raise ConfigError("config file: write where it is, such as ~/kohya/cat.toml")
    return file(text, roots, endings, "config file", is_new)


def readable(text: Any, roots: Sequence[Path], endings: Sequence[str] = CONFIGS) -> Path:
    """Like `config_file`, for a file that must exist and be no larger than a config."""
    config_file(text, roots, endings, is_new=False)
    path = existing_file(text, roots, endings, "config file")
    if path.suffix.lower() not in WEIGHTS and path.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError("config file: {path} is far too large to be a config", path=path)
    return path


def allow(config: RunConfig, roots: Sequence[Path]) -> None:
    # Ids of models on the hub are not paths, and pass.
    raise_if_any(_outside(config, roots))


def within_roots(reading: Reading[Any], roots: Sequence[Path]) -> Reading[Any]:
    """Return a reading without the files and folders that may not be used, with a problem for each."""
    outside = _outside(reading.config, roots)
    names = {problem.option for problem in outside}
    allowed_values = {name: value for name, value in option_values(reading.config).items() if name not in names}
    return replace(
        reading,
        config=draft(type(reading.config), allowed_values) if outside else reading.config,
        problems=[*reading.problems, *outside],
        wrong=reading.wrong | names,
    )


def _outside(config: RunConfig, roots: Sequence[Path]) -> list[Problem]:
    """Return the problems of options that name files, folders and code that may not be used, directly or through other
    files."""
    problems: list[Problem] = []
    options = options_of(type(config))

    def may(named_path: named_paths.NamedPath) -> bool:
        if named_paths.is_hub_id(options[named_path.option], named_path.path):
            return False
        try:
            allowed_path(named_path.path, roots, named_path.option)
            if named_path.option == "dataset_config" and named_path.path == str(config.data.dataset_config):
                file(named_path.path, roots, dataset.SUFFIXES, named_path.option)
        except ConfigError as error:
            problems.extend(problem for problem in error.problems if problem not in problems)
        else:
            return True
        return False

    try:
        named_paths.visit_paths(config, may)
    except ConfigError as error:
        problems += error.problems
    return [*problems, *code_problems(config, roots)]


def foreign_path_problem(text: str, what: str = "") -> Problem | None:
    """Return the problem of a path copied from a browser or a Windows computer, with what to write instead."""
    pasted = strip_pasted(text)
    drive = re.match(r"([A-Za-z]):[\\/]+(.*)", pasted, re.S) if os.name != "nt" else None
    if not drive or not pasted.isprintable():
        return web_address(text, what)
    mounted = Path("/mnt", drive[1].lower())  # the drive's mount in WSL
    here = mounted.joinpath(*re.split(r"[\\/]+", drive[2]))
    if not mounted.is_dir():
        template = ": {path} is a path of Windows; write where this is on the computer that the page runs on"
        return Problem(what, template, path=pasted[:120])
    template = ": {path} is a path of Windows; here it is {here}"
    return Problem(what, template, path=pasted[:120], here=here, fix={what: str(here)})


def web_address(text: str, what: str = "") -> Problem | None:
    return about_address(what, strip_pasted(text))


def is_strange_network(text: str, roots: Iterable[Path | PureWindowsPath]) -> bool:
    """Return whether a Windows path leads to another computer, outside the folders allowed there. A network drive
    resolves to a path with the computer's name."""
    # Merely checking such a path would make Windows log in to another computer.
    is_network = text.replace("/", "\\").startswith("\\\\")
    return is_network and not any(PureWindowsPath(text).is_relative_to(root) for root in roots)


def code_problems(config: RunConfig, roots: Sequence[Path]) -> list[Problem]:
    """Return a problem for each option that names code which was not allowed, with the question whether it may run."""
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
    return Problem(option, template, name=name, folder=f"{allowed_folders.CODE}{name}", code="allow")


def refuse_code(option: str, name: str) -> Message | str:
    """Return why code cannot be what an option expects, or ""; none of it is run."""
    if option == code_names.BACKEND:
        return ""
    if option in code_names.MODULES:
        return code_names.why_not_network(name)
    module, _, class_name = name.rpartition(".")
    return code_names.why_not_class(module, class_name, option)
