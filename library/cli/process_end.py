"""End the process of a training without tearing down the interpreter. Loads no torch."""

import atexit
import os
import sys
import threading
from typing import Any


def end_at_once(code: int) -> None:
    """End this process with `code` once all threads have ended, all exit functions have run and all output is written.

    Python would then clear every module, which takes seconds with torch loaded and frees nothing that the system does
    not. Returns if a program, such as a profiler, has called the script, or if the output is closed, which Python
    reports.
    """
    if not _called_by_script():
        return
    python: Any = threading  # nothing public does what Python does at its end
    python._shutdown()  # joins threads, and tells pools of threads to end
    atexit._run_exitfuncs()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except (OSError, ValueError):
        return
    os._exit(code)


def _called_by_script() -> bool:
    """Return whether only this package is between here and the script that Python was started with."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None and frame.f_globals["__name__"].startswith("library."):
        frame = caller
    return caller is None and frame.f_globals["__name__"] == "__main__"
