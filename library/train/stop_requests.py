"""Requests to stop a training: Ctrl+C, SIGTERM, a button of the page, or a launcher that has ended.

The first request ends it after the current step and saves a file and a state. A second signal, or "Stop now", ends the
step early and still saves what was trained. Before the first step there is nothing to save, and it ends at once. Only a
third signal ends it without saving; the line about the second one warns of that.
"""

import _thread
import math
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from library.config import environment
from library.distributed.process_watch import ProcessWatch
from library.runs import layout

REQUEST_KINDS = ("stop", *layout.REQUESTS, "backup")  # all requests to a running training; "backup" is set by a timer

SIGNALS = ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP")  # SIGBREAK only on Windows, SIGHUP only elsewhere
STOP_WAYS = ("", "after_step", "now")  # how a stop was requested, in order of urgency
POLL_SECONDS = 0.5  # seconds between two polls for "now" before the first step
REPEAT_SECONDS = 1.0  # seconds within which signals are one request: a terminal and torchrun both forward Ctrl+C
MAX_READ_SHARE = 0.01  # maximum share of time for reading requests from the disk, which may be a slow network share
FIRST = "Stopping after this step, then saving a file and a state. Ctrl+C once more ends the step early, and saves."
SECOND = "Ending this step early, then saving. Ctrl+C once more kills the training: what is not saved by then is lost."
NO_STEP = "Stopping. No step is done yet, so there is nothing to save."
TORCHRUN = " If Ctrl+C has reached torchrun as well, it kills the training in 30 s, saved or not."
LAUNCHERS = ("accelerate", "accelerate-launch", "torchrun", "accelerate.commands.launch", "torch.distributed.run")


# Files reach a training from any process, and the all-reduce of the loss spreads them to all processes at the same
# step.
# Why: docs/decisions/2026-11-20-requests-are-files.md
class Stopped(KeyboardInterrupt):
    """The training was stopped before its first step: there is nothing to save."""


class WorkCancelled(Exception):
    """An immediate stop was requested: drop the current work, then save the training so far."""


