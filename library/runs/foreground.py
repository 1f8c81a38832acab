"""Running a training in front of the shell, as long as it takes."""

import os
import signal
import subprocess


def run(arguments: list[str]) -> int:
    """Run a command to its end; its exit code, 128 + n where signal n ended it.

    Ctrl+C and a polite kill are for the training, which finishes its step and saves: we wait until it has.
    """
    child = subprocess.Popen(arguments)
    # The terminal sends Ctrl+C to both of us; a kill reaches only us and is handed on.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    if os.name != "nt":
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number))
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
