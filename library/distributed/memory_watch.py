"""The memory of a training process and of its GPU."""

import sys
import time
from typing import Any

import psutil
import torch

from library.compiler import cudagraph

READ_INTERVAL = 2.0  # seconds between two reads of the memory in use; one costs as much as the rest of a log line
BYTES_PER_GIB = 2**30


class MemoryWatch:
    """Memory of this process and of its GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._process, self._next = device, psutil.Process(), 0.0

    def now(self) -> dict[str, float]:
        """Return {"memory_gb": GiB in use on the GPU, or without one in RAM}; empty within READ_INTERVAL seconds of the
        last read.
        """
        if time.monotonic() < self._next:
            return {}
        self._next = time.monotonic() + READ_INTERVAL
        on_gpu = self._device.type == "cuda"
        used = torch.cuda.memory_reserved(self._device) if on_gpu else self._process.memory_info().rss
        return {"memory_gb": round(used / BYTES_PER_GIB, 2)}

    def peaks(self) -> dict[str, float | None]:
        """Return peak memory in GiB: of tensors on the GPU (None without one), and of RAM."""
        gpu = cudagraph.peak(self._device) if self._device.type == "cuda" else None
        if sys.platform == "win32":
            ram = self._process.memory_info().peak_wset
        else:
            import resource  # missing on Windows

            ram = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"peak_memory_gb": gpu and round(gpu / BYTES_PER_GIB, 2), "peak_ram_gb": round(ram / BYTES_PER_GIB, 2)}

    def hardware(self, processes: int) -> dict[str, Any]:
        """Return the device, its memory and the number of processes for the run's record."""
        facts: dict[str, Any] = {"device": str(self._device), "processes": processes}
        if self._device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._device)
            facts |= {"gpu": properties.name, "gpu_memory_gb": round(properties.total_memory / BYTES_PER_GIB, 1)}
        return facts
