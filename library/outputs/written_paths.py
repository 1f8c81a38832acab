"""Files and folders that a training writes besides its results: logs and tokenizers."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from library.config.ineffective import ineffective_options
from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.config.schema import option_values, options_of
from library.files import nearest_existing


def find_written_path_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield options whose file or folder cannot be written, without writing anything.

    Options without effect are left out.
    """
    ineffective, values = ineffective_options(config), option_values(config)
    for name, option in options_of(type(config)).items():
        written = option.hints.get("written")
        if not written or not values[name] or name in ineffective:
            continue
        if option.kind == "folder":
            yield from _folder_problems(name, Path(values[name]), written == "if missing")
        else:
            yield from written_file_problems(name, values[name])


def written_file_problems(option: str, path: str) -> Iterator[Problem]:
    """Yield why a file cannot be written. Neither it nor its folder need exist."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # it need not exist, and what prevents it is a part of its folder
        yield from _folder_problems(option, Path(path).absolute().parent)
        return
    if stat.S_ISDIR(mode):
        yield Problem(option, ": {path} is a folder; name a file", path=path)
    elif stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):  # opening a pipe waits for its reader
        yield Problem(option, ": {path} is a pipe or a device; name an ordinary file", path=path)
    elif not os.access(path, os.W_OK):
        yield unwritable(option, path, os.strerror(errno.EACCES))


def unwritable(option: str, path: str, why: str) -> Problem:
    template = ": {path} cannot be written ({why}); change its owner, or the place it is in"
    return Problem(option, template, path=path, why=why)


def _folder_problems(option: str, folder: Path, is_read_first: bool = False) -> Iterator[Problem]:
    """Yield what prevents a folder. One that exists and is read first may be read-only: all may be in it already."""
    nearest = nearest_existing(folder)
    if nearest is None:
        drive = folder.absolute().anchor
        yield Problem(option, ": there is no {drive} here; choose a folder on another disk", drive=drive)
    elif not nearest.is_dir():
        yield Problem(option, ": {nearest} is a file; choose a folder", nearest=nearest)
    elif not os.access(nearest, os.W_OK) and not (is_read_first and nearest == folder.absolute()):
        yield Problem(option, ": {folder} cannot be written to; choose another folder", folder=nearest)
