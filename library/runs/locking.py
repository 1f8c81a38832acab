"""A lock that a file stands for: held by one process at a time, and let go by the system when that process ends."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

if sys.platform == "win32":
    import msvcrt

    def _take(file: IO[Any]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

    def _let_go(file: IO[Any]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _take(file: IO[Any]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _let_go(file: IO[Any]) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)


PERIOD = 0.02  # seconds between two tries


@contextlib.contextmanager
def held(path: Path, patience: float) -> Iterator[bool]:
    """Hold the lock within the context. The value is False when another held it for `patience` seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + patience
    with path.open("a+b") as file:
        while not (mine := _tried(file)) and time.monotonic() < end:
            time.sleep(PERIOD)
        try:
            yield mine
        finally:
            if mine:
                _let_go(file)


def _tried(file: IO[Any]) -> bool:
    try:
        _take(file)
    except OSError:
        return False
    return True
