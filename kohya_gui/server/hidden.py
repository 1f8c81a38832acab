"""Hidden and reserved names in paths: hidden folders hold the settings and keys of other programs."""

import contextlib
import os
import stat
import sys
from pathlib import Path, PurePath
from typing import Any

from library.config.values import RESERVED, WINDOWS

MARKS_HIDDEN = sys.platform in ("win32", "darwin")  # elsewhere only a dot hides
# Folders of Windows with settings and keys of programs, or with what was deleted.
OF_WINDOWS = {"appdata", "application data", "local settings", "$recycle.bin", "system volume information"}


def is_hidden_name(name: str) -> bool:
    """Return whether a name is hidden or reserved by itself."""
    of_windows = WINDOWS and name.casefold() in OF_WINDOWS
    return name.startswith(".") or of_windows or is_reserved_name(name)


def is_reserved_name(name: str) -> bool:
    """Return whether Windows gives a name another meaning than a file's or folder's."""
    return bool(RESERVED.fullmatch(name)) or ":" in name


def is_marked_hidden(status: Any) -> bool:
    """Return whether the status of a file or folder says that it is hidden, as Windows and macOS mark them."""
    of_windows = getattr(status, "st_file_attributes", 0) & stat.FILE_ATTRIBUTE_HIDDEN
    return bool(of_windows or getattr(status, "st_flags", 0) & stat.UF_HIDDEN)


def has_hidden_part(root: Path, below: PurePath) -> bool:
    """Return whether a path below a root leads through something hidden or reserved."""
    path = root
    for part in below.parts:
        path /= part
        if is_hidden_name(part):
            return True
        with contextlib.suppress(OSError, ValueError):
            if is_marked_hidden(os.stat(path, follow_symlinks=False)):
                return True
    return False
