"""The state of this machine: GPUs by the NVIDIA driver (NVML), memory, disk."""

import contextlib
import functools
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pynvml

LOOK_INTERVAL = 2.5  # seconds between two queries of the GPUs, each of which takes some hundredths of a second or more
SOLD = 0.945  # a card sold with 24 GB reports 23.6 to 24 GiB, one with 8 GB at least 7.6
BYTES_PER_GIB = 2**30


def has_memory(gib: float, gigabytes: int) -> bool:
    return gib >= gigabytes * SOLD  # reported in GiB, sold in GB


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """A GPU, numbered like nvidia-smi. Memory in GiB; None for unreported values."""

    index: str
    name: str
    used: float
    total: float
    utilization: float | None = None  # percent
    temperature: float | None = None  # degrees Celsius
    power: float | None = None  # watts
    capability: tuple[int, int] | None = None  # CUDA's, such as (8, 6) of RTX 30


@contextlib.contextmanager
def _driver_library() -> Iterator[bool]:
    """Open the driver's library within the context; yields False without a working one."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str:
    with _driver_library() as works:
        return str(_ask_driver(pynvml.nvmlSystemGetDriverVersion) or "") if works else ""  # "" without a driver


@functools.cache
def gpu_count() -> int:
    # NVML ignores CUDA_VISIBLE_DEVICES.
    with _driver_library() as works:
        return int(_ask_driver(pynvml.nvmlDeviceGetCount) or 0) if works else 0


def read_gpus() -> list[GpuStatus]:
    """Return every GPU that reports its memory. Queries the driver, which takes a moment."""
    with _driver_library() as works:
        number = int(_ask_driver(pynvml.nvmlDeviceGetCount) or 0) if works else 0
        return [gpu for index in range(number) if (gpu := _read_gpu(index))]


def _read_gpu(index: int) -> GpuStatus | None:
    if (handle := _ask_driver(pynvml.nvmlDeviceGetHandleByIndex, index)) is None:
        return None
    # Version 2 excludes memory reserved by the driver; drivers before 510 only have version 1.
    memory = _ask_driver(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    memory = memory or _ask_driver(pynvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None:
        return None
    rates = _ask_driver(pynvml.nvmlDeviceGetUtilizationRates, handle)
    milliwatts = _ask_driver(pynvml.nvmlDeviceGetPowerUsage, handle)
    return GpuStatus(
        index=str(index),
        name=str(_ask_driver(pynvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"),
        used=round(memory.used / BYTES_PER_GIB, 1),
        total=round(memory.total / BYTES_PER_GIB, 1),
        utilization=rates.gpu if rates else None,
        temperature=_ask_driver(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        power=None if milliwatts is None else milliwatts / 1000,
        capability=_ask_driver(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
    )


def _ask_driver(question: Callable[..., Any], *arguments: Any) -> Any:
    """Query the driver; None if a GPU does not support it."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


@dataclass
class GpuMonitor:
    """The newest reading of the driver, made on a thread: the first call returns nothing yet."""

    _found: list[GpuStatus] = field(default_factory=list)
    _at: float = 0.0
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def now(self) -> list[GpuStatus]:
        """Return the GPUs at the last reading."""
        if time.monotonic() - self._at > LOOK_INTERVAL and self._busy.acquire(blocking=False):
            self._at = time.monotonic()
            threading.Thread(target=self._look, name="gpu-monitor", daemon=True).start()
        return self._found

    def known(self) -> list[GpuStatus]:
        """Return the GPUs, waiting for the first reading."""
        if not self._found:
            with self._busy:
                self._found = self._found or read_gpus()
        return self._found

    def _look(self) -> None:
        try:
            self._found = read_gpus()
        finally:
            self._at = time.monotonic()
            self._busy.release()


GPUS = GpuMonitor()


def computer_memory() -> dict[str, float]:
    """Return the computer's used and total memory in GiB."""
    memory = psutil.virtual_memory()
    return {"used": round((memory.total - memory.available) / 2**30, 1), "total": round(memory.total / 2**30, 1)}


def disk_space(folder: str | Path) -> dict[str, float]:
    """Return free and total space in GB of a folder's disk; {} if the folder is gone."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return {}
    return {"free": round(usage.free / 1e9, 1), "total": round(usage.total / 1e9, 1)}
