"""Ends a process of a training after another one has ended.

Some backends, such as gloo, raise an error; with others, such as NCCL, the remaining processes wait forever in code
that no exception reaches. So a thread watches the other processes, with every backend.
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
GRACE = 10.0  # seconds that a process gets to end by itself; torchrun kills it after 30
CLOSING = 2.0  # seconds that a killed process may still be listed after its connections have closed


class ProcessWatch:
    """Watches the other processes of a training on this machine, and ends this one when one of them is gone."""

    def __init__(self, world: World, record: Record | None) -> None:
        """Every process must create one. `record` is the run's record, in the process that writes it."""
        folder = str(record.folder.absolute()) if record else ""
        identities = world.gather({**process.identity(), "run": folder})
        self._record, self._rank, self._run = record, world.rank, Path(identities[0]["run"])
        # A process that has just answered but is not listed here runs on another machine, whatever its host name.
        self._known = {
            rank: identity for rank, identity in enumerate(identities) if rank != world.rank and process.alive(identity)
        }
        self._left = threading.Event()
        self._busy = False  # whether the body of `not_needed` runs

    @property
    def gone(self) -> bool:
        return not self._left.is_set() and not all(map(process.alive, self._known.values()))

    @property
    def newest(self) -> dict[str, Path]:
        state = resume.newest_state(reader.RecordedRun(self._run, layout.load_facts(self._run / layout.RUN)))
        return {"state": state} if state and state.is_dir() else {}

    def watch(self, why: Callable[[], ConfigError], stopped: Callable[[], bool]) -> None:
        """Until `leave`, end this process if another is gone and this one does not end by itself.

        `why` returns the error to report, `stopped` whether it is only a stop before the first step.
        """
        if self._known:
            callbacks = why, stopped
            threading.Thread(target=self._watch, args=callbacks, name="other processes", daemon=True).start()

    def leave(self) -> None:
        # No collective follows, so the others may end first.
        self._left.set()

    @contextlib.contextmanager
    def not_needed(self) -> Iterator[None]:
        """Within this context the process needs no other: it finishes the body even if another is gone."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def tell(self, error: ConfigError) -> None:
        """Report the error to the console and the run's record if the first process, which else does so, is gone, and
        this one has the lowest remaining rank.
        """
        if self._record or not self._is_first_gone():
            return
        lower_ranks = [identity for rank, identity in self._known.items() if rank < self._rank]
        facts = layout.load_facts(self._run / layout.RUN)
        if any(map(process.alive, lower_ranks)) or facts.get("state") in layout.FINAL:
            return
        if facts and 0 in self._known:
            more = {"state": "failed", "error": error.said, "ended": time.time(), "phase": None}
            with contextlib.suppress(OSError, ConfigError):
                layout.store(self._run / layout.RUN, facts | more)
        _say(error)

    def _is_first_gone(self) -> bool:
        """Return whether the first process runs on another machine, or ends within seconds."""
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
        """Exit without waiting for the main thread, which hangs."""
        # Saved files are complete, as they are renamed last.
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