class ControlRequests:
    """Receives requests to a running training. `record` is the run's record, in the process that writes one.

    There, "backup" counts as requested `minutes` after the last state.
    """

    def __init__(
        self, record: Any = None, minutes: float | None = None, process_watch: ProcessWatch | None = None
    ) -> None:
        self._record, self._process_watch = record, process_watch
        self._every = minutes * 60 if minutes and record else math.inf
        self._next_state = math.inf
        self._signals, self._last = 0, 0.0  # number of signals, and time of the newest
        self._how = ""  # one of STOP_WAYS
        self._recorded_how = ""  # the stop in the record
        self._deferring = self._has_stepped = self._raised = self._ending = self._own_signal = False
        self._next_look = 0.0
        self._requested: set[str] = set()  # of REQUEST_KINDS but "stop", since `flags` was called last
        self._agreed: set[str] = set()  # those of REQUEST_KINDS that all processes know
        self._launcher = _launcher()
        self._before: dict[int, Any] = {}
        self._wakeup_read: socket.socket | None = None

    def listen(self) -> None:
        """Install signal handlers until `forget`. Works only in the main thread; does nothing elsewhere."""
        if threading.current_thread() is not threading.main_thread():
            return
        # The system writes the signal's number into this socket at once, even while the main thread is busy.
        self._wakeup_read, self._wakeup_write = socket.socketpair()
        self._wakeup_write.setblocking(False)
        self._other = signal.set_wakeup_fd(self._wakeup_write.fileno(), warn_on_full_buffer=False)
        for name in SIGNALS:
            number = getattr(signal, name, None)
            if number is None or (name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN):
                continue  # under nohup SIGHUP stays ignored
            self._before[number] = signal.signal(number, self._interrupt)
        threading.Thread(target=self._read_signals, args=(self._wakeup_read,), name="signals", daemon=True).start()
        if self._record:
            threading.Thread(target=self._watch, name="stop file", daemon=True).start()

    def forget(self) -> None:
        """Restore the previous signal handlers."""
        if self._wakeup_read is None:
            return
        self.end()  # nothing would handle a later interruption
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._other)
        self._before.clear()
        self._wakeup_write.close()
        self._wakeup_read = None

    def defer_signals(self) -> None:
        """Let signals set a flag instead of interrupting."""
        # From here on there is something to save.
        self.check()
        self._deferring = True
        self.state_saved()

    @property
    def interrupted(self) -> bool:
        # Set when a signal has raised Stopped in the main thread.
        return self._raised

    def stopped_early(self) -> bool:
        return bool(self._how) and not self._has_stepped

    def step_done(self) -> None:
        # From now on there is something to save.
        self._has_stepped = True

    def state_saved(self) -> None:
        self._agreed.discard("backup")
        self._next_state = time.monotonic() + self._every

    def stop_requested(self) -> bool:
        """Return whether a stop was requested. Cheap enough for every step."""
        begin = time.monotonic()
        if begin >= self._next_state:
            self._requested.add("backup")
            self._next_state = math.inf
        if self._how != "now" and begin >= self._next_look:
            self._note(self._on_disk() or ("after_step" if self._launcher_ended() else ""))
            self._requested |= set(self._record.requests() if self._record else ())
            end = time.monotonic()
            # A slow read postpones the next one, so that reads take at most MAX_READ_SHARE of the time.
            self._next_look = end + (end - begin) / MAX_READ_SHARE
        if self._recorded_how != self._how and self._record:
            self._recorded_how = self._how
            self._record.stopping(self._how)
        return bool(self._how)

    def raise_if_cancelled(self) -> None:
        """Raise WorkCancelled within droppable work if an immediate stop was requested; before the first step is done,
        raise Stopped.
        """
        # Before the first step there is nothing to save.
        if self.cancelled():
            if self._has_stepped:
                raise WorkCancelled
            self.end()
            raise Stopped

    def cancelled(self) -> bool:
        return self.stop_requested() and self._how == "now"

    def flags(self) -> set[str]:
        """Return which of REQUEST_KINDS this process received: "stop" is repeated, the others are returned once."""
        requests = {"stop"} if self.stop_requested() else set()
        requests, self._requested = requests | self._requested, set()
        return requests

    def agree(self, names: set[str]) -> None:
        self._agreed |= names  # every process passes the same names, so that all do the same after this step

    @property
    def stopping(self) -> bool:
        return "stop" in self._agreed

    def granted(self, name: str) -> bool:
        """Return whether "sample", "save" or "backup" is due after this step; True once per request."""
        is_due = name in self._agreed
        self._agreed.discard(name)
        return is_due

    def check(self) -> None:
        """Raise Stopped between two phases before the first step if a stop was requested."""
        if self.stop_requested() and not self._deferring:
            self.end()
            raise Stopped

    def end(self) -> None:
        # Later signals must interrupt nothing.
        self._ending = True

    def _note(self, urgency: str) -> None:
        self._how = max(self._how, urgency, key=STOP_WAYS.index)

    def _on_disk(self) -> str:
        request = self._record.stop_requested() if self._record else ""
        return "now" if request == "kill" else request

    def _watch(self) -> None:
        """Raise Stopped for "now" before the first step. Runs on a thread."""
        # Loading and compiling check no requests.
        while self._wakeup_read is not None and not self._has_stepped:
            if self._on_disk() == "now":
                self._note("now")
                self._break_off()
                return
            time.sleep(POLL_SECONDS)

    def _break_off(self) -> None:
        """Raise Stopped in the main thread, unless a step is done or the training is ending."""
        if not self._has_stepped and not self._ending:
            self._own_signal = True
            _thread.interrupt_main(signal.SIGINT)

    def _launcher_ended(self) -> bool:
        """Return whether the launcher has ended: a signal meant for the training reached only the launcher."""
        if self._launcher is None:
            return environment.LAUNCHED and not _is_parent_there()
        return os.getppid() != self._launcher.pid if os.name == "posix" else not self._launcher.is_running()

    def _interrupt(self, number: int, frame: Any) -> None:
        """Handle a signal in the main thread: raise Stopped, unless there is something to save first."""
        if self._is_launchers(number):
            return
        must_stop = self._how == "now" and not self._has_stepped
        if (must_stop or not self._deferring) and not self._ending:
            self._ending = self._raised = True
            raise Stopped

    def _read_signals(self, wakeup_read: socket.socket) -> None:
        with wakeup_read:
            while received := wakeup_read.recv(1):
                if self._own_signal:  # our own, from `_break_off`
                    self._own_signal = False
                elif received[0] in self._before:
                    self._handle_signal(received[0])

    def _is_launchers(self, number: int) -> bool:
        # torchrun sends SIGTERM when another process has ended; no user requested a stop then.
        return number == signal.SIGTERM and self._process_watch is not None and self._process_watch.gone

    def _handle_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._is_launchers(number) or (self._signals and now - self._last <= REPEAT_SECONDS):
            return
        self._signals, self._last = self._signals + 1, now
        if self._signals > (2 if self._deferring else 1):
            self._end(number)
        self._note(STOP_WAYS[self._signals])
        if self._deferring and self._record and not self._ending:
            torchrun_warning = TORCHRUN if "TORCHELASTIC_RUN_ID" in os.environ else ""
            second = SECOND if self._has_stepped else NO_STEP
            self._record.say(second if self._signals == 2 else FIRST + torchrun_warning)
        if self._signals == 2:
            self._break_off()

    def _end(self, number: int) -> None:
        """End the process at once, even if the main thread hangs."""
        if self._record:
            last = threading.Thread(target=self._record.finish, args=("stopped",), daemon=True)
            last.start()
            last.join(2)
        os._exit(128 + number)


def _launcher() -> psutil.Process | None:
    """Return the parent process if it is a launcher."""
    try:
        parent = psutil.Process(environment.PARENT)
        words = parent.cmdline()[:4]
    except (psutil.Error, ValueError):
        return None
    is_launcher = any(Path(word).name.removesuffix(".exe") in LAUNCHERS for word in words)
    return parent if is_launcher and _is_parent_there() else None


def _is_parent_there() -> bool:
    # The parent's PID may already belong to another process, which is younger than this one.
    if os.name == "posix":
        return os.getppid() == environment.PARENT
    try:
        return psutil.Process(environment.PARENT).create_time() <= psutil.Process().create_time()
    except psutil.Error:
        return False
