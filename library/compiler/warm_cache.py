"""Which settings have all their graphs in the cache folder: an empty file for each, named by what graphs depend on."""

import contextlib
import os
from pathlib import Path

from library.compiler.cache import INDUCTOR
from library.compiler.pruning import COMPLETE


def is_warm(name: str) -> bool:
    folder = _folder()
    return folder is not None and (folder / name).exists()


def note_warm(name: str) -> None:
    """Remember settings. If the folder is not writable, their next start takes longer."""
    if folder := _folder():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()


def _folder() -> Path | None:
    cache = os.environ.get(INDUCTOR)
    return Path(cache) / COMPLETE if cache else None
