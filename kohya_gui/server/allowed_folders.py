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

from kohya_gui.server.json_api import ApiRequest, Handler
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, Problem
from library.files import RESERVED
from library.runs import keys, layout, registry

FILE_ENDING = re.compile(r"\.[a-z]\w{1,11}", re.I)  # the ending of a file; v1.5 is a folder
MAX_STORED = 200  # stored folders
CODE = "code:"  # prefix of a name of code to allow
ABSENT = "absent"  # the code of the problem that a folder does not exist
NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")

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

    def __init__(self, given: Sequence[Path], asks: bool = False) -> None:
        self.given, self.asks = tuple(given), asks

    @overload
    def __getitem__(self, at: int) -> Path: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Path]: ...
    def __getitem__(self, at: int | slice) -> Path | Sequence[Path]:
        return self._now()[at]

    def __len__(self) -> int:
        return len(self._now())

    def _now(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys((*self.given, *remembered()))) if self.asks else self.given


class AllowedFolders:
    """The request to allow a folder, accepted only from browsers on this computer."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of requests from the page's scripts."""
        return {"allow": self.allow}

    def allow(self, sent: ApiRequest) -> JsonObject:
        """Allow a folder, after checking it again."""
        text = sent.text("folder")
        if not isinstance(self.roots, Roots) or not self.roots.asks:
            raise ConfigError("Folders are allowed on the computer itself only: start the page with --root FOLDER.")
        if text.startswith(CODE):
            return _allow_code(text.removeprefix(CODE))
        folder = Path(text)
        if not text.isprintable() or not folder.is_absolute() or _resolved(folder) != folder:
            raise ConfigError("This is not a folder on this computer.")
        if why := refusal(folder):
            raise ConfigError("{folder} cannot be allowed: {why}.", folder=folder, why=why)
        if not folder.is_dir():
            raise ConfigError("{path} does not exist", path=folder)
        kept = list(remembered())
        if folder not in kept:
            if len(kept) >= MAX_STORED:
                raise ConfigError(
                    "{folder} holds {most} folders: take out those that are not used.", folder=place(), most=MAX_STORED
                )
            _store([*kept, folder], remembered_code())
        return {"said": Message("Allowed: {folder}", folder=folder)}


def place() -> Path:
    """The file of allowed folders."""
    return registry.data_folder() / "folders.json"


def _allow_code(name: str) -> JsonObject:
    """Allow code with this name to run: a class with its module, or a module."""
    if not NAME.fullmatch(name) or len(name) > 200:
        raise ConfigError("This is not the name of code.")
    known = remembered_code()
    if name not in known:
        if len(known) >= MAX_STORED:
            raise ConfigError(
                "{folder} holds {most} names: take out those that are not used.", folder=place(), most=MAX_STORED
            )
        _store(remembered(), (*known, name))
    return {"said": Message("Allowed: {folder}", folder=name)}


def _store(folders: Iterable[Path], code: Iterable[str]) -> None:
    keys.store_privately(place(), {"folders": [str(one) for one in folders], "code": [*code]})


def remembered_code() -> tuple[str, ...]:
    """The names of code that may run. The file's contents are not trusted."""
    stored = layout.load(place()).get("code")
    named = [text for text in stored if isinstance(text, str)] if isinstance(stored, list) else []
    return tuple(text for text in named[:MAX_STORED] if NAME.fullmatch(text))


def remembered() -> tuple[Path, ...]:
    """The allowed folders that may still be used. The file's contents are not trusted."""
    path = place()
    try:
        found = path.stat()
    except OSError:
        return ()
    return _remembered(path, found.st_mtime_ns, found.st_ino)


@lru_cache(maxsize=4)
def _remembered(path: Path, modified: int, number: int) -> tuple[Path, ...]:
    stored = layout.load(path).get("folders")
    named = [Path(text) for text in stored if isinstance(text, str)] if isinstance(stored, list) else []
    return tuple(folder for folder in named[:MAX_STORED] if folder.is_absolute() and not _forbidden(folder))


def outside_roots(what: str, path: Path, roots: Sequence[Path], is_new: bool = False) -> Problem:
    """The problem of a path outside of the roots, with a question, a reason, or the option to start the page with.

    Only an existing folder can be allowed. If a new one may be created (`is_new`), it is the folder that will hold it.
    """
    if not isinstance(roots, Roots) or not roots.asks:
        template = ": {path} is outside of {roots}; start the page with --root FOLDER to allow more"
        return Problem(what, template, path=path, roots=", ".join(map(str, roots)))
    folder = meant(path)
    if why := refusal(folder):
        template = ": {path} is outside of the folders that this page may use, and {why}"
        return Problem(what, template, path=path, why=Message(why))
    if not folder.is_dir():
        above = next(one for one in folder.parents if one.is_dir())
        if not is_new:
            return Problem(what, ": {path} does not exist", path=folder, code=ABSENT)
        if refusal(above):
            template = ": {folder} does not exist; make it first, or choose a folder that is there"
            return Problem(what, template, folder=folder)
        folder = above
    template = ": {path} is outside of the folders that this page may use. Allow {folder}?"
    return Problem(what, template, path=path, folder=folder, code="allow")


def asked(problem: Problem) -> str:
    """The folder that a problem asks to allow, or ""."""
    return str(problem.arguments["folder"]) if problem.code == "allow" else ""


def meant(path: Path) -> Path:
    """The folder that has to be allowed for a path: the path itself, or the folder of a file."""
    is_file = path.is_file() or (not path.exists() and FILE_ENDING.fullmatch(path.suffix) is not None)
    return path.parent if is_file else path


def refusal(folder: Path) -> str:
    """Why a folder cannot be allowed, or "". It is a resolved path."""
    if why := _forbidden(folder):
        return why
    above = folder
    while not os.path.lexists(above) and above != above.parent:
        above = above.parent
    if not above.is_dir() or (above != folder and not os.access(above, os.W_OK | os.X_OK)):
        return "it cannot be made: choose another folder"
    return ""


def _forbidden(folder: Path) -> str:
    """Why a folder must not be used for a training's files, whatever it contains."""
    parts = folder.parts[1:]
    if not parts:
        return "the root of a disk cannot be allowed: choose a folder on it"
    if any(part.startswith(".") or RESERVED.fullmatch(part) or ":" in part for part in parts):
        return "it is hidden or reserved: choose another folder"
    if _holds(folder, _resolved(Path.home())):
        return "it holds your home folder: choose a folder in it"
    own = [_resolved(one) for one in (registry.data_folder(), Path(sys.prefix))]
    if any(_holds(folder, one) or _holds(one, folder) for one in own):
        return "it holds files of this program: choose another folder"
    temporary = _resolved(Path(tempfile.gettempdir()))
    if _holds(temporary, folder) and folder != temporary:
        return ""
    if any(_holds(one, folder) or _holds(folder, one) for one in _system()):
        return "it belongs to the system: choose another folder"
    return "it belongs to the system: choose another folder" if parts[0].casefold() in RESERVED_OF_WINDOWS else ""


def _system() -> list[Path]:
    if os.name != "nt":
        return [Path(one) for one in SYSTEM]
    return [Path(os.environ[name]) for name in SYSTEM_OF_WINDOWS if os.environ.get(name)]


def _holds(folder: Path, other: Path) -> bool:
    """Whether a path is a folder or inside it, ignoring case, as some systems do."""
    mine, theirs = ([part.casefold() for part in one.parts] for one in (folder, other))
    return theirs[: len(mine)] == mine


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return Path()
