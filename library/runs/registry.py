"""Where the runs of this user are: one small file per run with its folder, so that the page finds runs started in a
shell."""

import os
from functools import lru_cache
from pathlib import Path

import platformdirs

from library.config.json_types import JsonMapping, JsonObject
from library.runs import layout, process

# What a pointer repeats of a run: who it is, how its process is found, and what that occupies.
TOLD = ("id", "script", "title", "started", "from", "output_dir", "output_name", "devices", "launch", "pid",
        "process_start", "boot", "since_boot", "host")  # fmt: skip


def home() -> Path:
    """The user's own folder of this program: KOHYA_HOME, or where the system keeps such data."""
    given = os.environ.get("KOHYA_HOME")
    return Path(given).expanduser() if given else Path(platformdirs.user_data_dir("kohya", appauthor=False))


def add(folder: Path, facts: JsonMapping | None = None) -> None:
    """Remember a run's folder under its name; `facts` that name its process let it be known without its folder."""
    pointers = home() / "runs"
    pointers.mkdir(parents=True, exist_ok=True)
    about = {name: (facts or {})[name] for name in TOLD if name in (facts or {})}
    layout.store(pointers / f"{folder.name}.json", {**about, "folder": str(folder.absolute())})


def working(run_id: str) -> JsonObject:
    """What is known of a run whose process works although its folder, or what is in it, was deleted; else nothing."""
    known = layout.load(home() / "runs" / f"{run_id}.json") if layout.is_id(run_id) else {}
    if not _works(known):
        return {}
    return {name: value for name, value in known.items() if name in TOLD} | {"state": "running", "lost": True}


def folders() -> dict[str, Path]:
    """Every remembered run that still has its folder, or a process that works without it, by id."""
    pointers = home() / "runs"
    try:
        changed = pointers.stat().st_mtime_ns
    except OSError:
        return {}
    known = _known(pointers, changed).items()
    return {run_id: Path(about["folder"]) for run_id, about in known if os.path.isdir(about["folder"]) or _works(about)}


def _works(about: JsonMapping) -> bool:
    """Whether the process that a pointer names is at work."""
    return "pid" in about and process.alive(dict(about))


@lru_cache(maxsize=4)
def _known(pointers: Path, changed: int) -> dict[str, JsonObject]:
    """What the pointers say; one that is written changes its folder. The page asks every second."""
    found = {}
    for pointer in pointers.glob("*.json"):
        about = layout.load(pointer)
        if layout.is_id(pointer.stem) and about.get("folder"):
            found[pointer.stem] = about
    return found


def folder(run_id: str) -> Path:
    """The folder of one run. Raises KeyError for an id that is malformed, unknown or whose folder is gone for good."""
    if layout.is_id(run_id):
        found = layout.load(home() / "runs" / f"{run_id}.json").get("folder")
        if found and (Path(found).is_dir() or working(run_id)):
            return Path(found)
    raise KeyError(f"No run is called {run_id!r}.")
