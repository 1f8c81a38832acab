"""The processes of preflight checks: each answers one request, and one waits ahead with torch imported."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from library.config.command import PROJECT_ROOT, is_on_cpu
from library.config.environment import OUTPUT_IN_UTF_8
from library.config.json_types import JsonMapping, JsonObject
from library.runs import keys

CHECK_TIMEOUT = 120.0  # timeout in seconds; 10,000 images take less than 10
SPARE_DELAY = 1.0  # seconds after an edit until a spare process starts, so that it does not slow down the page
Output = tuple[int, str, str]  # the exit code, and what was printed on stdout and stderr


def run_checks(requests: Sequence[JsonObject], launch: JsonMapping) -> Output:
    """Give requests to the spare process or to a new one.

    Raises subprocess.TimeoutExpired after CHECK_TIMEOUT, and ends the process then.
    """
    question = question_of(requests, launch)
    with spare.taken() as waiting:
        if waiting is not None:
            answered = _ask(waiting, question)
            if answered[1].strip():
                return answered  # otherwise it had just ended, idle for too long
        return _ask(_start(), question)


def question_of(requests: Sequence[JsonObject], launch: JsonMapping) -> str:
    """What `library.check` reads: the requests, and environment and folder of now, as it may be older."""
    place = {"environment": environment_for_check(launch), "folder": str(Path.cwd())}
    return json.dumps({**place, "requests": requests})


def environment_for_check(launch: JsonMapping) -> dict[str, str]:
    """Return what a process must know about the launch of the training."""
    paths = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **keys.key_environment(), "PYTHONPATH": paths, **OUTPUT_IN_UTF_8}
    environment |= {"ACCELERATE_USE_CPU": "true"} if is_on_cpu(launch) else {}
    number = str(launch.get("num_processes") or "1")
    return environment | ({"WORLD_SIZE": number} if number.isdecimal() and number != "1" else {})


def _ask(process: subprocess.Popen[str], question: str) -> Output:
    with process:
        try:
            output, errors = process.communicate(question, timeout=CHECK_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, output, errors


def _start() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "library.check"],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        encoding="utf-8",
        errors="replace",
        env=environment_for_check({}),
    )


class SpareProcess:
    """A check process that imports torch before it is needed, as that takes longer than a check.

    Like every check process it answers one request and ends, so that none keeps GPU memory. It ends when idle.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._timer: threading.Timer | None = None
        self._checks = 0  # at work: starting another process beside them would slow them down

    def prepare(self) -> None:
        """Start a process shortly, unless one waits already or a check is at work."""
        with self._lock:
            if self._checks == 0 and self._timer is None and not self._is_waiting():
                self._timer = threading.Timer(SPARE_DELAY, self._start)
                self._timer.daemon = True
                self._timer.start()

    @contextlib.contextmanager
    def taken(self) -> Iterator[subprocess.Popen[str] | None]:
        """The waiting process, which is the caller's for a check; None without one."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            process = self._process if self._is_waiting() else None
            self._process, self._timer = None, None
            self._checks += 1
        try:
            yield process
        finally:
            with self._lock:
                self._checks -= 1

    def _is_waiting(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        with self._lock:
            if self._timer is None:  # a check has begun meanwhile
                return
            self._timer = None
            with contextlib.suppress(OSError):  # the check itself will say why no process can start
                self._process = _start()


spare = SpareProcess()
