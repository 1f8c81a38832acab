"""How a training is asked to stop: by Ctrl+C, by a polite kill, by the page, or because its launcher is gone.

The first wish ends it after its step, with everything saved. Before the first step there is nothing to save, and it
ends at once. A second signal ends it at once in any case.
"""

import math
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from library.runs import layout

ASKED = ("stop", *layout.WISHES, "backup")  # all that a run can be asked for while it works; the last by its clock

SIGNALS = ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP")  # Windows has the third, others the fourth
ONE_WISH = 1.0  # seconds in which signals are the same wish: a terminal and torchrun both hand Ctrl+C on
SHARE = 0.01  # of the time may go into looking at the disk; the folder may be on a slow network
LAUNCHERS = ("accelerate", "accelerate-launch", "torchrun", "accelerate.commands.launch", "torch.distributed.run")


class Stopped(KeyboardInterrupt):
    """The training was stopped before its first step: nothing has been learned that could be saved."""


class Wishes:
    """Listens for the wish to stop. `record` is the run's diary, in the process that writes one.

    There, every so many `minutes` after the last state was saved, another one ("backup") is a wish, too.
    """

    def __init__(self, record: Any = None, minutes: float | None = None) -> None:
        self._record = record
        self._every = minutes * 60 if minutes and record else math.inf
        self._next_state = math.inf
        self._first = 0.0  # when the first signal came; 0 is never
        self._patient = self._raised = self._asked = False
        self._next_look = 0.0
        self._wished: set[str] = set()  # what to do after this step, and then go on
        self._launcher = _launcher()
        self._before: dict[int, Any] = {}
        self._ears: socket.socket | None = None

    def listen(self) -> None:
        """Take signals over, until `forget`. Only a main thread can; elsewhere signals are not ours."""
        if threading.current_thread() is not threading.main_thread():
            return
        # The system writes the signal's number into this pair at once, whatever the main thread is busy with.
        self._ears, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._other = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        for name in SIGNALS:
            number = getattr(signal, name, None)
            if number is None or (name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN):
                continue  # nohup has said that a closed terminal shall not matter
            self._before[number] = signal.signal(number, self._interrupt)
        threading.Thread(target=self._listen, args=(self._ears,), name="signals", daemon=True).start()

    def forget(self) -> None:
        """Give signals back to whom they belonged."""
        if self._ears is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._other)
        self._before.clear()
        self._mouth.close()
        self._ears = None

    def be_patient(self) -> None:
        """From now on there is something to save: a signal is noted, and interrupts nothing."""
        self._patient = True
        self.state_saved()

    def state_saved(self) -> None:
        """From now on counts the time to the next."""
        self._next_state = time.monotonic() + self._every

    def asked(self) -> bool:
        """Whether somebody wants the training to stop. Cheap enough for every step."""
        begin = time.monotonic()
        if begin >= self._next_state:
            self._wished.add("backup")
            self._next_state = math.inf
        if not self._asked and (self._first or begin >= self._next_look):
            self._asked = bool(self._first) or self._on_disk() or self._alone()
            self._wished |= set(self._record.wishes() if self._record else ())
            if self._asked and self._record:
                self._record.stopping()
            end = time.monotonic()
            self._next_look = end + (end - begin) / SHARE
        return self._asked

    def taken(self) -> set[str]:
        """What is wanted after this step ("sample", "save", "backup"), each wish once; see `asked`."""
        taken, self._wished = self._wished, set()
        return taken

    def said(self) -> tuple[bool, ...]:
        """All that was asked for, in the order of ASKED."""
        stop, taken = self.asked(), self.taken()
        return (stop, *(name in taken for name in ASKED[1:]))

    def check(self) -> None:
        """Between two pieces of work before the first step: raise Stopped when somebody wants that."""
        if self.asked() and not self._patient:
            raise Stopped

    def _on_disk(self) -> bool:
        return bool(self._record and self._record.stop_requested())

    def _alone(self) -> bool:
        """Whether the launcher ended: a kill that was meant for the training has reached only it."""
        if self._launcher is None:
            return False
        return os.getppid() != self._launcher.pid if os.name == "posix" else not self._launcher.is_running()

    def _interrupt(self, number: int, frame: Any) -> None:
        """In the main thread, once it gets there."""
        if not self._patient and not self._raised:
            self._raised = True
            raise Stopped

    def _listen(self, ears: socket.socket) -> None:
        with ears:
            while heard := ears.recv(1):
                if heard[0] in self._before:
                    self._heard(heard[0])

    def _heard(self, number: int) -> None:
        now = time.monotonic()
        if not self._first:
            self._first = now
            if self._patient and self._record:
                self._record.say("Stopping after this step; then everything is saved. Once more ends it at once.")
        elif now - self._first > ONE_WISH:
            self._end(number)

    def _end(self, number: int) -> None:
        """Without waiting for anything, even if the main thread hangs."""
        if self._record:
            last = threading.Thread(target=self._record.finish, args=("stopped",), daemon=True)
            last.start()
            last.join(2)
        os._exit(128 + number)


def _launcher() -> psutil.Process | None:
    """The process that started this one, if that is all it is for."""
    try:
        parent = psutil.Process().parent()
        words = parent.cmdline()[:4] if parent else []
    except psutil.Error:
        return None
    return parent if any(Path(word).name.removesuffix(".exe") in LAUNCHERS for word in words) else None
