"""Where the runs of this user are: one small pointer per run, so that a run started in a shell is found by the page."""

import os
from functools import lru_cache
from pathlib import Path

import platformdirs

from library.runs import layout


def home() -> Path:
    """The user's own folder of this program: KOHYA_HOME, or where the system keeps such data."""
    given = os.environ.get("KOHYA_HOME")
    return Path(given).expanduser() if given else Path(platformdirs.user_data_dir("kohya", appauthor=False))


def add(folder: Path) -> None:
    """Remember a run's folder under its name."""
    pointers = home() / "runs"
    pointers.mkdir(parents=True, exist_ok=True)
    layout.store(pointers / f"{folder.name}.json", {"folder": str(folder.absolute())})


def folders() -> dict[str, Path]:
    """Every remembered run that still has its folder, by id."""
    found = {}
    for pointer in (home() / "runs").glob("*.json"):
        folder = _folder(pointer)
        if layout.is_id(pointer.stem) and folder and Path(folder).is_dir():
            found[pointer.stem] = Path(folder)
    return found


@lru_cache(maxsize=4096)
def _folder(pointer: Path) -> str:
    """What a pointer says, which never changes: the page asks for all of them every second."""
    return str(layout.load(pointer).get("folder") or "")


def folder(run_id: str) -> Path:
    """The folder of one run. Raises KeyError for an id that is malformed, unknown or whose folder is gone."""
    if layout.is_id(run_id):
        found = layout.load(home() / "runs" / f"{run_id}.json").get("folder")
        if found and Path(found).is_dir():
            return Path(found)
    raise KeyError(f"No run is called {run_id!r}.")
