"""Log the load, memory, temperature and power of a training's GPUs, and warn when their memory spills to the host."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict

from library.runs import gpu_slots, machine

IS_WINDOWS = sys.platform == "win32"
SAMPLE_INTERVAL = 10.0  # seconds between two samples, each of which takes some hundredths of a second
SHARED_EVERY = 3  # samples between two queries of shared memory, which start a process on Windows
TIMEOUT = 20  # timeout of that process in seconds
FULL_SHARE = 0.95  # share of a GPU's own memory that counts as full
GROWN = 0.5  # GiB of additional shared memory that count as spilling
SPILLED = (
    "The GPU's memory is full, and {size} GiB of this training are in CPU memory, which makes its steps many times "
    "slower: lower the batch size or the resolution, or use gradient_checkpointing or blocks_to_swap"
)
# WMI names are English on every Windows, unlike typeperf's counters. [_] is a literal _, which alone matches any
# character.
SHARED = (
    "(Get-CimInstance Win32_PerfFormattedData_GPUPerformanceCounters_GPUProcessMemory "
    "-Filter \"Name LIKE 'pid[_]{pid}[_]%'\" | Measure-Object SharedUsage -Sum).Sum"
)


class GpuLog:
    """Samples this process' GPUs until `ended`; `event(kind, **data)` gets the samples, `say` a warning."""

    def __init__(self, event: Callable[..., None], say: Callable[[str], None], ended: threading.Event) -> None:
        self._event, self._say, self._ended = event, say, ended
        self._samples, self._shared, self._spilled = 0, 0.0, 0.0

    def follow(self) -> None:
        # Without a GPU `look` returns False at once.
        while self.look() and not self._ended.wait(SAMPLE_INTERVAL):
            self._samples += 1

    def look(self) -> bool:
        """Log one sample of the GPUs; return False without any."""
        visible = gpu_slots.devices()
        gpus = machine.read_gpus() if gpu_slots.CPU not in visible else []
        own_gpus = [gpu for gpu in gpus if gpu.index in visible] or gpus  # devices may be named by UUID
        if not own_gpus:
            return False
        if IS_WINDOWS and self._samples % SHARED_EVERY == 0:
            self._measure_spilled(any(gpu.used >= FULL_SHARE * gpu.total for gpu in own_gpus))
        extra = {"spilled": round(self._spilled, 1)} if self._spilled else {}
        self._event(
            "gpu", gpus=[{name: v for name, v in asdict(gpu).items() if v is not None} for gpu in own_gpus], **extra
        )
        return True

    def _measure_spilled(self, is_full: bool) -> None:
        """Measure shared memory added by this process since a GPU was full, and warn once."""
        # Earlier shared memory is legitimate, such as the pinned memory of swapped blocks.
        shared = shared_memory(os.getpid())
        if shared is None:
            return
        if not is_full:
            self._shared = shared
        grown = shared - self._shared
        if grown > GROWN and not self._spilled:
            self._say(f"warning: {SPILLED.format(size=f'{grown:.1f}')}")
        self._spilled = grown if grown > GROWN else 0.0


def shared_memory(pid: int) -> float | None:
    """Return the GiB of RAM that a process uses for its GPU, as counted by Windows' driver model (WDDM)."""
    command = ["powershell.exe", "-NoProfile", "-NonInteractive", "-Command", SHARED.format(pid=pid)]
    hidden = getattr(subprocess, "CREATE_NO_WINDOW", 0)
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            check=False,
            creationflags=hidden,
        )
        return int(result.stdout) / machine.BYTES_PER_GIB
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
