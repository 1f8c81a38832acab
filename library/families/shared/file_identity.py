"""Notice model files that are replaced or changed while a training reads them, part by part and over minutes."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from library.config.problems import ConfigError

CHANGED = (
    "{path} was replaced or changed while it was read, so parts of two models would be mixed; start again when the "
    "file is complete"
)


class WatchedFiles:
    """Files by what they were when they were first opened, or expected to be."""

    def __init__(self) -> None:
        self._known: dict[Path, os.stat_result] = {}

    def note(self, paths: Iterable[Path]) -> None:
        """Remember files, or compare those that are known. Raises ConfigError for one that has changed."""
        for path in paths:
            try:
                now = path.stat()
            except OSError:  # who opens it says so
                continue
            if _differs(self._known.setdefault(path, now), now):
                raise ConfigError(CHANGED, path=path)

    def check(self) -> None:
        """Raise ConfigError when one of the files has changed since, or is gone."""
        for path, known in self._known.items():
            try:
                now = path.stat()
            except OSError as e:
                raise ConfigError(CHANGED, path=path) from e
            if _differs(known, now):
                raise ConfigError(CHANGED, path=path)


_watched: ContextVar[WatchedFiles | None] = ContextVar("_watched", default=None)


@contextlib.contextmanager
def watching() -> Iterator[WatchedFiles]:
    """Within the context, every file of weights that is opened has to stay what it was at the first time."""
    files = WatchedFiles()
    token = _watched.set(files)
    try:
        yield files
    finally:
        _watched.reset(token)


def opened(path: Path) -> None:
    """Say that a file is opened. Raises ConfigError where it is watched and has changed."""
    if files := _watched.get():
        files.note([path])


def _differs(known: os.stat_result, now: os.stat_result) -> bool:
    if (known.st_size, known.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
        return True
    # Some network disks number a file anew at each look; a file that took another's place has another time as well.
    return known.st_ino != now.st_ino and known.st_ctime_ns != now.st_ctime_ns
