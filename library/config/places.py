"""Whether two paths are the same file or folder, however they are spelled."""

import os
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

MAX_PROBED = 4096  # folders whose disk is probed once only


def same_place(first: str | Path, second: str | Path) -> bool:
    return real_place(first) == real_place(second)


def real_place(path: str | Path) -> str:
    """Return one spelling for all paths of a file or folder, which may not exist yet: links are followed, and case and
    composed letters count only if they count on its disk.
    """
    # On Windows normcase makes slashes the same, and case; macOS, and folders of Linux, may ignore case, too.
    place = os.path.normcase(os.path.realpath(path))
    existing = _nearest_existing(place)
    if _is_same_in(existing, str.swapcase):
        place = place.lower()
    if not place.isascii() and _is_same_in(existing, _other_form):
        place = unicodedata.normalize("NFC", place)
    return place


def _nearest_existing(place: str) -> str:
    while not _exists(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    return place


def _exists(place: str) -> bool:
    try:
        os.lstat(place)
    except (OSError, ValueError):
        return False
    return True


def _other_form(name: str) -> str:
    composed = unicodedata.normalize("NFC", name)
    return unicodedata.normalize("NFD", name) if composed == name else composed


@lru_cache(maxsize=MAX_PROBED)
def _is_same_in(existing: str, spell: Callable[[str], str]) -> bool:
    """Return whether the innermost name of an existing path that has another spelling leads to the same under that."""
    while (folder := os.path.dirname(existing)) != existing:
        name = os.path.basename(existing)
        if (other := spell(name)) != name:
            try:
                return os.path.samestat(os.lstat(existing), os.lstat(os.path.join(folder, other)))
            except OSError:
                return False
        existing = folder
    return False
