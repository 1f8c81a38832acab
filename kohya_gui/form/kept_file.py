"""Files that the form writes while the user types, without overwriting what another program has written meanwhile."""

import hashlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from kohya_gui.server import paths
from library.config.problems import ConfigError, Problem


def file_state(path: Path) -> str:
    """What a file holds, to be told from what another visitor or program makes of it; "" where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def check_unchanged(path: Path, known: str, option: str) -> None:
    """Raise ConfigError unless a file is what it was when its `state` was `known`."""
    if known != file_state(path):
        template = ": {path} was changed elsewhere meanwhile; load the page again to see what it holds now"
        raise ConfigError(Problem(option, template, path=path))


def check_editable(path: Path, option: str) -> None:
    """Raise ConfigError for what is no file, or one that is far too large to be written by hand."""
    if not path.is_file() or path.stat().st_size > paths.MAX_CONFIG_BYTES:
        raise ConfigError(Problem(option, ": {path} is no such file, or far too large for one", path=path))


def free_path(path: Path) -> Path:
    """This path, or the first with a number behind its name that is not there."""
    return next(numbered_path for numbered_path in numbered_paths(path) if not numbered_path.exists())


def numbered_paths(path: Path) -> Iterator[Path]:
    """This path, and then with the numbers from 2 on behind its name."""
    yield path
    for number in count(2):
        yield path.with_stem(f"{path.stem}-{number}")
