"""Keep a running training's files open, so that its record can be restored if its folder is deleted.

An open file stays readable after deletion, so its content is copied back from there. (Windows does not delete open
files.)
"""

import contextlib
import os
import shutil
from pathlib import Path
from typing import IO

from library.config.outside_files import open_regular, read_regular
from library.files import write_atomic
from library.runs import job_files, layout

PREPARED_FILES = (layout.TOML, layout.LAUNCHER)  # written only once, when the run is prepared
CONSOLE = (1, 2)  # standard output and errors: the log of a run that the page started


class FolderCopy:
    """Copies of a run folder's files except run.json, which is written every few seconds anyway."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names = [*PREPARED_FILES]
        with contextlib.suppress(OSError):
            self._names += [path.name for path in job_files.copied_files(folder).values()]
        self._small: dict[str, bytes] = {}
        self._log: IO[bytes] | None = None
        self.update()

    def update(self) -> None:
        """Read files added to the folder since the last call."""
        for name in self._names:
            if name not in self._small:
                with contextlib.suppress(OSError):
                    self._small[name] = read_regular(self.folder / name, job_files.MAX_BYTES)
        if self._log is None:
            with contextlib.suppress(OSError):
                self._log = open_regular(self.folder / layout.LOG)

    def restore(self) -> None:
        """Write missing files again; the console continues in the new log. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, content in self._small.items():
            if not (self.folder / name).exists():
                write_atomic(self.folder / name, content)
        log = self.folder / layout.LOG
        if self._log is None or is_same(self._log, log):
            return
        with log.open("ab") as fresh:
            self._log.seek(0)
            shutil.copyfileobj(self._log, fresh)
            for number in CONSOLE:
                with contextlib.suppress(OSError):
                    if os.path.sameopenfile(number, self._log.fileno()):
                        os.dup2(fresh.fileno(), number)
        self._log.close()
        self._log = open_regular(log)

    def close(self) -> None:
        # An open file keeps its disk from being unmounted.
        if self._log is not None:
            self._log.close()


def is_same(file: IO[bytes] | IO[str], path: Path) -> bool:
    """Return whether an open file is still the one with this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def copied(file: IO[str], path: Path) -> IO[str]:
    """Copy an open text file to `path`, and return the copy, open for appending."""
    fresh = path.open("a+", encoding="utf-8", buffering=1)
    file.seek(0)
    shutil.copyfileobj(file, fresh)
    file.close()
    return fresh
