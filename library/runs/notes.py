"""A user's note about a run: plain text in the run's folder."""

from pathlib import Path

from library.config.problems import ConfigError
from library.files import remove, write_atomic
from library.runs import layout

NOTE = "note.txt"
MAX_NOTE_LENGTH = 20_000  # maximum characters
MAX_NOTE_BYTES = 4 * MAX_NOTE_LENGTH


def read_note(folder: Path) -> str:
    """Return the note about the run in this folder, "" without one."""
    try:
        with layout.open_record(folder / NOTE) as file:
            text = file.read(MAX_NOTE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return text[:MAX_NOTE_LENGTH].replace("\r\n", "\n").strip()


def write_note(folder: Path, text: str) -> str:
    """Store a note and return it as stored; an empty one deletes the file. Raises ConfigError if it is too long or the
    folder cannot be written to.
    """
    text = text.replace("\r\n", "\n").replace("\0", "").strip()
    if len(text) > MAX_NOTE_LENGTH:
        raise ConfigError(
            "A note can have at most {most} characters; this one has {count}.",
            most=f"{MAX_NOTE_LENGTH:,}",
            count=f"{len(text):,}",
        )
    if not folder.is_dir():
        raise ConfigError("The folder of this run is gone, so a note about it cannot be kept.")
    if text:
        write_atomic(folder / NOTE, text + "\n")
        return text
    try:
        remove(folder / NOTE)
    except OSError as error:
        raise ConfigError("The note cannot be deleted: {why}.", why=error.strerror or error) from error
    return ""
