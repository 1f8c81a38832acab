"""Files that the form saves while the user types, without overwriting changes by other programs."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from kohya_gui.server import paths
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig


def state(path: Path) -> str:
    """A hash of a file's contents, which changes if another visitor or program edits it; "" if there is no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def check_unchanged(path: Path, known: str, option: str) -> None:
    """Raise ConfigError unless a file still has the `state` that is `known`."""
    if known != state(path):
        template = ": {path} was changed elsewhere meanwhile; load the page again to see what it holds now"
        raise ConfigError(Problem(option, template, path=path))


def check_size(path: Path, option: str) -> None:
    """Raise ConfigError for anything that is not a file, or a file far too large to be written by hand."""
    if not path.is_file() or path.stat().st_size > paths.MAX_CONFIG_BYTES:
        raise ConfigError(Problem(option, ": {path} is no such file, or far too large for one", path=path))


def beside_result(config: RunConfig, roots: Sequence[Path]) -> Path:
    """The folder for a file that the form writes for a training: that of the result.

    A relative one has come from a config of elsewhere. The folder that this server was started in has nothing to do
    with it, so `at_home` is taken instead; so it is where no folder is set.
    """
    folder = config.save.output_dir or ""
    return Path(folder) if os.path.isabs(folder) else at_home(roots)


def at_home(roots: Sequence[Path]) -> Path:
    """The folder for files of a training whose own may not be written to: below the first root, the user's home."""
    return next((root for root in roots if root.is_dir()), roots[0]) / "kohya"


def free(path: Path) -> Path:
    """This path, or the first numbered one that does not exist."""
    return next(one for one in numbered(path) if not one.exists())


def numbered(path: Path) -> Iterator[Path]:
    """This path, and then with numbers from 2 behind its name."""
    yield path
    for number in count(2):
        yield path.with_stem(f"{path.stem}-{number}")
