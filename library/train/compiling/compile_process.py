"""Processes that compile a training's blocks into the cache, as seen by the training; see `compile_worker`."""

import contextlib
import json
import os
import signal
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
from library.config.schema import changed, flatten_sections
from library.train.compiling.process_room import usable_cores

WORKER = "library.train.compiling.compile_worker"
KILLED = "its process was killed (signal {number}), as systems do when CPU memory is short"
THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
LACKS_MEMORY = 3  # exit code of a process that had too little memory of the GPU
# Exit codes after which another process, with more memory then, may compile the rest.
FOR_LACK_OF_MEMORY = (LACKS_MEMORY, -getattr(signal, "SIGKILL", 0))


def compile_settings(config: RunConfig, device: torch.device) -> JsonObject:
    """Return the settings that are known before the model and the data are read, without secrets."""
    # The child inherits the environment, so GPU numbers mean the same, but not the current GPU.
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return {"script": config.script, "values": flatten_sections(changed(config)), "device": str(device)}


def compile_job(
    config: RunConfig,
    sizes: Sequence[Sequence[int]],
    text_learns: bool,
    calls: Sequence[BlockCall],
    device: torch.device,
) -> JsonObject:
    """Return the whole job of a process, without secrets."""
    return {
        "settings": compile_settings(config, device),
        "sizes": [list(size) for size in sizes],
        "text_learns": text_learns,
        "calls": [call.as_json() for call in calls],
    }


class CompileProcess:
    """A process that compiles the graphs of calls, one after the other. It ends when this process does."""

    def __init__(self, threads: int = 0, waited_for: bool = False) -> None:
        """Start the process, which imports the compiler and waits for its job. `threads`: of inductor, by default half
        of the cores. Its priority is lower than that of the training, unless that waits for it. Raises OSError.
        """
        self.failure = ""  # why compiling has ended, "" if nothing failed
        self.unfinished: list[int] = []  # index of the call that it compiles
        self._waiting: deque[int] = deque()
        self._ready: list[int] = []
        self._waited_for = waited_for
        self._preparing: threading.Thread | None = None
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
            # Ctrl+C is for the training, which may take another step and save: blocks would stay eager then, and in all
            # runs that continue this one.
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
            | (0 if waited_for else getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0)),
        )

    def prepare(self, settings: JsonObject) -> None:
        """Let it build the model early, with the settings that its job will probably have."""
        line = json.dumps({**settings, "waited_for": self._waited_for}, default=str)
        # It may still import the compiler and read nothing.
        self._preparing = threading.Thread(target=self._send, args=(line,), daemon=True)
        self._preparing.start()

    def start(self, job: JsonObject, waiting: deque[int], ready: list[int]) -> None:
        """Let it compile the job's calls. Processes take the calls' indices from the left of `waiting`, and append them
        to `ready` when their graphs are in the cache.
        """
        self._waiting, self._ready = waiting, ready
        if self._preparing is None:
            self.prepare(job["settings"])
        self._follower = threading.Thread(target=self._follow, args=(json.dumps(job, default=str),), daemon=True)
        self._follower.start()

    def _follow(self, job: str) -> None:
        process, last = self._process, ""
        assert process.stdout
        # Read its output meanwhile: while that pipe is full, the process reads no input.
        sending = threading.Thread(target=self._send_job, args=(job,), daemon=True)
        sending.start()
        try:
            for line in process.stdout:
                if '{"compiled"' in line:  # it may follow output that did not end its line
                    self._ready += self.unfinished
                    self._send_next()
                else:
                    last = line.strip() or last
        except (OSError, ValueError) as error:  # it has ended meanwhile
            last = last or str(error)
        if code := process.wait():
            by_itself = f"{last[:200] or 'its process ended without a message'} (code {code})"
            self.failure = KILLED.format(number=-code) if code < 0 else by_itself
        sending.join()
        if code in FOR_LACK_OF_MEMORY:
            self._waiting.extend(self.unfinished)
            self.unfinished = []

    def _send_job(self, job: str) -> None:
        if self._preparing:
            self._preparing.join()
        self._send(job)
        self._send_next()

    def _send_next(self) -> None:
        """Send the number of the next call, or an empty line if there is none."""
        self.unfinished = []
        with contextlib.suppress(IndexError):
            self.unfinished = [self._waiting.popleft()]
        self._send("".join(map(str, self.unfinished)))

    def _send(self, line: str) -> None:
        assert self._process.stdin
        with contextlib.suppress(OSError):  # it has ended, and its last lines say why
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


class CompileProcesses:
    """Processes that take the calls of one job from one list, and compile their graphs."""

    def __init__(self, waited_for: bool = False) -> None:
        """`waited_for`: whether the training waits for them, see `CompileProcess`."""
        self.waiting: deque[int] = deque()  # indices of calls that no process has taken yet
        self.ready: list[int] = []  # indices of calls whose graphs are in the cache, in the order of completion
        self._waited_for = waited_for
        self._processes: list[CompileProcess] = []

    def __len__(self) -> int:
        return len(self._processes)

    def add(self, number: int) -> None:
        """Start this number of processes. Raises OSError."""
        threads = max(usable_cores() // (number + 1), 1) if number > 1 or self._waited_for else 0
        for _ in range(number):
            self._processes.append(CompileProcess(threads, self._waited_for))

    def prepare(self, settings: JsonObject) -> None:
        """Let them build the model early, with the settings that their job will probably have."""
        for process in self._processes:
            process.prepare(settings)

    def keep(self, number: int) -> None:
        """Stop all but this number of processes."""
        for process in self._processes[number:]:
            process.kill()
        for process in self._processes[number:]:
            process.stop()
            self.waiting.extendleft(process.unfinished)
        del self._processes[number:]

    def keep_one(self) -> bool:
        """Stop all running processes but one, which gets the calls of the others; return whether any was stopped."""
        # A process without a call has been ended, and takes no further one.
        self._processes.sort(key=lambda process: (not process.running, not process.unfinished))
        stops = len(self._processes) > 1 and self._processes[1].running
        if stops:
            self.keep(1)
        return stops

    def take_last(self) -> int | None:
        """Take the last waiting call from the list, None if there is none."""
        with contextlib.suppress(IndexError):  # the others take from the list, too
            return self.waiting.pop()
        return None

    def start(self, job: JsonObject) -> None:
        """Let them compile the job's calls in order."""
        self.waiting.extend(range(len(job["calls"])))
        for process in self._processes:
            process.start(job, self.waiting, self.ready)

    @property
    def running(self) -> bool:
        return any(process.running for process in self._processes)

    @property
    def failures(self) -> list[str]:
        """Why processes have ended without compiling their calls."""
        return [process.failure for process in self._processes if process.failure]

    @property
    def ended(self) -> bool:
        """Whether all have ended, and `ready` and `failures` are complete."""
        return self.wait(0)

    def wait(self, seconds: float) -> bool:
        """Wait until all have ended, `seconds` at most for each; return whether they have."""
        return all([process.wait(seconds) for process in self._processes])

    def stop(self) -> None:
        """Stop all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.stop()
