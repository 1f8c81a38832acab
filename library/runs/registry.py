"""The locations of this user's runs: a small pointer file per run, so that the page finds runs started in a shell."""

import errno
import os
from functools import lru_cache
from pathlib import Path

import platformdirs

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import Message
from library.files import remove
from library.runs import layout, process

# Facts of run.json that a pointer repeats, about the run, its process and its devices.
COPIED_FACTS = (
    "id",
    "script",
    "title",
    "started",
    "from",
    "output_dir",
    "output_name",
    "devices",
    "launch",
    "pid",
    "process_start",
    "boot",
    "since_boot",
    "host",
)

UNLISTED = (
    "the page cannot list runs, as {folder} cannot be written to ({why}); trainings run all the same. Set the "
    "environment variable KOHYA_HOME to a folder of yours"
)


def data_folder() -> Path:
    home = os.environ.get("KOHYA_HOME")
    return Path(os.path.expanduser(home)) if home else Path(platformdirs.user_data_dir("kohya", appauthor=False))


def unusable() -> Message | None:
    """Return why runs cannot be listed in the user's data folder, else None. Creates the folder."""
    pointers = Path("~")
    try:
        pointers = data_folder() / "runs"
        pointers.mkdir(parents=True, exist_ok=True)
        if os.access(pointers, os.W_OK):
            return None
        why = os.strerror(errno.EACCES)
    except OSError as error:
        why = error.strerror or type(error).__name__
    except RuntimeError as error:  # `~` of a user without a home folder
        why = str(error)
    return Message(UNLISTED, folder=pointers, why=why)


def add_pointer(folder: Path, facts: JsonMapping | None = None) -> None:
    """Add a pointer to a run's folder; its `facts` about the process identify the run even without its folder."""
    pointers = data_folder() / "runs"
    pointers.mkdir(parents=True, exist_ok=True)
    copied = {name: (facts or {})[name] for name in COPIED_FACTS if name in (facts or {})}
    layout.store(pointers / f"{folder.name}.json", {**copied, "folder": str(folder.absolute())})


def forget_pointer(run_id: str) -> None:
    if layout.is_run_id(run_id):
        remove(data_folder() / "runs" / f"{run_id}.json")


def working_without_folder(run_id: str) -> JsonObject:
    """Return the pointer's facts of a run whose process is alive although its folder was deleted; else empty."""
    pointer = layout.load_facts(data_folder() / "runs" / f"{run_id}.json") if layout.is_run_id(run_id) else {}
    if not _is_alive(pointer):
        return {}
    return {name: value for name, value in pointer.items() if name in COPIED_FACTS} | {"state": "running", "lost": True}


def run_folders() -> dict[str, Path]:
    """Return the folders of all runs by id that exist or whose process is alive."""
    pointers = data_folder() / "runs"
    try:
        changed = pointers.stat().st_mtime_ns
    except OSError:
        return {}
    entries = _pointers(pointers, changed).items()
    return {
        run_id: Path(facts["folder"]) for run_id, facts in entries if os.path.isdir(facts["folder"]) or _is_alive(facts)
    }


def _is_alive(facts: JsonMapping) -> bool:
    return "pid" in facts and process.alive(dict(facts))


@lru_cache(maxsize=4)
def _pointers(pointers: Path, changed: int) -> dict[str, JsonObject]:
    """Return all pointers; `changed` is part of the cache key."""
    # Cached, as the page reads them every second; writing one changes the folder's time.
    facts_by_id = {}
    for pointer in pointers.glob("*.json"):
        facts = layout.load_facts(pointer)
        if layout.is_run_id(pointer.stem) and facts.get("folder"):
            facts_by_id[pointer.stem] = facts
    return facts_by_id


def folder_of_run(run_id: str) -> Path:
    """Return the folder of one run. Raises KeyError if the id is malformed or unknown, or its folder is permanently
    gone.
    """
    if layout.is_run_id(run_id):
        folder = layout.load_facts(data_folder() / "runs" / f"{run_id}.json").get("folder")
        if folder and (Path(folder).is_dir() or working_without_folder(run_id)):
            return Path(folder)
    raise KeyError(f"No run is called {run_id!r}.")
