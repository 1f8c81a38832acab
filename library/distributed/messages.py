"""Messages between the processes of a training: whether each could read its batch, and why one fails.

They use the key-value store of `torch.distributed`'s rendezvous. So no GPU is synchronized, and a process whose GPU has
failed can still report it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed import DistStoreError

from library.compiler import torch_private
from library.config.problems import MessageLike

POLL, LONGEST_POLL = 0.0005, 0.05  # seconds between two polls of a late process, growing from the first to the second
ANSWER = 2.0  # seconds in which the store has to answer about a failure
FAILURE = "the first process that failed"  # a key


class Messages:
    """The store as seen by one process."""

    def __init__(self, rank: int, ranks: int, timeout: float) -> None:
        """Every process has to create one. `timeout`: seconds in which all processes have to reach a step."""
        self._rank, self._timeout, self._step = rank, timeout, 0
        self._store = torch_private.process_store()
        self._own_store = torch_private.process_store_of_thread()  # connected now: later its owner may be gone
        self._keys = [f"process {other}" for other in range(ranks)]
        self._write("")

    def first_problem(self, own: str) -> str:
        """A barrier before a step; returns the first problem that any process has with its batch, "" if there is none.

        `own` is the problem of this process. Raises DistStoreError after the timeout.
        """
        self._step += 1
        self._write(own)
        began = time.monotonic()
        every = self._read()
        while min(step for step, _ in every) < self._step:
            waited = time.monotonic() - began
            if waited > self._timeout:
                raise DistStoreError(f"wait timeout after {self._timeout:.0f} s")
            time.sleep(min(POLL + waited / 10, LONGEST_POLL))
            every = self._read()
        # A process that has reached a later step had no problem with this one.
        return next((problem for step, problem in every if step == self._step and problem), "")

    def report_failure(self, why: MessageLike) -> None:
        """Tell the others why this process ends; only the first report is kept. Thread-safe, returns within seconds."""
        said = f"process {self._rank} of this training has ended: {why}"
        self._briefly(lambda: self._own_store.compare_set(FAILURE, "", said))

    def reported_failure(self) -> str:
        """The first report, "" where there is none. Thread-safe, returns within seconds."""
        found: list[str] = []

        def ask() -> None:
            if self._own_store.check([FAILURE]):
                found.append(self._own_store.get(FAILURE).decode())

        self._briefly(ask)
        return "".join(found)

    def _briefly(self, ask: Callable[[], object]) -> None:
        def run() -> None:
            with contextlib.suppress(RuntimeError):  # the process that has the store may be gone
                ask()

        asking = threading.Thread(target=run, daemon=True)
        asking.start()
        asking.join(ANSWER)  # the machine that has the store may be gone, and not answer at all

    def _write(self, problem: str) -> None:
        self._store.set(self._keys[self._rank], f"{self._step} {problem}")

    def _read(self) -> Sequence[tuple[int, str]]:
        if not self._store.check(self._keys):  # `get` would wait for keys that are not there
            return [(-1, "")] * len(self._keys)
        found = (value.decode().partition(" ") for value in self._store.multi_get(self._keys))
        return [(int(step), problem) for step, _, problem in found]
