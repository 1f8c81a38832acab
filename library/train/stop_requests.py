"""Requests to stop a training: Ctrl+C, SIGTERM, a button of the page, or a launcher that has ended.

The first request ends it after the current step and saves a file and a state. A second signal, or "Stop now", ends the
step early: what has been learned is saved all the same. Before the first step there is nothing to save, and it ends at
once. Only a third signal ends it without saving, and the line about the second one says so.
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

ASKED = ("stop", *layout.REQUESTS, "backup")  # all requests to a running training; the last is timed

SIGNALS = ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP")  # Windows has the third, others the fourth
WAYS = ("", "after_step", "now")  # how a stop was requested, in order of urgency
WATCH = 0.5  # seconds between two checks for "now" before the first step
ONE_REQUEST = 1.0  # seconds in which signals are the same request: a terminal and torchrun both hand Ctrl+C on
SHARE = 0.01  # of the time may be spent on reading requests from the disk, which may be a slow network share
FIRST = "Stopping after this step, then saving a file and a state. Ctrl+C once more ends the step early, and saves."
SECOND = "Ending this step early, then saving. Ctrl+C once more kills the training: what is not saved by then is lost."
TORCHRUN = " If Ctrl+C has reached torchrun as well, it kills the training in 30 s, saved or not."
LAUNCHERS = ("accelerate", "accelerate-launch", "torchrun", "accelerate.commands.launch", "torch.distributed.run")


# Why: docs/decisions/2026-11-20-requests-are-files.md
class Stopped(KeyboardInterrupt):
    """The training was stopped before its first step: there is nothing to save."""


class WorkCancelled(Exception):
    """An immediate stop was requested: drop the current work, then save what was trained before it."""


class ControlRequests:
    """Listens for the request to stop. `record` is the run's record, in the process that writes one.

    There, `minutes` after the last state was saved, "backup" counts as requested.
    """

    def __init__(
        self, record: Any = None, minutes: float | None = None, process_watch: ProcessWatch | None = None
    ) -> None:
        self._record, self._process_watch = record, process_watch
        self._every = minutes * 60 if minutes and record else math.inf
        self._next_state = math.inf
        self._signals, self._last = 0, 0.0  # number of signals, and time of the newest
        self._how = ""  # of WAYS
        self._recorded_how = ""  # what is written in the record
        self._deferring = self._has_stepped = self._raised = self._ending = self._own_signal = False
        self._next_look = 0.0
        self._requested: set[str] = set()  # of ASKED but "stop", since `flags` was called last
        self._agreed: set[str] = set()  # of ASKED, what all processes know
        self._launcher = _launcher()
        self._before: dict[int, Any] = {}
        self._wakeup_read: socket.socket | None = None

    def listen(self) -> None:
        """Install signal handlers, until `forget`. Only possible in the main thread; does nothing elsewhere."""
        if threading.current_thread() is not threading.main_thread():
            return
        # The system writes the signal's number into this pair at once, whatever the main thread is busy with.
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
        """Restore the signal handlers from before."""
        if self._wakeup_read is None:
            return
        self.end()  # no interruption any more, which nothing would handle
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._other)
        self._before.clear()
        self._wakeup_write.close()
        self._wakeup_read = None

    def defer_signals(self) -> None:
        """From now on there is something to save: a signal sets a flag instead of interrupting."""
        self.check()
        self._deferring = True
        self.state_saved()

    @property
    def interrupted(self) -> bool:
        """Whether Stopped was raised in the main thread by a signal."""
        return self._raised

    def stopped_early(self) -> bool:
        """Whether a stop was requested before the first step was done."""
        return bool(self._how) and not self._has_stepped

    def step_done(self) -> None:
        """A step is done: from now on there is something to save."""
        self._has_stepped = True

    def state_saved(self) -> None:
        """A state was saved: restart the timer of backups, and drop a backup that was due."""
        self._agreed.discard("backup")
        self._next_state = time.monotonic() + self._every

    def asked(self) -> bool:
        """Whether a stop was requested. Cheap enough for every step."""
        begin = time.monotonic()
        if begin >= self._next_state:
            self._requested.add("backup")
            self._next_state = math.inf
        if self._how != "now" and begin >= self._next_look:
            self._note(self._on_disk() or ("after_step" if self._launcher_ended() else ""))
            self._requested |= set(self._record.requests() if self._record else ())
            end = time.monotonic()
            self._next_look = end + (end - begin) / SHARE
        if self._recorded_how != self._how and self._record:
            self._recorded_how = self._how
            self._record.stopping(self._how)
        return bool(self._how)

    def raise_if_cancelled(self) -> None:
        """Within work that can be dropped: raise WorkCancelled if an immediate stop was requested.

        Before the first step is done it raises Stopped, as there is nothing to save.
        """
        if self.cancelled():
            if self._has_stepped:
                raise WorkCancelled
            self.end()
            raise Stopped

    def cancelled(self) -> bool:
        """Whether an immediate stop was requested."""
        return self.asked() and self._how == "now"

    def flags(self) -> set[str]:
        """Which of ASKED were requested of this process: "stop" is repeated, the others are returned once."""
        found = {"stop"} if self.asked() else set()
        found, self._requested = found | self._requested, set()
        return found

    def agree(self, names: set[str]) -> None:
        """Set what is due after this step; every process has to pass the same."""
        self._agreed |= names

    @property
    def stopping(self) -> bool:
        """Whether the training ends after this step."""
        return "stop" in self._agreed

    def granted(self, name: str) -> bool:
        """Whether "sample", "save" or "backup" is due after this step; True once per request."""
        found = name in self._agreed
        self._agreed.discard(name)
        return found

    def check(self) -> None:
        """Between two pieces of work before the first step: raise Stopped if a stop was requested."""
        if self.asked() and not self._deferring:
            self.end()
            raise Stopped

    def end(self) -> None:
        """The training ends: later signals interrupt nothing."""
        self._ending = True

    def _note(self, how: str) -> None:
        self._how = max(self._how, how, key=WAYS.index)

    def _on_disk(self) -> str:
        asked = self._record.stop_requested() if self._record else ""
        return "now" if asked == "kill" else asked

    def _watch(self) -> None:
        """A thread: before the first step, where loading and compiling check no requests, raise Stopped for "now"."""
        while self._wakeup_read is not None and not self._has_stepped:
            if self._on_disk() == "now":
                self._note("now")
                self._break_off()
                return
            time.sleep(WATCH)

    def _break_off(self) -> None:
        """Raise Stopped in the main thread, unless a step is done or the training ends already."""
        if not self._has_stepped and not self._ending:
            self._own_signal = True
            _thread.interrupt_main(signal.SIGINT)

    def _launcher_ended(self) -> bool:
        """Whether the launcher has ended: a signal that was meant for the training has reached only the launcher."""
        if self._launcher is None:
            return environment.LAUNCHED and not _is_parent_there()
        return os.getppid() != self._launcher.pid if os.name == "posix" else not self._launcher.is_running()

    def _interrupt(self, number: int, frame: Any) -> None:
        """The signal handler, in the main thread: raise Stopped, unless there is something to save first."""
        if self._is_launchers(number):
            return
        now = self._how == "now" and not self._has_stepped
        if (now or not self._deferring) and not self._ending:
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
        """Whether the launcher sent the signal because another process has ended: no user requested a stop."""
        return number == signal.SIGTERM and self._process_watch is not None and self._process_watch.gone

    def _handle_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._is_launchers(number) or (self._signals and now - self._last <= ONE_REQUEST):
            return
        self._signals, self._last = self._signals + 1, now
        if self._signals > (2 if self._deferring else 1):
            self._end(number)
        self._note(WAYS[self._signals])
        if self._deferring and self._record and not self._ending:
            after = TORCHRUN if "TORCHELASTIC_RUN_ID" in os.environ else ""
            self._record.say(SECOND if self._signals == 2 else FIRST + after)
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
    """The process that started this one, if it is a launcher."""
    try:
        parent = psutil.Process(environment.PARENT)
        words = parent.cmdline()[:4]
    except (psutil.Error, ValueError):
        return None
    is_launcher = any(Path(word).name.removesuffix(".exe") in LAUNCHERS for word in words)
    return parent if is_launcher and _is_parent_there() else None


def _is_parent_there() -> bool:
    """Whether the process that started this one still runs. On POSIX its number may belong to another process by
    now."""
    return os.getppid() == environment.PARENT if os.name == "posix" else psutil.pid_exists(environment.PARENT)
