"""Background tasks on a thread: progress, result and cancellation."""

import secrets
import threading
from collections.abc import Callable

from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Report


class Cancelled(Exception):
    """The user cancelled the task."""


class BackgroundTask:
    """A task. `work(report)` starts at once; `stop` cancels it at its next report."""

    def __init__(self, work: Callable[[Report], JsonObject]) -> None:
        self.id, self.phase, self.done, self.total = secrets.token_hex(8), Message(""), 0, 0
        self.result: JsonObject | None = None
        self.error: MessageLike = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"work {self.id}", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()

    def _run(self, work: Callable[[Report], JsonObject]) -> None:
        try:
            self.result = work(self._report)
        except Cancelled:
            self.error = "Stopped."
        except ConfigError as error:
            self.error = error.said
        except OSError as error:
            self.error = f"{error.filename or 'A file'}: {error.strerror or error}"
        except Exception as error:
            description = f"{type(error).__name__}: {error}"
            self.error = Message("This should not have happened ({error}).", error=description)
            raise

    def _report(self, phase: Message, done: int, total: int) -> None:
        self.phase, self.done, self.total = phase, done, total
        if self._stop.is_set():
            raise Cancelled
