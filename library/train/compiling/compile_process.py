"""Processes that compile a training's blocks into the cache, as seen by the training; see `compile_worker`."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

import torch

from library.compiler.block_calls import BlockCall
from library.config.command import PROJECT_ROOT
from library.config.environment import OUTPUT_IN_UTF_8
from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.config.schema import changed

WORKER = "library.train.compiling.compile_worker"
KILLED = "its process was killed (signal {number}), as systems do where memory (RAM) is short"
THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def compile_job(
    config: RunConfig,
    sizes: Sequence[Sequence[int]],
    text_learns: bool,
    calls: Sequence[BlockCall],
    device: torch.device,
) -> JsonObject:
    """Describe the work of the process as one line of JSON without secrets."""
    # The child inherits the environment, so GPU numbers mean the same, but not the current GPU.
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return {
        "script": config.script,
        "values": {name: value for section in changed(config).values() for name, value in section.items()},
        "sizes": [list(size) for size in sizes],
        "text_learns": text_learns,
        "calls": [call.as_json() for call in calls],
        "device": str(device),
    }


class CompileProcess:
    """A process that compiles the graphs of calls, one after the other. It ends when this process does."""

    def __init__(self, threads: int = 0, waited_for: bool = False) -> None:
        """Start the process, which imports the compiler and waits for its job. `threads`: of inductor, by default half
        of the cores. Its priority is lower than that of the training, unless that waits for it. Raises OSError.
        """
        self.compiled = 0  # calls whose graphs are in the cache
        self.failure = ""  # why compiling has ended, "" if nothing failed
        self._waiting: deque[int] = deque()
        self._waited_for = waited_for
        self._follower: threading.Thread | None = None
        environment = {**os.environ, **OUTPUT_IN_UTF_8}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PROJECT_ROOT), environment.get("PYTHONPATH"))))
        if sys.platform != "win32":  # there PyTorch compiles in one process, as it cannot start those of its pool
            # Leave half of the cores to the training.
            environment.setdefault(THREADS, str(threads or max((os.cpu_count() or 2) // 2, 1)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=environment,
            creationflags=0 if waited_for else getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0),
        )

    def start(self, job: JsonObject, waiting: deque[int] | None = None) -> None:
        """Let it compile the job's calls. `waiting`: their numbers, which several processes may take from its left; by
        default all of them.
        """
        self._waiting = deque(range(len(job["calls"]))) if waiting is None else waiting
        line = json.dumps({**job, "waited_for": self._waited_for}, default=str)
        self._follower = threading.Thread(target=self._follow, args=(line,), daemon=True)
        self._follower.start()

    def _follow(self, job: str) -> None:
        process, last = self._process, ""
        assert process.stdout
        try:
            self._send(job)
            self._send_next()
            for line in process.stdout:
                if line.startswith('{"compiled"'):
                    self.compiled += 1
                    self._send_next()
                else:
                    last = line.strip() or last
        except (OSError, ValueError) as error:  # it has ended meanwhile
            last = last or str(error)
        if code := process.wait():
            by_itself = f"{last[:200] or 'its process ended without a word'} (code {code})"
            self.failure = KILLED.format(number=-code) if code < 0 else by_itself

    def _send_next(self) -> None:
        """Send the number of the next call, or an empty line if there is none."""
        try:
            self._send(str(self._waiting.popleft()))
        except IndexError:
            self._send("")

    def _send(self, line: str) -> None:
        assert self._process.stdin
        with contextlib.suppress(OSError):  # it has ended, and its last words say why
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float) -> bool:
        """Wait until the process has ended, `seconds` at most; return whether it has."""
        if self._follower:
            self._follower.join(timeout=seconds)
        return self._follower is None or not self._follower.is_alive()

    def kill(self) -> None:
        """Kill the process if it still runs, without waiting."""
        self._process.kill()

    def stop(self) -> None:
        """Kill the process if it still runs, and wait until its memory is free."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self.wait(10)
