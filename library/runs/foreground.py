"""Running a training in front of the shell, as long as it takes."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

import psutil

from library.config import environment
from library.config.json_types import JsonObject


def run(arguments: list[str], variables: Mapping[str, str]) -> int:
    """Run a training, or what launches it, to its end, with more variables; its exit code, 128 + n where signal n
    ended it.

    Ctrl+C and a polite kill are for the training, which finishes its step and saves: we wait until it has. They go past
    a launcher, which would die of them and leave its training alone.
    """
    # A group of its own, so that the terminal sends Ctrl+C to us and not to the launcher as well.
    apart: JsonObject = {} if os.name == "nt" else {"process_group": 0, "stdin": subprocess.DEVNULL}
    child = subprocess.Popen(arguments, env={**os.environ, **variables}, **apart)
    launched = environment.DIRECT not in variables
    if os.name == "nt":  # where a console's Ctrl+C reaches everyone, and launchers wait
        handlers: dict[int, Any] = {signal.SIGINT: signal.SIG_IGN}
    else:
        handlers = dict.fromkeys(
            (signal.SIGINT, signal.SIGTERM), lambda number, frame: _pass_on(child.pid, number, launched)
        )
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _pass_on(pid: int, number: int, launched: bool) -> None:
    """Send a signal to a process; to what it has started instead, if that is a training and has begun."""
    with contextlib.suppress(psutil.NoSuchProcess):
        known = psutil.Process(pid)
        for process in (launched and known.children()) or [known]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
