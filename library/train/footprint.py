"""How much memory a training holds, of the GPU and of the computer."""

import sys
import time
from typing import Any

import psutil
import torch

from library.compiler import cudagraph

SPACING = 2.0  # seconds between two looks: each costs as much as the rest of a line in the log
GIB = 2**30


class Footprint:
    """Looks at the memory of this process and of its GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._process, self._next = device, psutil.Process(), 0.0

    def now(self) -> dict[str, float]:
        """GiB held now, for a line in the log: of the GPU, or without one of the computer; now and then only."""
        if time.monotonic() < self._next:
            return {}
        self._next = time.monotonic() + SPACING
        on_gpu = self._device.type == "cuda"
        held = torch.cuda.memory_reserved(self._device) if on_gpu else self._process.memory_info().rss
        return {"memory_gb": round(held / GIB, 2)}

    def peaks(self) -> dict[str, float | None]:
        """The most that was held, in GiB: by tensors on the GPU (None without one), and of the computer's memory."""
        gpu = cudagraph.peak(self._device) if self._device.type == "cuda" else None
        ram = self._process.memory_info().peak_wset if sys.platform == "win32" else _peak_rss()
        return {"peak_memory_gb": gpu and round(gpu / GIB, 2), "peak_ram_gb": round(ram / GIB, 2)}


def facts(device: torch.device, processes: int) -> dict[str, Any]:
    """What trains, for the run's record: the device, its memory, and how many processes share the work."""
    found: dict[str, Any] = {"device": str(device), "processes": processes}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_memory_gb": round(properties.total_memory / 2**30, 1)}
    return found


def _peak_rss() -> int:
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
