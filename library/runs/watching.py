"""Notify the webhook of runs whose process was killed and could not do so itself.

The queue's worker watches its own trainings; this module watches those of the page and of a shell.
"""

import time
from typing import Never

from library.runs import keys, reader, webhook

WATCH_PERIOD = 5.0  # seconds between two polls


class RunWatch:
    """Notifies of runs that were seen active and have ended since."""

    def __init__(self) -> None:
        self._active: set[str] = set()

    def look(self) -> None:
        """Notify the webhook of each run that has ended since the last poll, once per run."""
        runs = reader.runs()  # marks killed runs as ended
        ended = [run for run in runs if run.id in self._active and not run.active]
        self._active = {run.id for run in runs if run.active}
        for run in ended:
            webhook.tell_end(run.folder, run.facts)


def watch_forever() -> Never:
    """Poll until this process ends, whenever a webhook is set."""
    watch = RunWatch()
    while True:
        if keys.stored_webhook():
            watch.look()
        else:
            watch = RunWatch()
        time.sleep(WATCH_PERIOD)


def tell_ends_since(start: float) -> None:
    """Notify the webhook of ended runs that were started after a time, once per run."""
    for run in reader.runs() if keys.stored_webhook() else ():
        if not run.active and (run.facts.get("started") or 0) >= start:
            webhook.tell_end(run.folder, run.facts)
