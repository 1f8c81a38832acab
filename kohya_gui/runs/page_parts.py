"""A run's own page: the parts that the server renders, each with a mark that tells whether it has changed."""

import time

from kohya_gui.panel import actions, history, html, monitor
from kohya_gui.server.json_api import ApiRequest
from library.config.json_types import JsonObject
from library.runs import layout, notes, reader

PARTS = ("head", "acts", "numbers", "usage", "history", "log")


def changed_parts(request: ApiRequest, run: reader.RecordedRun) -> JsonObject:
    """Return the HTML of each part that the browser does not show yet, and the marks of all in `shown`; the rest of the
    page depends on the `marks` of samples, note and state."""
    progress = reader.progress(run.folder).update()
    sample = next(reversed(progress.events.get("sample", ())), {})
    return {
        **monitor.unseen_parts(PARTS, _parts(run, request.flag("log")), request.text("shown")),
        "name": run.name,
        "active": run.active,
        "note": notes.read_note(run.folder),
        "sample": f"{sample.get('t', '')} {len(progress.events.get('sample', ()))}",
        "here": request.is_here,
    }


def _parts(run: reader.RecordedRun, is_log_open: bool) -> dict[str, monitor.PanelPart]:
    progress, now = reader.progress(run.folder).update(), time.time()
    ready = {
        "head": html.run_head_html(run, progress, now),
        "acts": actions.buttons(run, reader.runs()),
        "numbers": html.numbers(run, progress, now),
        "usage": html.machine_usage_html(run) if run.active else "",
        "history": history.history_html(run, progress),
        "log": "",
    }
    parts = {name: monitor.PanelPart(markup, lambda markup=markup: markup) for name, markup in ready.items()}
    if is_log_open:
        basis = [run.id, run.state, layout.signature(str(run.folder / layout.LOG))]
        parts["log"] = monitor.PanelPart(basis, lambda: html.log_of(run, 1000, 400_000))
    return parts
