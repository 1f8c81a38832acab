"""Measurements of this machine, stored for the next start by `compile_autotune` and `auto_compute`.

Each result has a file in the user's cache folder, named by a digest of everything that it depends on.
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
    return platformdirs.user_cache_path("kohya", appauthor=False) / "tuning"  # next to compiled code


def digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def read_result(name: str) -> JsonObject:
    """Return a stored result; empty if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        stored = json.loads((results_folder() / f"{name}.json").read_text(encoding="utf-8"))
        return stored if isinstance(stored, dict) else {}
    return {}


def store_result(name: str, facts: JsonMapping) -> None:
    with contextlib.suppress(OSError, ValueError):  # the next start measures again
        write_atomic(results_folder() / f"{name}.json", json.dumps(facts, indent=1))
