"""The user's stored tokens and keys: in a private file, never in a config.

A training gets them by its environment. Variables that are already set win.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from library.config.json_types import JsonMapping
from library.config.run_config import RunConfig
from library.config.schema import options_of
from library.files import write_atomic
from library.runs import layout, registry

ENVIRONMENT = {"wandb_api_key": "WANDB_API_KEY", "huggingface_token": "HF_TOKEN"}


# Configs, records and the queue are shared and copied, so no token may be in them.
# Why: docs/decisions/2026-11-20-tokens-in-one-file.md
def keys_file() -> Path:
    return registry.data_folder() / "keys.json"


def keys_of_config(config: RunConfig) -> dict[str, str | None]:
    options = options_of(type(config))
    return {name: getattr(getattr(config, options[name].section), name) for name in ENVIRONMENT if name in options}


def stored_keys() -> dict[str, str]:
    return {name: value for name, value in layout.load_facts(keys_file()).items() if name in ENVIRONMENT and value}


def store_keys(values: Mapping[str, str | None]) -> list[str]:
    """Store non-empty values; return the names of new ones. Only the owner may read the file (0600)."""
    new = {
        name: value
        for name, value in values.items()
        if name in ENVIRONMENT and value and stored_keys().get(name) != value
    }
    if new:
        store_privately(keys_file(), {**stored_keys(), **{name: str(value) for name, value in new.items()}})
    return list(new)


def forget_key(name: str) -> None:
    if name in stored_keys():
        store_privately(keys_file(), {other: value for other, value in stored_keys().items() if other != name})


def webhook_file() -> Path:
    return registry.data_folder() / "webhook.json"


def stored_webhook() -> str:
    """Return the address of the webhook, "" without one. It may contain a key."""
    address = layout.load_facts(webhook_file()).get("address")
    return address if isinstance(address, str) else ""


def key_environment() -> dict[str, str]:
    return {ENVIRONMENT[name]: value for name, value in stored_keys().items() if not os.environ.get(ENVIRONMENT[name])}


def store_privately(path: Path, values: JsonMapping) -> None:
    """Write a JSON object into a file that only its owner may read (0600)."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(temporary: Path) -> None:
        # Create the file with these rights; changing them afterwards would leave it readable for a moment.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(layout.dump(values, indent=1) + "\n")

    write_atomic(path, write)
