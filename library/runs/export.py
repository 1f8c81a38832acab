"""A run as one zip file for its user: record, settings, note, log and samples. Nothing is redacted, unlike in a support
bundle.
"""

import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from library.config.outside_files import open_regular
from library.config.problems import ConfigError
from library.runs import layout, notes, reader
from library.runs.written_files import sample_file

FILES = (layout.RUN, layout.TOML, layout.PROGRESS, layout.LOG, notes.NOTE)
MAX_SAMPLE_BYTES = 500_000_000  # of all samples; the newest ones are kept


def export_run(run: reader.RecordedRun) -> IO[bytes]:
    """Return an open temporary file with the zip of a run, at its beginning; it is deleted when it is closed."""
    packed = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        with zipfile.ZipFile(packed, "w") as archive:
            for path in (run.folder / name for name in FILES):
                if path.is_file() and not path.is_symlink():  # a link may lead to a private file
                    _add(archive, path, path.name, zipfile.ZIP_DEFLATED)
            for path in sorted(_samples(run)):
                _add(archive, path, f"samples/{path.name}", zipfile.ZIP_STORED)
    except OSError as error:
        packed.close()
        raise ConfigError("The run cannot be exported ({why}).", why=error.strerror or error) from error
    packed.seek(0)
    return packed


def _add(archive: zipfile.ZipFile, path: Path, name: str, method: int) -> None:
    # A file that grows meanwhile would not fit the size that ZipFile.write notes first.
    entry = zipfile.ZipInfo(name)
    entry.compress_type = method
    with open_regular(path) as source, archive.open(entry, "w", force_zip64=True) as target:
        shutil.copyfileobj(source, target)


def _samples(run: reader.RecordedRun) -> Iterator[Path]:
    """Yield the images that a run has made, below the folder that it writes to."""
    remaining, seen = MAX_SAMPLE_BYTES, set[Path]()
    for event in reversed(reader.progress(run.folder).update().events.get("sample", ())):
        path = sample_file(run, event)
        if path is None or path in seen:
            continue
        seen.add(path)
        remaining -= path.stat().st_size
        if remaining < 0:
            return
        yield path
