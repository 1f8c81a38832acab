"""Identify processes: a process id is not enough, since the system reuses it."""

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from library.config.json_types import JsonObject

HOST = socket.gethostname()
GRACE = 5.0  # seconds between terminating and killing a process


def identity(pid: int | None = None) -> JsonObject:
    """Return what identifies a process permanently: its id, start time and machine.

    The start time changes when the clock is set, but not relative to the boot time.
    """
    pid = pid or os.getpid()
    try:
        start = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:  # the child ended before it was identified
        start = time.time()
    after_boot = {"boot": boot, "since_boot": start - psutil.boot_time()} if (boot := _boot()) else {}
    return {"pid": pid, "process_start": start, "host": HOST, **after_boot}


def _boot() -> str:
    """Return the id of this boot; only Linux has one, and only there is the offset from the boot time constant."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def find_process(recorded: JsonObject) -> psutil.Process | None:
    """Return the running process described by `identity`, or None if it ended, even if its id was reused."""
    pid, start = recorded.get("pid"), recorded.get("process_start")
    # These facts come from files that people edit.
    if not isinstance(pid, int) or pid < 0 or not isinstance(start, int | float) or recorded.get("host", HOST) != HOST:
        return None
    try:
        candidate = psutil.Process(pid)
        actual_start, since_boot = candidate.create_time(), recorded.get("since_boot")
        if isinstance(since_boot, int | float) and recorded.get("boot") == _boot():
            actual_start, start = actual_start - psutil.boot_time(), since_boot
        # On other systems a clock correction can shift it slightly.
        if abs(actual_start - start) > 2 or candidate.status() == psutil.STATUS_ZOMBIE:
            return None
    except psutil.Error:
        return None
    return candidate


def alive(recorded: JsonObject) -> bool:
    return find_process(recorded) is not None


def exists(pid: Any) -> bool:
    """Return whether a process with this id exists and is no zombie."""
    try:
        return isinstance(pid, int) and pid >= 0 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def kill(roots: list[psutil.Process], grace: float = GRACE) -> bool:
    """Kill processes and their descendants, parents first. Return whether all have ended.

    All are suspended first, as a running one may start another, which would survive: Windows has no groups of
    processes, and forgets whose child an orphan was.
    """
    doomed = _stopped_with_children(roots)
    for victim in doomed:
        with contextlib.suppress(
            psutil.Error
        ):  # an error with another user's process must not leave the others stopped
            victim.kill()
    _, survivors = psutil.wait_procs(doomed, timeout=grace)
    return not any(exists(survivor.pid) for survivor in survivors)


def end(roots: list[psutil.Process], grace: float = GRACE) -> bool:
    """Terminate processes and their descendants, and kill those left after `grace` seconds. Return whether all have
    ended.
    """
    doomed = _with_children(roots)
    for victim in doomed:
        with contextlib.suppress(psutil.Error):
            victim.terminate()
    return kill(psutil.wait_procs(doomed, timeout=grace)[1], grace)


def _stopped_with_children(roots: list[psutil.Process]) -> list[psutil.Process]:
    processes: dict[int, psutil.Process] = {}
    remaining = [*roots]
    while remaining:
        process = remaining.pop(0)
        processes[process.pid] = process
        with contextlib.suppress(psutil.Error):
            process.suspend()
        with contextlib.suppress(psutil.Error):
            remaining += [child for child in process.children() if child.pid not in processes]
    return list(processes.values())


def _with_children(roots: list[psutil.Process]) -> list[psutil.Process]:
    processes: dict[int, psutil.Process] = {}
    for root in roots:
        processes[root.pid] = root
        with contextlib.suppress(psutil.Error):
            processes.update({p.pid: p for p in root.children(recursive=True)})
    return list(processes.values())
