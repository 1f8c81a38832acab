"""Running a training in front of the shell, as long as it takes."""

import contextlib
import os
import signal
import subprocess
from typing import Any

import psutil

from library.config.json_types import JsonObject


def run(arguments: list[str]) -> int:
    """Run a launcher to its end; its exit code, 128 + n where signal n ended it.

    Ctrl+C and a polite kill are for the training, which finishes its step and saves: we wait until it has. They go past
    the launcher, which would die of them and leave its training alone.
    """
    # A group of its own, so that the terminal sends Ctrl+C to us and not to the launcher as well.
    apart: JsonObject = {} if os.name == "nt" else {"process_group": 0, "stdin": subprocess.DEVNULL}
    child = subprocess.Popen(arguments, **apart)
    if os.name == "nt":  # where a console's Ctrl+C reaches everyone, and launchers wait
        handlers: dict[int, Any] = {signal.SIGINT: signal.SIG_IGN}
    else:
        handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM), lambda number, frame: _pass_on(child.pid, number))
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _pass_on(launcher: int, number: int) -> None:
    """Send a signal to what the launcher has started, or to itself when that is nothing."""
    with contextlib.suppress(psutil.NoSuchProcess):
        known = psutil.Process(launcher)
        for process in known.children() or [known]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
