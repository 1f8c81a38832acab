"""A file lock: held by one process at a time, and released by the system when that process ends."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

PERIOD = 0.02  # seconds between two attempts


@contextlib.contextmanager
def hold_lock(path: Path, patience: float) -> Iterator[bool]:
    """Hold the lock within the context. The value is False if another process held it for `patience` seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # No fallback to a lock by mere existence of a file, which would outlive a killed process.
    lock = FileLock(path, timeout=patience, poll_interval=PERIOD, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
