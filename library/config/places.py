"""Compare paths by the file or folder they lead to, however they are spelled."""

import os
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

MAX_PROBED = 4096  # paths whose answers are kept


def same_place(first: str | Path, second: str | Path) -> bool:
    return real_place(first) == real_place(second)


def real_place(path: str | Path) -> str:
    """Return one spelling for all paths of a file or folder, which need not exist.

    Follows links. Case and the Unicode form (NFC, NFD) count only if they count on that disk.
    """
    # normcase unifies slashes and case on Windows. macOS, and some folders on Linux, ignore case, too.
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
    """Return whether an existing path stays the same if its innermost name that `spell` changes is spelled so."""
    while (folder := os.path.dirname(existing)) != existing:
        name = os.path.basename(existing)
        if (other := spell(name)) != name:
            try:
                return os.path.samestat(os.lstat(existing), os.lstat(os.path.join(folder, other)))
            except OSError:
                return False
        existing = folder
    return False
