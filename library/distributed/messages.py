"""Messages between the processes of a training: whether each could read its batch, and why one fails.

They use the key-value store of `torch.distributed`'s rendezvous, so no GPU synchronises, and a process whose GPU has
failed can still report it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed import DistStoreError

from library.compiler import torch_private
from library.config.problems import MessageLike

POLL, LONGEST_POLL = 0.0005, 0.05  # seconds between two polls of a late process, growing from the first to the last
STORE_TIMEOUT = 2.0  # seconds that reporting or reading a failure may take
FAILURE = "the first process that failed"  # key in the store


class Messages:
    """The store as seen by one process."""

    def __init__(self, rank: int, ranks: int, timeout: float) -> None:
        """Every process must create one. `timeout`: seconds in which all processes must reach a step."""
        self._rank, self._timeout, self._step = rank, timeout, 0
        self._store = torch_private.process_store()
        self._own_store = torch_private.process_store_of_thread()  # connect now, as its owner may be gone later
        self._keys = [f"process {other}" for other in range(ranks)]
        self._write("")

    def first_problem(self, own_problem: str) -> str:
        """Wait for all processes before a step; return the first problem that any has with its batch, "" if none.

        `own` is this process' problem. Raises DistStoreError after the timeout.
        """
        self._step += 1
        self._write(own_problem)
        began = time.monotonic()
        reports = self._read()
        while min(step for step, _ in reports) < self._step:
            waited = time.monotonic() - began
            if waited > self._timeout:
                raise DistStoreError(f"wait timeout after {self._timeout:.0f} s")
            time.sleep(min(POLL + waited / 10, LONGEST_POLL))
            reports = self._read()
        # A process that has reached a later step had no problem with this one.
        return next((problem for step, problem in reports if step == self._step and problem), "")

    def report_failure(self, why: MessageLike) -> None:
        """Report why this process ends; only the first report is kept. Thread-safe, returns within seconds."""
        report = f"process {self._rank} of this training has ended: {why}"
        self._briefly(lambda: self._own_store.compare_set(FAILURE, "", report))

    def reported_failure(self) -> str:
        """Return the first report, "" if there is none. Thread-safe, returns within seconds."""
        reports: list[str] = []

        def ask() -> None:
            if self._own_store.check([FAILURE]):
                reports.append(self._own_store.get(FAILURE).decode())

        self._briefly(ask)
        return "".join(reports)

    def _briefly(self, ask: Callable[[], object]) -> None:
        def run() -> None:
            with contextlib.suppress(RuntimeError):  # the process that hosts the store may be gone
                ask()

        asking = threading.Thread(target=run, daemon=True)
        asking.start()
        asking.join(STORE_TIMEOUT)  # the machine that hosts the store may be gone and never answer

    def _write(self, problem: str) -> None:
        self._store.set(self._keys[self._rank], f"{self._step} {problem}")

    def _read(self) -> Sequence[tuple[int, str]]:
        if not self._store.check(self._keys):  # `get` would wait for missing keys
            return [(-1, "")] * len(self._keys)
        entries = (value.decode().partition(" ") for value in self._store.multi_get(self._keys))
        return [(int(step), problem) for step, _, problem in entries]
