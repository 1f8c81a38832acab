"""Tokens and keys that the user wants kept: in one file of their own that nobody else may read, and in no config.

A training gets them by its environment. What stands in the environment already wins over what is kept here.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from library.config.json_types import JsonMapping
from library.files import write_atomic
from library.runs import layout, registry

ENVIRONMENT = {"wandb_api_key": "WANDB_API_KEY", "huggingface_token": "HF_TOKEN"}


# Why: docs/decisions/2026-11-20-tokens-in-one-file.md
def keys_file() -> Path:
    """The file."""
    return registry.data_folder() / "keys.json"


def stored_keys() -> dict[str, str]:
    """What is kept, by option name."""
    return {name: value for name, value in layout.load_facts(keys_file()).items() if name in ENVIRONMENT and value}


def store_keys(given: Mapping[str, str | None]) -> list[str]:
    """Keep what is given and not empty; the names of what is new. The file is readable by its owner only (0600)."""
    new = {
        name: value
        for name, value in given.items()
        if name in ENVIRONMENT and value and stored_keys().get(name) != value
    }
    if new:
        store_privately(keys_file(), {**stored_keys(), **{name: str(value) for name, value in new.items()}})
    return list(new)


def forget_key(name: str) -> None:
    """Keep one of them no longer."""
    if name in stored_keys():
        store_privately(keys_file(), {other: value for other, value in stored_keys().items() if other != name})


def key_environment() -> dict[str, str]:
    """What a training is to be given, by variable."""
    return {ENVIRONMENT[name]: value for name, value in stored_keys().items() if not os.environ.get(ENVIRONMENT[name])}


def store_privately(path: Path, values: JsonMapping) -> None:
    """Write a JSON object into a file that only its owner may read (0600)."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(temporary: Path) -> None:
        # Made with the rights it has to have: between making and changing them anyone could read.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(layout.dump(values, indent=1) + "\n")

    write_atomic(path, write)
