"""How busy this machine is: GPUs by way of nvidia-smi, memory, disk. Looked up aside, so that nobody waits for it."""

import os
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

SPACING = 2.5  # seconds between two looks at the GPUs; each takes a tenth of a second, and more on large machines
SOLD = 0.945  # a card sold with 24 GB tells of 23.6 to 24 GiB, one of 8 GB of 7.6 at least
FIELDS = ("index", "name", "memory.used", "memory.total", "utilization.gpu", "temperature.gpu", "power.draw")


def has_memory(gib: float, gigabytes: int) -> bool:
    """Whether a GPU that tells of `gib` GiB is sold as one of this many GB, or of more."""
    return gib >= gigabytes * SOLD


@dataclass
class Gpus:
    """What nvidia-smi said last. The first question gets no answer yet, and a machine without GPUs never any."""

    _found: list[dict[str, Any]] = field(default_factory=list)
    _at: float = 0.0
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def now(self) -> list[dict[str, Any]]:
        """Each GPU with name, used and total (GiB), busy (percent), degrees and watts, as far as it tells."""
        if time.monotonic() - self._at > SPACING and self._busy.acquire(blocking=False):
            self._at = time.monotonic()
            threading.Thread(target=self._look, name="nvidia-smi", daemon=True).start()
        return self._found

    def known(self) -> list[dict[str, Any]]:
        """The GPUs, for whoever can wait for the first look at them."""
        if not self._found:
            with self._busy:
                self._found = self._found or _asked()
        return self._found

    def _look(self) -> None:
        try:
            self._found = _asked()
        finally:
            self._at = time.monotonic()
            self._busy.release()


GPUS = Gpus()


def _asked() -> list[dict[str, Any]]:
    smi = shutil.which("nvidia-smi")
    if not smi:
        return []
    how: dict[str, Any] = {"creationflags": subprocess.CREATE_NO_WINDOW} if os.name == "nt" else {}
    query = [smi, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False, **how).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [gpu for line in said.splitlines() if (gpu := gpu_of(line))]


def gpu_of(line: str) -> dict[str, Any]:
    """One line of nvidia-smi's table; {} when it is none."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(FIELDS):
        return {}
    used, total, busy, degrees, watts = (_number(cell) for cell in cells[2:])
    if used is None or total is None:
        return {}
    found = {"index": cells[0], "name": cells[1], "used": round(used / 1024, 1), "total": round(total / 1024, 1)}
    return found | {k: v for k, v in (("busy", busy), ("degrees", degrees), ("watts", watts)) if v is not None}


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None  # [N/A], [Not Supported]


def memory() -> dict[str, float]:
    """The computer's memory in GiB: used and total."""
    found = psutil.virtual_memory()
    return {"used": round((found.total - found.available) / 2**30, 1), "total": round(found.total / 2**30, 1)}


def disk(place: str | Path) -> dict[str, float]:
    """Space on the disk of a folder in GB: free and total; {} where it is gone."""
    try:
        found = shutil.disk_usage(place)
    except OSError:
        return {}
    return {"free": round(found.free / 1e9, 1), "total": round(found.total / 1e9, 1)}
