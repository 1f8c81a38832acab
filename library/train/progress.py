"""Lines about work that takes long, for whoever watches a console: how much is done, and how long the rest takes."""

import datetime
import time
from collections.abc import Callable

SPACING = 5.0  # seconds between two lines about the same work


class Progress:
    """Says where work stands, at its beginning, its end and now and then in between.

    Call it with the name of the work, how much of it is done, and how much there is.
    """

    def __init__(self, say: Callable[[str], object], patience: float = 0.0) -> None:
        """Nothing is said about work that takes less than `patience` seconds."""
        self._say, self._patience = say, patience
        self._name, self._since, self._before, self._said = "", 0.0, 0, 0.0

    def __call__(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Say it, unless the last line is too young."""
        now = time.monotonic()
        if not total:
            self._name = ""
            self._say(name)
            return
        done, begins = done or 0, name != self._name
        if begins:
            self._name, self._since, self._before = name, now, done
        if now - self._since < self._patience:
            return
        if begins or done == total or now - self._said >= SPACING:
            self._said = now
            self._say(f"{name}: {done} of {total}{self._left(done, total, now)}")

    def _left(self, done: int, total: int, now: float) -> str:
        """The time that the rest will take at the pace so far."""
        if done in (self._before, total):
            return ""
        seconds = (now - self._since) / (done - self._before) * (total - done)
        return f", {clock(seconds)} left"


def clock(seconds: float) -> str:
    """A time as people read it: 1:02:03."""
    return str(datetime.timedelta(seconds=round(seconds)))
