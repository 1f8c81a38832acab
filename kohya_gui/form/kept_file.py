"""Files that the form saves while the user types, without overwriting changes by other programs."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from kohya_gui.server import paths
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, Problem
from library.config.run_config import RunConfig
from library.files import write_atomic


def file_state(path: Path) -> str:
    # The hash changes if another visitor or program edits the file.
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def check_unchanged(path: Path, known_state: str, option: str) -> None:
    """Raise ConfigError unless a file still has the `file_state` that the page loaded."""
    if known_state != file_state(path):
        template = ": {path} has been changed elsewhere; load the page again to see its contents"
        raise ConfigError(Problem(option, template, path=path))


def check_editable(path: Path, option: str) -> None:
    if not path.is_file() or path.stat().st_size > paths.MAX_CONFIG_BYTES:
        raise ConfigError(Problem(option, ": {path} is not a file, or is far too large to be edited", path=path))


def save(path: Path, text: str) -> JsonObject:
    """Write a file, and return the answer for the page."""
    write_atomic(path, text)
    return {"file": str(path), "known": file_state(path), "said": Message("Saved in {path}.", path=path)}


def beside_result(config: RunConfig, roots: Sequence[Path]) -> Path:
    """Return the folder for a file that the form writes for a training: that of the result.

    A relative folder comes from a config of another program, and has nothing to do with the folder that this server
    was started in. `at_home` replaces it, and also serves where no folder is set.
    """
    folder = config.save.output_dir or ""
    return Path(folder) if os.path.isabs(folder) else at_home(roots)


def at_home(roots: Sequence[Path]) -> Path:
    # The first root is the user's home.
    return next((root for root in roots if root.is_dir()), roots[0]) / "kohya"


def free_path(path: Path) -> Path:
    return next(candidate for candidate in numbered_paths(path) if not candidate.exists())


def numbered_paths(path: Path) -> Iterator[Path]:
    """This path, and then with numbers from 2 behind its name."""
    yield path
    for number in count(2):
        yield path.with_stem(f"{path.stem}-{number}")
