"""Data sets from another trainer's file, converted to a dataset file that the form then names."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kohya_gui.form import datasets, kept_file
from library import importers
from library.config.json_types import JsonMapping
from library.config.outside_files import read_outside_text
from library.config.problems import ConfigError, MessageLike
from library.config.run_config import RunConfig
from library.files import write_atomic

DATASET_OPTION = "dataset_config"
REPLACED = ("train_data_dir", "reg_data_dir", "in_json")  # by a dataset file


@dataclass(frozen=True, slots=True)
class ConvertedData:
    """Data sets of another trainer: the text of a dataset file, and a sentence for each key that was dropped."""

    text: str
    notes: tuple[MessageLike, ...]


def only_data(contents: JsonMapping, path: Path) -> ConvertedData | None:
    """Return the data sets of a file without a training; None for any other file."""
    try:
        importers.refuse_dataset(contents, path)
    except ConfigError:
        if importers.is_foreign_dataset(contents):
            text, notes = importers.convert_foreign_dataset(contents)
            return ConvertedData(text, tuple(notes))
    return None


def write_imported_data(text: str, config: RunConfig, roots: Sequence[Path]) -> Path:
    """Save a dataset file beside the result of a training, or below the first root if the page may not write there.

    No file is overwritten; an existing file with the same contents is used again.
    """
    try:
        return _write_data_file(text, datasets.dataset_file_place(config, roots))
    except ConfigError:  # such as a folder of another computer
        return _write_data_file(text, datasets.dataset_file_place(config, roots, is_at_home=True))


def _write_data_file(text: str, preferred: Path) -> Path:
    path = next(
        candidate
        for candidate in kept_file.numbered_paths(preferred)
        if not candidate.exists() or _file_has_text(candidate, text)
    )
    return path if path.exists() else write_atomic(path, text)


def _file_has_text(path: Path, text: str) -> bool:
    try:
        return path.is_file() and read_outside_text(path) == text
    except (ConfigError, OSError):
        return False
