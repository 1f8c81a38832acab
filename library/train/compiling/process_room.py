"""The number of processes for which processor and memory (RAM) have room beside the training, also in a container."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

FEWEST_GRAPHS = 4  # for two graphs, a second process saved 1 s (FLUX.1) or cost 3 s (FLUX.2) until the first step
CORES_EACH = 2  # a process keeps one busy with Python, and parts of others with Triton
RAM_EACH = 3 * 2**30  # bytes of a process with its libraries and its part of Triton's processes
CONTROL_GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Limit, usage, and the name of reclaimable pages in memory.stat: of version 2 of Linux's control groups, and of 1.
MEMORY_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def most_processes(graphs: int) -> int:
    """Return how many processes have room beside the training, for so many graphs."""
    if graphs < FEWEST_GRAPHS:
        return 0
    return max(min(graphs - 1, usable_cores() // CORES_EACH - 1, processes_in_memory()), 0)


def processes_in_memory() -> int:
    """Return for how many processes beside the training the free memory (RAM) is enough now."""
    return max(min([psutil.virtual_memory().available, *_left_in_groups()]) // RAM_EACH - 1, 0)


def usable_cores() -> int:
    """Return how many cores this process may use; a container may have fewer than the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _own_groups(""):
        with contextlib.suppress(OSError, ValueError):  # "max" without a limit
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
            cores = min(cores, int(quota) // int(period))
    for folder in _own_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (
                int((folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8")) for name in ("quota", "period")
            )
            cores = min(cores, quota // period) if quota > 0 else cores
    return max(cores, 1)


def _left_in_groups() -> Iterator[int]:
    """Yield the bytes that the limits of control groups leave. Files that were read count as used there, but make room
    when it is needed.
    """
    for controller, (limit, usage, reclaimable) in MEMORY_FILES.items():
        for folder in _own_groups(controller):
            with contextlib.suppress(OSError, ValueError, KeyError):
                facts = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
                used = int((folder / usage).read_text(encoding="utf-8")) - int(facts[reclaimable])
                yield int((folder / limit).read_text(encoding="utf-8")) - used


def _own_groups(controller: str) -> Iterator[Path]:
    """Yield the control groups that this process is in, whose limits all hold; `controller` "" is version 2."""
    try:
        lines = OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    root = CONTROL_GROUPS / controller
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = root / path.strip("/")
            # Within a container the path is often that of the host, and the root is the container's own.
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))
