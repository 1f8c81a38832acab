"""The names inside the folders of runs and jobs, and how their files are read and written.

Beside the texts of a file, in `texts`, stands where they are and how they were made: the page shows them in its
reader's language. Nothing is told apart by how it reads, so that words of the user's stay the user's.
"""

import json
import math
import os
import re
import secrets
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from library.config import problems, stored_messages
from library.config.json_types import JsonMapping, JsonObject
from library.files import json_text, write_atomic

RUN, PROGRESS, LOG, TOML = "run.json", "progress.jsonl", "log.txt", "run.toml"
STOP, LAUNCHER = "stop", "launcher.json"
ROOM = ".room"  # holds space on the disk while a run works
STOPS = ("", "after_step", "now", "kill")  # how a run may be asked to end, the more urgent the later
REQUESTS = ("sample", "save")  # done after the step, as soon as a file `<request>-now` is there

ACTIVE = ("starting", "running", "stopping")
FINAL = ("finished", "stopped", "failed", "interrupted")

NUMBER = (int, float)
# The types of facts of runs and of their processes; those that are not here may be of any type.
TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("started", "ended", "heartbeat", "restored", "process_start", "since_boot"), NUMBER),
    **dict.fromkeys(("step", "total_steps", "epochs"), NUMBER),
    **dict.fromkeys(("pid", "seed"), (int,)),
    **dict.fromkeys(("id", "state", "script", "title", "output_dir", "output_name", "folder", "host", "boot"), (str,)),
    **dict.fromkeys(("resumes", "queued", "from", "kind"), (str,)),
    "error": (str, problems.Message),
    **dict.fromkeys(("config", "phase", "hardware", "versions", "data", "compile", "products"), (dict,)),
    **dict.fromkeys(("devices",), (list,)),
}
LARGEST = 2**53  # of a fact that is a number
TEXTS = "texts"
SECRETS = ("wandb_api_key", "huggingface_token")
OLD_NAMES = {"lanes": "devices"}  # of facts, in files of older versions


def new_id(name: str) -> str:
    """A run id that sorts by time within a name: `<name>-<YYYYmmdd-HHMMSS>-<4 hex>`, safe as a folder's name."""
    plain = re.sub(r"[^\w.-]+", "_", name).strip("._-")[:80] or "run"
    return f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def is_id(text: Any) -> bool:
    """Whether `text` can be a run id at all: one plain name, so that it can never lead out of a folder."""
    return isinstance(text, str) and re.fullmatch(r"[\w][\w.-]{0,120}", text) is not None


def stop_asked(folder: Path) -> str:
    """How this run was asked to stop: one of STOPS, "" for not at all."""
    try:
        asked = (folder / STOP).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    return asked if asked in STOPS[1:] else "after_step"


def request_file(folder: Path, request: str) -> Path:
    """The file that asks a run to generate its samples or to save, now."""
    return folder / f"{request}-now"


def load(path: Path) -> JsonObject:
    """A JSON object from a file, less facts of a wrong type; empty when the file is missing, half gone or no object."""
    try:
        found = parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    named = {OLD_NAMES.get(name, name): value for name, value in found.items()}
    return {name: value for name, value in named.items() if _is_sound(name, value)}


def section(facts: JsonMapping, name: str) -> JsonObject:
    """The options of a section that differ from their defaults, as a run's facts have them; {} where there are none."""
    found = (facts.get("config") or {}).get(name)
    return found if isinstance(found, dict) else {}


def _is_sound(name: str, value: Any) -> bool:
    """Whether a fact may be used: others edit these files by hand, and a disk may damage them."""
    if value is None or name not in TYPES:
        return name not in TYPES or TYPES[name] != NUMBER  # None is no number; what is not there has a default
    if not isinstance(value, TYPES[name]) or isinstance(value, bool) and bool not in TYPES[name]:
        return False
    return not isinstance(value, int | float) or abs(value) <= LARGEST  # neither NaN nor infinite


def load_changed(path: str) -> JsonObject:
    """Like `load`, but a file is read anew only when it was written since; not to be changed by who asked for it."""
    return _loaded(path, signature(path))


@lru_cache(maxsize=4096)
def _loaded(path: str, written: tuple[int, int, int]) -> JsonObject:
    return load(Path(path))


def signature(path: str) -> tuple[int, int, int]:
    """What differs once a file was written: when, how long it is, and which file it is; zeros where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    # `store` makes a new file of each write, so two within one tick of the clock differ, too.
    return found.st_mtime_ns, found.st_size, found.st_ino


def store(path: Path, values: JsonMapping) -> None:
    """Write a JSON object so that a reader sees the old one or the new one, never a torn one."""
    write_atomic(path, dump(values, indent=1) + "\n")


def parsed(text: str | bytes) -> JsonObject:
    """What `dump` wrote, its texts as they were made; empty for what is no object. Raises ValueError."""
    found = json.loads(text)
    if not isinstance(found, dict):
        return {}
    made = found.pop(TEXTS, None)
    try:
        return stored_messages.restored(found, made) if made else found
    except (AttributeError, KeyError, TypeError, RecursionError):  # written by another version, or by hand
        return found


def dump(values: JsonMapping, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinity become null, and whatever JSON does not know becomes a number or a text."""
    made = [*stored_messages.locate_texts(values)]
    return json_text(_plain({**values, TEXTS: made} if made else values), indent=indent)


def without_secrets(values: JsonMapping) -> JsonObject:
    """The values less every token and key, whether they lie flat or by section."""
    kept = {name: value for name, value in values.items() if name not in SECRETS}
    return {name: without_secrets(value) if isinstance(value, Mapping) else value for name, value in kept.items()}


def secrets_in(values: JsonMapping) -> list[str]:
    """Every token and key among the values, whether they lie flat or by section."""
    found = [str(value) for name, value in values.items() if name in SECRETS and value]
    return found + [s for value in values.values() if isinstance(value, Mapping) for s in secrets_in(value)]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    try:
        number = float(value)  # also what NumPy and torch call a number
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None
