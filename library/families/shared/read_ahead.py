"""Prefetch files of weights into the system's page cache while Python still imports packages. Needs no torch."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from library.config.problems import ConfigError
from library.families.shared import weights
from library.families.shared.folder_checkpoints import checkpoints

PIECE_BYTES = 2**22  # of one read
READER_THREADS = 4
MAX_SHARE = 0.5  # of the free memory, so that the file is still cached when it is needed


def start_reading(path: Path, prefix: str = "") -> list[threading.Thread]:
    """Read a model in the background: a file's tensors whose names begin with `prefix`, or a folder's largest part.

    Readers of the file need no change, and find it in memory as far as this has come. Errors are ignored here, and
    reported by those readers.
    """
    pieces, lock = _file_pieces(path, prefix, int(psutil.virtual_memory().available * MAX_SHARE)), threading.Lock()

    def work() -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        try:
            while True:
                with lock:
                    file, offset, length = next(pieces, (path, 0, 0))  # generators are not thread-safe
                if not length:
                    return
                _touch(file, offset, buffer[:length])
        except (OSError, ValueError, ConfigError):
            return

    threads = [threading.Thread(target=work, name="read ahead", daemon=True) for _ in range(READER_THREADS)]
    for thread in threads:
        thread.start()
    return threads


def _file_pieces(path: Path, prefix: str, max_bytes: int) -> Iterator[tuple[Path, int, int]]:
    for file in _largest_part_files(path):
        first, last = 0, file.stat().st_size
        if prefix and file.suffix == ".safetensors":
            entries = weights.header_entries(file)
            with file.open("rb") as opened:
                start = 8 + int.from_bytes(opened.read(8), "little")  # data begins after the header and its length
            ranges = [entry["data_offsets"] for name, entry in entries.items() if name.startswith(prefix)]
            if ranges:
                first, last = start + min(begin for begin, _ in ranges), start + max(end for _, end in ranges)
        for offset in range(first, min(last, first + max_bytes), PIECE_BYTES):
            yield file, offset, min(PIECE_BYTES, last - offset)
        max_bytes -= last - first
        if max_bytes <= 0:
            return


def _largest_part_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return weights.files(path)
    if len(checkpoints(path)) > 1:  # one of them, which their headers tell later
        return []
    parts: dict[Path, list[Path]] = {}
    for file in path.rglob("*.safetensors"):
        parts.setdefault(file.parent, []).append(file)
    return sorted(max(parts.values(), key=lambda files: sum(file.stat().st_size for file in files), default=[]))


def _touch(path: Path, offset: int, memory: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "RWF_NOWAIT"):
            try:  # skip a piece whose ends are in memory
                ends = (offset, offset + len(memory) - 1)
                if all(os.preadv(file.fileno(), [memory[:1]], end, os.RWF_NOWAIT) for end in ends):
                    return
            except OSError:  # unknown on this file system
                pass
        file.seek(offset)
        file.readinto(memory)
