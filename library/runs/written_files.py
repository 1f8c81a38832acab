"""The files that a run's record names as written. Records may come from outside, so only output of a training
counts."""

import contextlib
from pathlib import Path

from library.config.json_types import JsonMapping
from library.files import STATE_FACTS
from library.runs import reader

SAMPLE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
MODEL_ENDINGS = (".safetensors", ".ckpt", ".pt")
FOLDER_MARKS = (STATE_FACTS, "model_index.json")  # each folder written by a training contains one of these


def written_file(run: reader.RecordedRun, event: JsonMapping) -> Path | None:
    """Return the file or folder that an event names, or None if it is not a model, state or sample that exists below
    the output folder of the run.
    """
    name = event.get("file")
    if not isinstance(name, str) or not name:
        return None
    with contextlib.suppress(
        OSError, ValueError, RuntimeError
    ):  # names that contain NUL or are too long, or circular links
        path = (Path(str(run.facts.get("folder") or ".")) / name).resolve()
        home = Path(str(run.facts.get("output_dir") or run.folder.parent.parent)).resolve()
        is_apart = path != home and path.is_relative_to(home) and not path.is_relative_to(run.folder.resolve())
        if is_apart and _is_of_a_training(path):
            return path
    return None


def sample_file(run: reader.RecordedRun, event: JsonMapping) -> Path | None:
    """Return the image that an event names, or None, as `written_file` does."""
    path = written_file(run, event)
    return path if path is not None and path.suffix.lower() in SAMPLE_ENDINGS else None


def _is_of_a_training(path: Path) -> bool:
    if path.is_dir():
        return any((path / mark).is_file() for mark in FOLDER_MARKS)
    return path.is_file() and path.suffix.lower() in SAMPLE_ENDINGS + MODEL_ENDINGS
