"""What was measured on this machine, stored for the next start: `compile_autotune` and `auto_compute` keep theirs here.

Each result has a file in the user's cache folder, named after all that it depends on.
"""

import contextlib
import hashlib
import json
from pathlib import Path

import platformdirs

from library.config.json_types import JsonMapping, JsonObject
from library.files import write_atomic


# Why: docs/decisions/2026-11-27-four-ways-to-faster-settings.md
def results_folder() -> Path:
    """The folder of stored results: beside compiled code, in the user's cache folder."""
    return platformdirs.user_cache_path("kohya", appauthor=False) / "tuning"


def digest(facts: object) -> str:
    """The name of a result, by the facts that it depends on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def read_result(name: str) -> JsonObject:
    """A stored result; empty if there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError):
        known = json.loads((results_folder() / f"{name}.json").read_text(encoding="utf-8"))
        return known if isinstance(known, dict) else {}
    return {}


def store_result(name: str, facts: JsonMapping) -> None:
    """Store a result. If the folder cannot be written, the next start measures again."""
    with contextlib.suppress(OSError, ValueError):
        write_atomic(results_folder() / f"{name}.json", json.dumps(facts, indent=1))
