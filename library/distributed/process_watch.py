"""Ends a process of a training after another process of it has ended.

Some backends raise an error, such as gloo; with others, such as NCCL, the remaining processes wait forever in code that
no exception reaches. So a thread watches the other processes, with every backend.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from library.config.problems import ConfigError
from library.distributed.world import World
from library.runs import layout, process, reader, resume
from library.runs.record import Record

PERIOD = 0.5  # seconds between two checks
GRACE = 10.0  # seconds in which a process may end by itself; torchrun kills it after 30
CLOSING = 2.0  # seconds that a killed process may still be listed after its connections have closed


class ProcessWatch:
    """Watches the other processes of a training on this machine, and ends this one when one of them is gone."""

    def __init__(self, world: World, record: Record | None) -> None:
        """Every process has to create one. `record` is the run's record, in the process that writes it."""
        folder = str(record.folder.absolute()) if record else ""
        known = world.gather({**process.identity(), "run": folder})
        self._record, self._rank, self._run = record, world.rank, Path(known[0]["run"])
        # A process that has just answered but is not listed runs on another machine, whatever its host name is.
        self._known = {rank: one for rank, one in enumerate(known) if rank != world.rank and process.alive(one)}
        self._left = threading.Event()
        self._busy = False

    @property
    def gone(self) -> bool:
        """Whether one of them has ended before `leave`."""
        return not self._left.is_set() and not all(map(process.alive, self._known.values()))

    @property
    def newest(self) -> dict[str, Path]:
        """The state that the run has saved last by its record, which the first process writes; empty for none."""
        state = resume.newest_state(reader.RecordedRun(self._run, layout.load(self._run / layout.RUN)))
        return {"state": state} if state and state.is_dir() else {}

    def watch(self, why: Callable[[], ConfigError], stopped: Callable[[], bool]) -> None:
        """Until `leave`: end this process where another is gone and this one does not end by itself.

        `why` returns the error to report; `stopped` whether it is only a stop before the first step.
        """
        if self._known:
            given = why, stopped
            threading.Thread(target=self._watch, args=given, name="other processes", daemon=True).start()

    def leave(self) -> None:
        """No collective follows: the others may end before this process."""
        self._left.set()

    @contextlib.contextmanager
    def not_needed(self) -> Iterator[None]:
        """Inside, this process needs no other: it finishes the body even if another is gone."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def tell(self, error: ConfigError) -> None:
        """If the first process is gone, the lowest rank that is left reports it in its place: log and run's record."""
        if self._record or not self._is_first_gone():
            return
        before = [one for rank, one in self._known.items() if rank < self._rank]
        facts = layout.load(self._run / layout.RUN)
        if any(map(process.alive, before)) or facts.get("state") in layout.FINAL:
            return
        if facts and 0 in self._known:
            more = {"state": "failed", "error": error.said, "ended": time.time(), "phase": None}
            with contextlib.suppress(OSError, ConfigError):
                layout.store(self._run / layout.RUN, facts | more)
        _say(error)

    def _is_first_gone(self) -> bool:
        """Whether the first process runs on another machine, or ends within seconds."""
        end = time.monotonic() + CLOSING
        while process.alive(self._known.get(0, {})):
            if time.monotonic() > end:
                return False
            time.sleep(PERIOD / 10)
        return True

    def _watch(self, why: Callable[[], ConfigError], stopped: Callable[[], bool]) -> None:
        since: float | None = None
        while not self._left.wait(PERIOD):
            now = time.monotonic()
            since = (since or now) if self.gone and not self._busy else None
            if since and now - since >= GRACE:
                self._end(why(), stopped())

    def _end(self, error: ConfigError, stopped: bool) -> None:
        """End without waiting for the main thread, which hangs. Saved files are complete, as they are renamed last."""
        last = threading.Thread(target=self._last_words, args=(error, stopped), daemon=True)
        last.start()
        last.join(CLOSING)
        os._exit(1)

    def _last_words(self, error: ConfigError, stopped: bool) -> None:
        if stopped:
            if self._record:
                self._record.finish("stopped")
        elif self._record:
            self._record.finish("failed", str(error))
            _say(error)
        else:
            self.tell(error)


def _say(error: ConfigError) -> None:
    with contextlib.suppress(OSError):
        print(f"error: {error}\n", end="", file=sys.stderr, flush=True)
