"""Delete a run that has ended: its record, and on request its models, states and samples."""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from library.config.problems import ConfigError, Message, counted, join_messages
from library.files import patiently, remove
from library.runs import dates, layout, reader, registry
from library.runs.unlisting import refuse_active
from library.runs.written_files import written_file

KINDS = ("saved", "sample")  # events that name files


@dataclass(frozen=True)
class Deletion:
    """The files to delete with a run."""

    run: reader.RecordedRun
    files: tuple[Path, ...]  # models, states (folders) and samples
    kept: tuple[Path, ...]  # written by the run, but kept
    size: int  # bytes of `files`

    def sentence(self) -> Message:
        """Return the sentence about what is deleted and what stays."""
        template = "This deletes the record of {run}, started {when}, with its settings, curves and log in {folder}."
        when = dates.moment(self.run.facts.get("started") or 0)
        parts = [Message(template, run=self.run.name, when=when, folder=self.run.folder)]
        if self.files:
            files, size = counted(len(self.files), "file"), f"{self.size / 1e9:.2f}"
            parts.append(Message("It deletes {files} with {size} GB that the run has written.", files=files, size=size))
        if self.kept:
            parts.append(Message("{files} that it has written stay.", files=counted(len(self.kept), "file")))
        return join_messages(parts, " ")


def plan_deletion(run: reader.RecordedRun, with_files: bool) -> Deletion:
    """Return what would be deleted. Files that another run has also written stay. Raises ConfigError for an active run,
    and for a folder that is no record of a run.
    """
    refuse_active(run)
    folder = run.folder
    is_record = folder.parent.name == "runs" and (folder / layout.RUN).is_file() and not folder.is_symlink()
    if not is_record:
        raise ConfigError("{folder} is not the record of a run, so it is not deleted.", folder=folder)
    written = list(dict.fromkeys(_written(run)))
    others = {path for other in reader.runs() if other.id != run.id for path in _written(other)} if written else set()
    files = [path for path in written if with_files and path not in others]
    return Deletion(run, tuple(files), tuple(path for path in written if path not in files), sum(map(_size, files)))


def _written(run: reader.RecordedRun) -> Iterator[Path]:
    """Yield the models, states and samples that a run has recorded and that exist."""
    events = reader.progress(run.folder).update().events
    for event in (event for kind in KINDS for event in events.get(kind, ())):
        path = written_file(run, event)
        if path is not None:
            yield path


def _size(path: Path) -> int:
    members: Iterable[Path] = path.rglob("*") if path.is_dir() else (path,)
    return sum(member.stat().st_size for member in members if member.is_file())


def delete_run(deletion: Deletion) -> None:
    """Carry out a deletion, the record last. Raises ConfigError for a file that cannot be deleted."""
    try:
        for path in deletion.files:
            if path.is_dir():
                patiently(partial(shutil.rmtree, path))
            else:
                remove(path)
        patiently(partial(shutil.rmtree, deletion.run.folder))
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ConfigError("{path} cannot be deleted ({why}).", path=error.filename or "", why=why) from error
    registry.forget_pointer(deletion.run.id)
