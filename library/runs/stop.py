"""Stopping a run, kindly or at once, from any process on its machine."""

import time

from library.files import write_atomic
from library.runs import layout, process, reader


def request(run_id: str, how: str) -> None:
    """Ask a run to stop: "after_step" lets it finish its step and save; "now" ends its processes.

    Raises KeyError for an unknown run and ValueError for an unknown way. A run that has ended is left as it is.
    """
    if how not in ("after_step", "now"):
        raise ValueError(f"A run stops after_step or now, not {how!r}.")
    found = reader.run(run_id)
    if not found.active:
        return
    write_atomic(found.folder / layout.STOP, how)
    if how == "now" and found.is_here:  # elsewhere, the file is all that we can do
        _end(found)


def wish(run_id: str, what: str) -> None:
    """Ask a run to draw its samples ("sample") or to save a file and a state ("save") after this step, and to go on.

    Raises KeyError for an unknown run and ValueError for an unknown wish. A run that has ended is left as it is.
    """
    if what not in layout.WISHES:
        raise ValueError(f"A run can {' or '.join(layout.WISHES)} on the way, not {what!r}.")
    found = reader.run(run_id)
    if found.active:
        write_atomic(layout.wish_file(found.folder, what), "")


def _end(found: reader.Run) -> None:
    known = (layout.load(found.folder / layout.LAUNCHER), found.facts)
    if not process.end([p for p in map(process.find, known) if p is not None]):
        return  # the system does not let it go yet: it is shown as stopping until it has ended
    facts = layout.load(found.folder / layout.RUN)
    if facts.get("state") in layout.ACTIVE:
        layout.store(found.folder / layout.RUN, facts | {"state": "stopped", "ended": time.time(), "phase": None})
