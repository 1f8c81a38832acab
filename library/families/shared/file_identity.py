"""Detect model files that are replaced or changed while a training reads them, in parts and over minutes."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from safetensors import SafetensorError, safe_open

from library.config.problems import ConfigError, counted

CHANGED = (
    "{path} was replaced or changed while it was read, so parts of two models would be mixed; start again when the "
    "file is complete"
)

DAMAGED = "{path} is damaged: {tensors} with NaN or infinity, first {tensor}; choose another file"


class WatchedFiles:
    """Files with their state when they were first opened, or expected to be."""

    def __init__(self) -> None:
        self._known: dict[Path, os.stat_result] = {}

    def note(self, paths: Iterable[Path]) -> None:
        """Remember files, or compare those that are remembered. Raises ConfigError if one has changed."""
        for path in paths:
            try:
                now = path.stat()
            except OSError:  # opening the file reports it
                continue
            if _differs(self._known.setdefault(path, now), now):
                raise ConfigError(CHANGED, path=path)

    def damaged(self) -> ConfigError | None:
        """Return the error for the first file whose weights contain NaN or infinity, None if there is none. Reads all
        files.
        """
        for path in self._known:
            if path.suffix.lower() == ".safetensors" and (names := _not_finite(path)):
                return ConfigError(DAMAGED, path=path, tensor=names[0], tensors=counted(len(names), "tensor"))
        return None

    def changed(self) -> Path | None:
        """Return the first of the files that has changed since, or is gone; None if there is none."""
        for path, earlier in self._known.items():
            try:
                now = path.stat()
            except OSError:
                return path
            if _differs(earlier, now):
                return path
        return None

    def check(self) -> None:
        if path := self.changed():
            raise ConfigError(CHANGED, path=path)


def watched() -> WatchedFiles | None:
    return _watched.get()


_watched: ContextVar[WatchedFiles | None] = ContextVar("_watched", default=None)


@contextlib.contextmanager
def watching() -> Iterator[WatchedFiles]:
    """Require every weights file opened within this context to stay unchanged from its first use."""
    files = WatchedFiles()
    token = _watched.set(files)
    try:
        yield files
    finally:
        _watched.reset(token)


def note_files(*paths: Path) -> None:
    """Register files that are or will be opened. Raises ConfigError if a watched one has changed."""
    if files := _watched.get():
        files.note(paths)


def check_watched_files() -> None:
    if files := _watched.get():
        files.check()


def _differs(earlier: os.stat_result, now: os.stat_result) -> bool:
    if (earlier.st_size, earlier.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
        return True
    # Some network disks change a file's inode number at every look; a replaced file also has another time.
    return earlier.st_ino != now.st_ino and earlier.st_ctime_ns != now.st_ctime_ns


def _not_finite(path: Path) -> list[str]:
    """Return names of weights that contain NaN or infinity. Buffers such as schedule tables legitimately may."""
    not_finite = []
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                tensor = file.get_tensor(name)
                if not tensor.is_floating_point() or not (tensor.dim() > 1 or name.endswith((".weight", ".bias"))):
                    continue
                # 8-bit types have no isfinite of their own.
                checked = tensor if tensor.element_size() > 1 else tensor.float()
                if not checked.isfinite().all():
                    not_finite.append(name)
    except (OSError, SafetensorError):
        return []
    return not_finite
