"""Run a training in the foreground of a shell until it ends."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

import psutil

from library.config import environment
from library.config.json_types import JsonObject


def run_in_foreground(arguments: list[str], variables: Mapping[str, str]) -> int:
    """Run a training, or its launcher, to its end with additional environment variables. Return its exit code, 128 + n
    if signal n ended it.

    Forwards SIGINT (Ctrl+C) and SIGTERM to the training, which finishes its step and saves. A launcher does not get
    them, as it would end and leave its training behind.
    """
    # Use a new process group, so that the terminal sends Ctrl+C only to this process.
    own_group: JsonObject = {} if os.name == "nt" else {"process_group": 0, "stdin": subprocess.DEVNULL}
    child = subprocess.Popen(arguments, env={**os.environ, **variables}, **own_group)
    launched = environment.DIRECT not in variables
    if os.name == "nt":  # a console's Ctrl+C reaches all processes there, and launchers wait
        handlers: dict[int, Any] = {signal.SIGINT: signal.SIG_IGN}
    else:
        handlers = dict.fromkeys(
            (signal.SIGINT, signal.SIGTERM), lambda number, frame: _pass_on(child.pid, number, launched)
        )
    earlier_handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        code = child.wait()
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _pass_on(pid: int, number: int, launched: bool) -> None:
    """Send a signal to a process, or to the training it has launched, once that has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (launched and parent.children()) or [parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
