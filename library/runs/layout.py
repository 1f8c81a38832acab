"""File names inside the folders of runs and jobs, and how these files are read and written.

A file's `texts` list where its messages are and how they were made, so that the page shows them in its reader's
language. Nothing is recognised by its wording, so a user's own words stay unchanged.
"""

import errno
import json
import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from library.config import problems, stored_messages
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import open_regular, read_regular
from library.config.values import LONGEST_PATH
from library.files import PAUSES_OF_READERS, json_text, patiently, write_atomic

RUN, PROGRESS, LOG, TOML = "run.json", "progress.jsonl", "log.txt", "run.toml"
STOP, LAUNCHER = "stop", "launcher.json"
ROOM = ".room"  # reserves disk space while a run is active
STOPS = ("", "after_step", "now", "kill")  # requests to end a run, in order of urgency
REQUESTS = ("sample", "save")  # carried out after the step when a file `<request>-now` exists

ACTIVE = ("starting", "running", "stopping")
FINAL = ("finished", "stopped", "failed", "interrupted")

NUMBER = (int, float)
# Types of facts of runs and their processes; others may have any type.
FACT_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("started", "ended", "heartbeat", "restored", "process_start", "since_boot"), NUMBER),
    **dict.fromkeys(("step", "total_steps", "epochs"), NUMBER),
    **dict.fromkeys(("pid", "seed"), (int,)),
    **dict.fromkeys(("id", "state", "script", "title", "output_dir", "output_name", "folder", "host", "boot"), (str,)),
    **dict.fromkeys(("resumes", "queued", "from", "kind", "preset"), (str,)),
    "error": (str, problems.Message),
    **dict.fromkeys(("config", "phase", "hardware", "versions", "data", "compile", "products", "latest"), (dict,)),
    **dict.fromkeys(("devices", "lost_seconds"), (list,)),
}
MAX_FACT = 2**53  # maximum numeric fact
MAX_DIGITS = 20  # of a whole number; seeds have up to 20
MAX_NESTING = 50  # of lists and tables
MAX_RECORD = 16_000_000  # bytes of a file with facts; real ones have a thousandth of it
MAX_REQUEST = 100  # bytes of a request to stop
MAX_EVENT = 200_000  # bytes of a line of progress.jsonl; real ones have a hundredth of it
PLACES = ("folder", "output_dir")  # facts that are paths
TEXTS = "texts"
SECRETS = ("wandb_api_key", "huggingface_token")
LATEST_OF_STEP = ("t", "loss", "avr_loss", "s_it", "eta")  # numbers of the newest step that the record repeats
OLD_NAMES = {"lanes": "devices"}  # of facts, in files of older versions


def new_id(name: str) -> str:
    """Return a run id that sorts by time within a name: `<name>-<YYYYmmdd-HHMMSS>-<4 hex>`, safe as a folder name."""
    plain = re.sub(r"[^\w.-]+", "_", name).strip("._-")[:80] or "run"
    return f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def is_run_id(text: Any) -> bool:
    # One plain name, so that it never leads out of a folder.
    return isinstance(text, str) and re.fullmatch(r"[\w][\w.-]{0,120}", text) is not None


def stop_asked(folder: Path) -> str:
    """Return the stop requested for this run: one of STOPS, "" for none."""
    try:
        with open_record(folder / STOP) as file:
            request = file.read(MAX_REQUEST).decode("utf-8", "replace").strip()
    except OSError:
        return ""
    return request if request in STOPS[1:] else "after_step"


def request_file(folder: Path, request: str) -> Path:
    return folder / f"{request}-now"


def load_facts(path: Path) -> JsonObject:
    """Return a JSON object from a file, without facts of a wrong type; empty if the file is missing, truncated or no
    object.
    """
    try:
        content = patiently(partial(read_regular, path, MAX_RECORD), PAUSES_OF_READERS)
        facts = parse_facts(content.decode("utf-8"))
    except (OSError, ValueError):
        return {}
    renamed = {OLD_NAMES.get(name, name): value for name, value in facts.items()}
    return {name: value for name, value in renamed.items() if _is_sound_fact(name, value)}


def latest_of(kind: str, event: JsonMapping) -> JsonObject:
    """Return the numbers of an event that the fact `latest` of a record repeats, so that tables need not read all
    events."""
    if kind == "step":
        return {name: event[name] for name in LATEST_OF_STEP if name in event}
    if kind == "validation":
        return {"held_out_loss": event["loss"]} if "loss" in event else {}
    return {"sample": {"step": event.get("step"), "number": event.get("number")}} if kind == "sample" else {}


