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
    pointers = home() / "runs"
    try:
        changed = pointers.stat().st_mtime_ns
    except OSError:
        return {}
    return {run_id: folder for run_id, folder in _known(pointers, changed).items() if os.path.isdir(folder)}


@lru_cache(maxsize=4)
def _known(pointers: Path, changed: int) -> dict[str, Path]:
    """What the pointers say; none ever changes, and a new one changes its folder. The page asks every second."""
    found = {}
    for pointer in pointers.glob("*.json"):
        folder = layout.load(pointer).get("folder")
        if layout.is_id(pointer.stem) and folder:
            found[pointer.stem] = Path(folder)
    return found


def folder(run_id: str) -> Path:
    """The folder of one run. Raises KeyError for an id that is malformed, unknown or whose folder is gone."""
    if layout.is_id(run_id):
        found = layout.load(home() / "runs" / f"{run_id}.json").get("folder")
        if found and Path(found).is_dir():
            return Path(found)
    raise KeyError(f"No run is called {run_id!r}.")
