"""Folders that the user has allowed on the page: confirmed once, stored in a file, and only on this computer.

Roots are the folders below which the page may use files. Those given at the start always count. Where only this
computer can open the page, a path in another folder leads to a question, and the answer is stored.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import overload

from kohya_gui.server.hidden import has_hidden_part, is_hidden_name, is_reserved_name
from kohya_gui.server.json_api import ApiRequest, Handler
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, Problem
from library.runs import keys, layout, registry

FILE_ENDING = re.compile(r"\.[a-z]\w{1,11}", re.I)  # the ending of a file; v1.5 is a folder
MAX_STORED = 200  # stored folders
CODE = "code:"  # prefix of a name of code to allow
HIDDEN = "it is hidden: choose another folder, or start the page with --root FOLDER"
ABSENT = "absent"  # the code of the problem that a folder does not exist
DOTTED_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")

# Programs, system settings and devices, on any operating system.
SYSTEM = (
    "/bin",
    "/boot",
    "/dev",
    "/etc",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/private",
    "/proc",
    "/run",
    "/sbin",
    "/snap",
    "/sys",
    "/usr",
    "/var",
    "/Applications",
    "/Library",
    "/System",
    "/cores",
)
SYSTEM_OF_WINDOWS = ("SystemRoot", "ProgramFiles", "ProgramFiles(x86)", "ProgramW6432", "ProgramData")
RESERVED_OF_WINDOWS = ("$recycle.bin", "system volume information", "recovery", "$winreagent")


class Roots(Sequence[Path]):
    """Folders that may be used: those given and, if the page `asks`, those currently allowed."""

    def __init__(self, start_folders: Sequence[Path], asks: bool = False) -> None:
        self.given, self.asks = tuple(start_folders), asks

    @overload
    def __getitem__(self, at: int) -> Path: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Path]: ...
    def __getitem__(self, at: int | slice) -> Path | Sequence[Path]:
        return self._now()[at]

    def __len__(self) -> int:
        return len(self._now())

    def _now(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys((*self.given, *allowed_folders()))) if self.asks else self.given


class AllowedFolders:
    """The request to allow a folder, accepted only from browsers on this computer."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots

    @property
    def handlers(self) -> dict[str, Handler]:
        return {"allow": self.allow}

    def allow(self, request: ApiRequest) -> JsonObject:
        """Allow a folder, after checking it again."""
        text = request.text("folder")
        if not isinstance(self.roots, Roots) or not self.roots.asks:
            raise ConfigError("Folders are allowed on the computer itself only: start the page with --root FOLDER.")
        if text.startswith(CODE):
            return _allow_code(text.removeprefix(CODE))
        folder = Path(text)
        if not text.isprintable() or not folder.is_absolute() or _resolved(folder) != folder:
            raise ConfigError("This is not a folder on this computer.")
        if why := refuse_folder(folder):
            raise ConfigError("{folder} cannot be allowed: {why}.", folder=folder, why=why)
        if not folder.is_dir():
            raise ConfigError("{path} does not exist", path=folder)
        folders = list(allowed_folders())
        if folder not in folders:
            if len(folders) >= MAX_STORED:
                raise ConfigError(
                    "{folder} holds {most} folders: take out those that are not used.",
                    folder=allowed_file(),
                    most=MAX_STORED,
                )
            _store([*folders, folder], remembered_code())
        return {"said": Message("Allowed: {folder}", folder=folder)}


def allowed_file() -> Path:
    return registry.data_folder() / "folders.json"


def _allow_code(name: str) -> JsonObject:
    """Allow code with this name to run: a class with its module, or a module."""
    if not DOTTED_NAME.fullmatch(name) or len(name) > 200:
        raise ConfigError("This is not the name of code.")
    names = remembered_code()
    if name not in names:
        if len(names) >= MAX_STORED:
            raise ConfigError(
                "{folder} holds {most} names: take out those that are not used.", folder=allowed_file(), most=MAX_STORED
            )
        _store(allowed_folders(), (*names, name))
    return {"said": Message("Allowed: {folder}", folder=name)}


def _store(folders: Iterable[Path], code: Iterable[str]) -> None:
    keys.store_privately(allowed_file(), {"folders": [str(folder) for folder in folders], "code": [*code]})


def remembered_code() -> tuple[str, ...]:
    """Return the names of code that may run. The file's contents are not trusted."""
    stored = layout.load_facts(allowed_file()).get("code")
    named = [text for text in stored if isinstance(text, str)] if isinstance(stored, list) else []
    return tuple(text for text in named[:MAX_STORED] if DOTTED_NAME.fullmatch(text))