def facts_section(facts: JsonMapping, name: str) -> JsonObject:
    section = (facts.get("config") or {}).get(name)
    return section if isinstance(section, dict) else {}


def _is_sound_fact(name: str, value: Any) -> bool:
    # People edit these files, and disks damage them.
    if value is None or name not in FACT_TYPES:
        # None is no number; a missing fact has a default.
        return name not in FACT_TYPES or FACT_TYPES[name] != NUMBER
    # A bool is also an int.
    if not isinstance(value, FACT_TYPES[name]) or isinstance(value, bool) and bool not in FACT_TYPES[name]:
        return False
    if name in PLACES and ("\0" in value or len(value) > LONGEST_PATH):  # which calls of the system raise for
        return False
    return not isinstance(value, int | float) or abs(value) <= MAX_FACT  # neither NaN nor infinite


def open_record(path: Path) -> BufferedReader:
    """Open a file of a run for reading. Raises OSError for a link, which may lead to a private file, and for whatever
    is no regular file.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return open_regular(path)


def load_changed(path: str) -> JsonObject:
    return _load_cached(path, signature(path))  # the cache shares it, so callers must not modify it


@lru_cache(maxsize=4096)
def _load_cached(path: str, written: tuple[int, int, int]) -> JsonObject:
    return load_facts(Path(path))


def signature(path: str) -> tuple[int, int, int]:
    """Return values that change with every write of a file: time, length and inode; zeros without a file."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0, 0
    # `store` creates a new file for each write, so two writes within one clock tick differ, too.
    return status.st_mtime_ns, status.st_size, status.st_ino


def store(path: Path, values: JsonMapping) -> None:
    write_atomic(path, dump(values, indent=1) + "\n")  # readers see the old object or the new one


def parse_facts(text: str | bytes) -> JsonObject:
    """Parse what `dump` wrote, with its messages; empty if it is no object. Raises ValueError.

    A number beyond what a float holds becomes None, as arithmetic with it would raise.
    """
    try:
        facts = json.loads(text, parse_int=_whole_number, parse_float=_float_or_none, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(facts, dict):
        return {}
    if _nests_deeper(facts, MAX_NESTING):
        raise ValueError("nested too deeply")
    texts = facts.pop(TEXTS, None)
    try:
        return stored_messages.restored(facts, texts) if texts else facts
    except (AttributeError, KeyError, TypeError, RecursionError):  # written by another version, or by hand
        return facts


def event_lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield the complete lines of an opened progress.jsonl, and the byte after each; one beyond MAX_EVENT as b""."""
    end = file.tell()
    while line := file.readline(MAX_EVENT):
        is_whole = len(line) < MAX_EVENT or line.endswith(b"\n")
        size = len(line)
        while not line.endswith(b"\n"):
            if not (line := file.readline(MAX_EVENT)):
                return  # it is still being written
            size += len(line)
        end += size
        yield line if is_whole else b"", end


def _whole_number(digits: str) -> int | None:
    return int(digits) if len(digits) <= MAX_DIGITS else None


def _float_or_none(digits: str) -> float | None:
    return number if math.isfinite(number := float(digits)) else None


def _nests_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_nests_deeper(each, levels - 1) for each in inner if isinstance(each, dict | list))


def dump(values: JsonMapping, indent: int | None = None) -> str:
    texts = [*stored_messages.locate_texts(values)]
    return json_text(_finite_number({**values, TEXTS: texts} if texts else values), indent=indent)


def without_secrets(values: JsonMapping) -> JsonObject:
    public = {name: value for name, value in values.items() if name not in SECRETS}
    return {name: without_secrets(value) if isinstance(value, Mapping) else value for name, value in public.items()}


def secrets_in(values: JsonMapping) -> list[str]:
    texts = [str(value) for name, value in values.items() if name in SECRETS and value]
    return texts + [s for value in values.values() if isinstance(value, Mapping) for s in secrets_in(value)]


def _finite_number(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _finite_number(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_finite_number(inner) for inner in value]
    try:
        number = float(value)  # NumPy and torch scalars, too
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None


def finite_number(value: Any) -> float | None:
    """Return a number of a record; None for anything else, which an edited file may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return number if math.isfinite(number := float(value)) else None
    except OverflowError:
        return None
