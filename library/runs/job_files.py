"""The files of a training at its start: its config, and copies of its prompt and data set files."""

import contextlib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from library.config.formats import toml_value
from library.config.json_types import JsonObject
from library.config.outside_files import parse_toml, read_bytes
from library.config.problems import ConfigError
from library.config.schema import flatten_sections
from library.files import write_atomic

if TYPE_CHECKING:
    from library.runs.start import TrainingJob

# Options whose files people edit between two trainings. The paths in these files do not depend on where they are.
COPIED = ("sample_prompts", "dataset_config")
MAX_BYTES = 10_000_000  # bytes of a copied file; larger ones are not copied
NUMBER = re.compile(r"-(\d{1,6})$")  # suffix of a name by `free_name`


def named_files(job: "TrainingJob") -> dict[str, Path]:
    """Return the files to copy that a job's config names, by option."""
    return files_in(values_of(job.toml), job.folder)


def files_in(values: Mapping[str, object], folder: str) -> dict[str, Path]:
    """Return the files to copy that settings name, by option; relative ones are in `folder`."""
    files = {}
    for option in COPIED:
        value = values.get(option)
        path = Path(folder or ".", value) if isinstance(value, str | Path) and str(value) else None
        with contextlib.suppress(OSError):  # an unreadable folder, or a name that is too long
            if path and path.is_file() and path.stat().st_size <= MAX_BYTES:
                files[option] = path
    return files


def record_files(values: Mapping[str, object], folder: str, run_folder: Path) -> None:
    """Copy the files named by a run's settings to its folder; skip those that cannot be copied. The training reads the
    originals, and reports problems with them.
    """
    for option, path in files_in(values, folder).items():
        with contextlib.suppress(OSError, ConfigError):
            copy_files({option: path}, run_folder)


def values_of(toml: str) -> JsonObject:
    """Return a config's values by option; {} for a damaged one."""
    try:
        return flatten_sections(parse_toml(toml, "run.toml"), [])
    except ConfigError:
        return {}


def copy_files(files: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """Copy files into a folder, each under the name of its option. Return the copies by option."""
    copies = {option: folder / f"{option}{path.suffix.lower()}" for option, path in files.items()}
    for option, copy in copies.items():
        write_atomic(copy, read_bytes(files[option], MAX_BYTES))
    return copies


def copied_files(folder: Path) -> dict[str, Path]:
    """Return the files that `copy_files` has put into a folder, by option. Links are ignored, as they may lead
    anywhere.
    """
    if not folder.is_dir():
        return {}
    copies = (path for path in folder.iterdir() if path.stem in COPIED)
    return {path.stem: path for path in copies if path.is_file() and not path.is_symlink()}


def with_options(toml: str, values: Mapping[str, str]) -> str:
    """Return a config's text with other values of text options."""
    for option, value in values.items():
        line = f"{option} = {toml_value(value)}"
        toml, count = re.subn(rf"^{option} = .*$", lambda _, line=line: line, toml, count=1, flags=re.MULTILINE)
        toml = toml if count else f"{line}\n{toml}"  # above all tables, whose names have no meaning
    return toml


def free_name(name: str, output: str, taken: Collection[str]) -> str:
    """Return an output name like `name` that is not taken, and is no prefix of a file in the output folder."""
    numbered = NUMBER.search(name)
    stem, number = (name[: numbered.start()], int(numbered[1])) if numbered else (name, 1)
    existing = [file.lower() for file in os.listdir(output)] if Path(output).is_dir() else []
    while True:
        number += 1
        candidate = f"{stem}-{number}"
        if candidate not in taken and not any(file.startswith(candidate.lower()) for file in existing):
            return candidate
