"""Delete compiled code from a cache folder: the least recently used above a limit, and damaged files.

PyTorch compiles missing code again, so deleting too much only slows down the next start.
"""

import base64
import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Folders of PyTorch and Triton with one sub-folder per graph or kernel. Their sources and
# the output of a C++ compiler are beside them, in folders named by two letters of the file's name.
CACHE_FOLDERS = ("aotautograd", "fxgraph", "triton")
LETTERS, NAME_LENGTH = 2, 52
COMPLETE = "complete"  # folder that says which trainings have all their graphs here (`cache.is_warm`)
LOOKED_AT = (".py", ".json")  # `repair` reads these at every start, so their access time says nothing


@dataclass(frozen=True)
class Piece:
    """The unit of deletion: a file, or the folder of a graph or kernel."""

    path: Path
    used: float
    size: int


def trim(folder: Path, max_bytes: int) -> int:
    """Delete the least recently used pieces until at most `max_bytes` bytes are left; return how many are."""
    # Only files of PyTorch and Triton count, as the user may have chosen a folder with other files.
    pieces = sorted(_cache_pieces(folder), key=lambda piece: piece.used)
    remaining = sum(piece.size for piece in pieces)
    if remaining > max_bytes:
        _remove(folder / COMPLETE)
    for piece in pieces:
        if remaining <= max_bytes:
            break
        _remove(piece.path)
        remaining -= piece.size
    return remaining


# PyTorch trusts generated code and kernel metadata, so a damaged file would fail at every start.
# Why: docs/decisions/2026-11-22-damaged-cache-files.md
def repair(folder: Path) -> int:
    """Delete code that would fail at every start: its hash differs from its name, or its kernel's metadata is
    truncated.

    PyTorch detects and replaces other damaged files, but not these. Returns the number of deleted pieces.
    """
    sources = (
        file
        for subfolder in _shard_folders(folder)
        for file in subfolder.glob("c*.py")
        if len(file.stem) == NAME_LENGTH
    )
    damaged = [*filter(_is_changed, sources), *filter(_is_torn, _leaf_folders(folder / "triton"))]
    for path in damaged:
        _remove(path)
    if damaged:
        _remove(folder / COMPLETE)
    return len(damaged)


def _cache_pieces(folder: Path) -> Iterator[Piece]:
    for subfolder in (subfolder for name in CACHE_FOLDERS for subfolder in _leaf_folders(folder / name)):
        files = [piece for file in subfolder.iterdir() if (piece := _piece(file))]
        yield Piece(subfolder, max((p.used for p in files), default=0.0), sum(p.size for p in files))
    for subfolder in _shard_folders(folder):
        yield from (piece for file in subfolder.iterdir() if len(file.name) > NAME_LENGTH and (piece := _piece(file)))


def _piece(file: Path) -> Piece | None:
    with contextlib.suppress(OSError):  # another process may delete it
        status = file.stat()
        access_time = 0.0 if file.suffix in LOOKED_AT else status.st_atime
        return Piece(file, max(access_time, status.st_mtime), status.st_size)
    return None


def _leaf_folders(root: Path) -> Iterator[Path]:
    """Yield the folders below `root` that contain files."""
    for subfolder, _, files in os.walk(root):
        if files:
            yield Path(subfolder)


def _shard_folders(folder: Path) -> Iterator[Path]:
    for subfolder in folder.iterdir() if folder.is_dir() else ():
        if len(subfolder.name) == LETTERS and subfolder.is_dir():
            yield subfolder


def _is_changed(file: Path) -> bool:
    """Return whether generated code does not match its name's hash, as after a power failure or on a full disk."""
    try:
        # The name is that of the text, which PyTorch writes with the line ends of the system.
        digest = hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n").strip()).digest()
    except OSError:
        return False
    return file.stem != "c" + base64.b32encode(digest)[: NAME_LENGTH - 1].decode().lower()


def _is_torn(folder: Path) -> bool:
    try:
        for file in folder.glob("*.json"):
            json.loads(file.read_bytes())
    except ValueError:
        return True
    except OSError:
        return False
    return False


def _remove(path: Path) -> None:
    """Delete a file or folder. On Windows a file in use stays."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
