"""Handle files that cannot be written to their place: the disk is full, unplugged or read-only."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from library.config.problems import ConfigError, Message, MessageLike
from library.files import UnwritableError
from library.runs import registry
from library.runs.record import error_sentence
from library.train.journal import Journal

NOT_SAVED = (
    "{file} is not saved: {why}; the training continues and tries again with the next file: make room, or connect the "
    "disk again, in the meantime"
)
NOT_SAVED_AT_END = "{file} is not saved: {why}"
SAVED_ELSEWHERE = "{why}; {file} is saved in {folder} instead: move it once there is room"
UNWRITABLE = (UnwritableError, OSError)
Write = Callable[[Path], None]


# Why: docs/decisions/2026-11-29-a-full-disk-costs-no-result.md
class Writing:
    """Writes files and states of a training, in its first process.

    A failure during the training is a warning. At its end, files go to another folder if the output folder cannot take
    them.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._failing: set[str] = set()  # those of "file" and "state" that failed the last time
        self._elsewhere: Message | None = None  # where the result is, if not in the output folder

    def during(self, path: Path, write: Write) -> bool:
        """Write a file or folder that nothing else depends on; return whether it exists then."""
        kind = "state" if path.name.endswith("-state") else "file"  # it may not exist
        try:
            write(path)
        except UNWRITABLE as error:
            if kind not in self._failing:  # once, as hundreds of files may fail
                self._failing.add(kind)
                self._journal.warn(Message(NOT_SAVED, file=path.name, why=error_sentence(error)))
            return False
        self._failing.discard(kind)
        return True

    def result(self, path: Path, write: Write) -> None:
        """Write a final file. Raises UnwritableError or OSError if no folder can take it."""
        try:
            write(path)
        except UNWRITABLE as error:
            if not (moved := self._written_elsewhere(path, write, error_sentence(error))):
                raise
            self._elsewhere = moved

    def last_state(self, path: Path, write: Write) -> None:
        """Write the final state; if no folder can take it, only warn, as the result is still to be saved."""
        try:
            write(path)
        except UNWRITABLE as error:
            why = error_sentence(error)
            moved = self._written_elsewhere(path, write, why)
            self._journal.warn(moved or Message(NOT_SAVED_AT_END, file=path.name, why=why))

    def check(self) -> None:
        """Raise ConfigError if the result is not in the output folder."""
        if self._elsewhere:
            raise ConfigError(self._elsewhere)

    def _written_elsewhere(self, path: Path, write: Write, why: MessageLike) -> Message | None:
        for folder in self._other_folders(path.parent):
            try:
                write(folder / path.name)
            except UNWRITABLE:
                continue
            return Message(SAVED_ELSEWHERE, why=why, file=path.name, folder=folder)
        return None

    def _other_folders(self, output: Path) -> Iterator[Path]:
        """Yield folders of this run, so that nothing is overwritten there."""
        run = self._journal.record.folder.name if self._journal.record else output.name
        for folder in (registry.data_folder(), Path(tempfile.gettempdir()) / "kohya"):
            yield folder / "rescued" / run
