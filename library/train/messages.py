"""What the processes of a training tell each other in words: whether each can take the next step, and why one ends.

By the store at which they found each other. So no GPU is waited for, and one whose GPU has failed can still say so.
"""

import contextlib
import threading
import time
from collections.abc import Sequence

from torch.distributed import DistStoreError

from library.compiler import torch_private

PAUSE, LONGEST = 0.0005, 0.05  # seconds between two looks for who has not come yet, more the longer it takes
PATIENCE = 2.0  # seconds in which the store answers
LAST_WORDS = "the first process that failed"


class Messages:
    """The words of one process of several, and those of the others."""

    def __init__(self, rank: int, ranks: int, patience: float) -> None:
        """Every process has to make one. `patience` are the seconds in which all have to come to a step."""
        self._rank, self._patience, self._met = rank, patience, 0
        self._store = torch_private.process_store()
        self._listening = torch_private.process_store_of_thread()  # by now: later nobody may be there to connect to
        self._places = [f"process {other}" for other in range(ranks)]
        self._write("")

    def first_problem(self, own: str) -> str:
        """What keeps a process from going on, "" where nothing does. All wait here until the last has come."""
        self._met += 1
        self._write(own)
        began = time.monotonic()
        said = self._read()
        while min(met for met, _ in said) < self._met:
            waited = time.monotonic() - began
            if waited > self._patience:
                raise DistStoreError(f"wait timeout after {self._patience:.0f} s")
            time.sleep(min(PAUSE + waited / 10, LONGEST))
            said = self._read()
        # Who is further by now had none.
        return next((problem for met, problem in said if met == self._met and problem), "")

    def leave(self, why: str) -> None:
        """Say why this process ends, for those that are left; only the first one's words are kept."""
        with contextlib.suppress(RuntimeError):  # the process that has the store may be gone
            self._store.compare_set(LAST_WORDS, "", f"process {self._rank} of this training has ended: {why}")

    def left(self) -> str:
        """What the first process that failed has said, "" where none has. Any thread may ask, and none waits long."""
        found: list[str] = []
        asking = threading.Thread(target=self._listen, args=(found,), daemon=True)
        asking.start()
        asking.join(PATIENCE)  # the machine that has the store may be gone, and not answer at all
        return "".join(found)

    def _listen(self, found: list[str]) -> None:
        with contextlib.suppress(RuntimeError):
            if self._listening.check([LAST_WORDS]):
                found.append(self._listening.get(LAST_WORDS).decode())

    def _write(self, problem: str) -> None:
        self._store.set(self._places[self._rank], f"{self._met} {problem}")

    def _read(self) -> Sequence[tuple[int, str]]:
        if not self._store.check(self._places):  # to ask for what is not there would wait for it
            return [(-1, "")] * len(self._places)
        found = (value.decode().partition(" ") for value in self._store.multi_get(self._places))
        return [(int(met), problem) for met, _, problem in found]
