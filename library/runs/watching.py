"""Tell the webhook of runs whose process was killed, as it could not do that itself.

The queue's worker watches its own trainings. These are the others: those that the page sees, and that of a shell.
"""

import time
from typing import Never

from library.runs import keys, reader, webhook

WATCH_PERIOD = 5.0  # seconds between two looks


class RunWatch:
    """Tells of runs that have ended since they were seen at work, and of no others."""

    def __init__(self) -> None:
        self._active: set[str] = set()

    def look(self) -> None:
        """Tell the webhook of each run that has ended since the last look, unless that was told already."""
        runs = reader.runs()  # which marks killed ones as ended
        ended = [run for run in runs if run.id in self._active and not run.active]
        self._active = {run.id for run in runs if run.active}
        for run in ended:
            webhook.tell_end(run.folder, run.facts)


def watch_forever() -> Never:
    """Watch as long as this process lives, while there is a webhook."""
    watch = RunWatch()
    while True:
        if keys.stored_webhook():
            watch.look()
        else:
            watch = RunWatch()
        time.sleep(WATCH_PERIOD)


def tell_ends_since(start: float) -> None:
    """Tell the webhook of runs that were started after a time and have ended, unless that was told already."""
    for run in reader.runs() if keys.stored_webhook() else ():
        if not run.active and (run.facts.get("started") or 0) >= start:
            webhook.tell_end(run.folder, run.facts)