def allowed_folders() -> tuple[Path, ...]:
    """Return the allowed folders that may still be used. The file's contents are not trusted."""
    path = allowed_file()
    try:
        status = path.stat()
    except OSError:
        return ()
    # Each change replaces the file, so the inode differs even if two changes fall into one tick of the clock.
    return _remembered(path, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=4)
def _remembered(path: Path, modified: int, number: int) -> tuple[Path, ...]:
    stored = layout.load_facts(path).get("folders")
    named = [Path(text) for text in stored if isinstance(text, str)] if isinstance(stored, list) else []
    return tuple(folder for folder in named[:MAX_STORED] if folder.is_absolute() and not _forbidden(folder))


def outside_roots(what: str, path: Path, roots: Sequence[Path], is_new: bool = False) -> Problem:
    """Return the problem of a path outside of the roots, with a question, a reason, or the option to start the page
    with.

    Only an existing folder can be allowed. If a new one may be created (`is_new`), it is the folder that will hold it.
    """
    if not isinstance(roots, Roots) or not roots.asks:
        template = ": {path} is outside {roots}; start the page with --root FOLDER to allow more"
        return Problem(what, template, path=path, roots=", ".join(map(str, roots)))
    folder = folder_to_allow(path)
    if why := refuse_folder(folder):
        template = ": {path} is outside the folders that this page may use, and {why}"
        return Problem(what, template, path=path, why=Message(why))
    if not folder.is_dir():
        above = next(parent for parent in folder.parents if parent.is_dir())
        if not is_new:
            return Problem(what, ": {path} does not exist", path=folder, code=ABSENT)
        if refuse_folder(above):
            template = ": {folder} does not exist; make it first, or choose a folder that is there"
            return Problem(what, template, folder=folder)
        folder = above
    template = ": {path} is outside the folders that this page may use. Allow {folder}?"
    return Problem(what, template, path=path, folder=folder, code="allow")


def asked_folder(problem: Problem) -> str:
    return str(problem.arguments["folder"]) if problem.code == "allow" else ""


def folder_to_allow(path: Path) -> Path:
    is_file = path.is_file() or (not path.exists() and FILE_ENDING.fullmatch(path.suffix) is not None)
    return path.parent if is_file else path


def refuse_folder(folder: Path) -> str:
    """Return why a folder, a resolved path, cannot be allowed, or ""."""
    if why := _forbidden(folder):
        return why
    above = folder
    while not os.path.lexists(above) and above != above.parent:
        above = above.parent
    if not above.is_dir() or (above != folder and not os.access(above, os.W_OK | os.X_OK)):
        return "it cannot be made: choose another folder"
    return ""


def _forbidden(folder: Path) -> str:
    """Return why a folder must not be used for a training's files, whatever it contains."""
    parts = folder.parts[1:]
    if not parts:
        return "the root of a disk cannot be allowed: choose a folder on it"
    if any(map(is_reserved_name, parts)):
        return "it is hidden or reserved: choose another folder"
    if any(map(is_hidden_name, parts)):
        return HIDDEN
    home = _resolved(Path.home())
    # Other systems also hide public folders, such as that of mounted disks.
    if folder.is_relative_to(home) and has_hidden_part(home, folder.relative_to(home)):
        return HIDDEN
    if _folder_contains(folder, home):
        return "it holds your home folder: choose a folder in it"
    program_folders = [_resolved(folder) for folder in (registry.data_folder(), Path(sys.prefix))]
    if any(
        _folder_contains(folder, own_folder) or _folder_contains(own_folder, folder) for own_folder in program_folders
    ):
        return "it holds files of this program: choose another folder"
    temporary = _resolved(Path(tempfile.gettempdir()))
    if _folder_contains(temporary, folder) and folder != temporary:
        return ""
    if any(
        _folder_contains(system_folder, folder) or _folder_contains(folder, system_folder)
        for system_folder in _system()
    ):
        return "it belongs to the system: choose another folder"
    return "it belongs to the system: choose another folder" if parts[0].casefold() in RESERVED_OF_WINDOWS else ""


def _system() -> list[Path]:
    if os.name != "nt":
        return [Path(folder) for folder in SYSTEM]
    return [Path(os.environ[name]) for name in SYSTEM_OF_WINDOWS if os.environ.get(name)]


def _folder_contains(folder: Path, other: Path) -> bool:
    folder_parts, other_parts = ([part.casefold() for part in path.parts] for path in (folder, other))
    return other_parts[: len(folder_parts)] == folder_parts


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return Path()
