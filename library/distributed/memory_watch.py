"""The memory of a process of a training, and of its GPU."""

import sys
import time
from typing import Any

import psutil
import torch

from library.compiler import cudagraph

SPACING = 2.0  # seconds between two reads of the memory in use: one costs as much as the rest of a log line
GIB = 2**30


class MemoryWatch:
    """Memory of this process and of its GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._process, self._next = device, psutil.Process(), 0.0

    def now(self) -> dict[str, float]:
        """{"memory_gb": GiB in use on the GPU, or without one in RAM}; empty within SPACING seconds of the last
        read."""
        if time.monotonic() < self._next:
            return {}
        self._next = time.monotonic() + SPACING
        on_gpu = self._device.type == "cuda"
        held = torch.cuda.memory_reserved(self._device) if on_gpu else self._process.memory_info().rss
        return {"memory_gb": round(held / GIB, 2)}

    def peaks(self) -> dict[str, float | None]:
        """Peak memory in GiB: of tensors on the GPU (None without one), and of RAM."""
        gpu = cudagraph.peak(self._device) if self._device.type == "cuda" else None
        if sys.platform == "win32":
            ram = self._process.memory_info().peak_wset
        else:
            import resource  # which Windows does not have

            ram = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"peak_memory_gb": gpu and round(gpu / GIB, 2), "peak_ram_gb": round(ram / GIB, 2)}

    def hardware(self, processes: int) -> dict[str, Any]:
        """What trains, for the run's record: the device, its memory, and how many processes share the work."""
        found: dict[str, Any] = {"device": str(self._device), "processes": processes}
        if self._device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._device)
            found |= {"gpu": properties.name, "gpu_memory_gb": round(properties.total_memory / GIB, 1)}
        return found
