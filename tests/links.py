"""Symbolic links, which most users of Windows have no right to make."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest


@cache
def work() -> bool:
    """Return whether links can be made here, and are followed."""
    with tempfile.TemporaryDirectory(prefix="kohya-link-") as folder:
        link = Path(folder) / "link"
        try:
            link.symlink_to(folder, target_is_directory=True)
            return link.is_symlink() and link.resolve() == Path(folder).resolve()
        except OSError:
            return False


def link_or_copy(new: Path, existing: Path) -> None:
    """Make a file or folder that is only read appear under a second name."""
    if work():
        new.symlink_to(existing)
    else:
        shutil.copytree(existing, new) if existing.is_dir() else shutil.copy(existing, new)


class NoLinksError(OSError):
    """Raised instead of making a link, where none can be made; the test is skipped."""


def refuse_without() -> None:
    if os.name == "nt" and not work():
        Path.symlink_to = _refuse  # pyrefly: ignore[bad-assignment]


def _refuse(*args: object, **options: object) -> None:
    raise NoLinksError("symbolic links need rights on Windows")


@contextlib.contextmanager
def skip_without() -> Iterator[None]:
    try:
        yield
    except NoLinksError as error:
        pytest.skip(str(error))
