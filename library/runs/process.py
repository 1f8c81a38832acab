"""Identify processes: a process id alone is not enough, since the system reuses it."""

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from library.config.json_types import JsonObject

HOST = socket.gethostname()
GRACE = 5.0  # seconds a process has between being asked to end and being ended


def identity(pid: int | None = None) -> JsonObject:
    """What identifies a process permanently: its id, its start time, and the machine.

    The start time changes when the clock is set, but not its distance from the boot time.
    """
    pid = pid or os.getpid()
    try:
        start = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:  # a child that ended at once, and was taken note of
        start = time.time()
    after_boot = {"boot": boot, "since_boot": start - psutil.boot_time()} if (boot := _boot()) else {}
    return {"pid": pid, "process_start": start, "host": HOST, **after_boot}


def _boot() -> str:
    """The id of this boot of the system; only Linux has one, and only there the distance from the boot time is
    constant."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def find_process(known: JsonObject) -> psutil.Process | None:
    """The running process that `identity` described, or None when it ended, even if another one has its id now."""
    pid, start = known.get("pid"), known.get("process_start")
    if not isinstance(pid, int) or pid < 0 or not isinstance(start, int | float) or known.get("host", HOST) != HOST:
        return None
    try:
        found = psutil.Process(pid)
        seen, since_boot = found.create_time(), known.get("since_boot")
        if isinstance(since_boot, int | float) and known.get("boot") == _boot():
            seen, start = seen - psutil.boot_time(), since_boot
        # On other systems than Linux a clock correction can move it a little.
        if abs(seen - start) > 2 or found.status() == psutil.STATUS_ZOMBIE:
            return None
    except psutil.Error:
        return None
    return found


def alive(known: JsonObject) -> bool:
    """Whether the process that `identity` described still runs on this machine."""
    return find_process(known) is not None


def exists(pid: Any) -> bool:
    """Whether some process has this id and is no zombie."""
    try:
        return isinstance(pid, int) and pid >= 0 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def kill(roots: list[psutil.Process], grace: float = GRACE) -> bool:
    """Kill processes and their descendants, parents first. Returns whether all have ended."""
    doomed = _with_children(roots)
    for victim in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    _, left = psutil.wait_procs(doomed, timeout=grace)
    return not any(exists(one.pid) for one in left)


def end(roots: list[psutil.Process], grace: float = GRACE) -> bool:
    """Terminate processes and their descendants, and kill those left after `grace` seconds. Returns whether all have
    ended."""
    doomed = _with_children(roots)
    for victim in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.terminate()
    return kill(psutil.wait_procs(doomed, timeout=grace)[1], grace)


def _with_children(roots: list[psutil.Process]) -> list[psutil.Process]:
    found: dict[int, psutil.Process] = {}
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update({p.pid: p for p in [root, *root.children(recursive=True)]})
    return list(found.values())
