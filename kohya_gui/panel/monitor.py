"""The live panel: the run's choice, state and buttons. It only reads a run's files."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import gradio as gr

from kohya_gui.panel import actions, charts, history, html, samples
from kohya_gui.server.json_api import ApiRequest, Handler
from library.config.json_types import JsonObject
from library.config.problems import Message
from library.runs import dates, layout, queue, reader, registry

MAX_RUNS_LISTED = 30
MARK_DIGITS = 8  # of a part's hash, in hexadecimal
# From top to bottom. The log comes last, in a fold of its own.
PARTS = (
    "runs",
    "queue",
    "head",
    "acts",
    "learned",  # of an ended run, the most informative part
    "chart",
    "pictures",  # samples of an active run show what it learns earlier than any number
    "rates",
    "gpu_chart",
    "numbers",
    "usage",
    "history",
    "gallery",  # the samples of a run that has ended, after the files that it saved
    "log",
)
HEADING = '<h2 class="unseen">Details of the run</h2>'  # for screen readers: the parts have headings of the next level
# On a phone the panel is one line until it is opened.
UNFOLD = '<button type="button" class="unfold" aria-expanded="false" aria-label="Details of the run"></button>'


@dataclass(frozen=True)
class PanelPart:
    """A part of the panel: the values that its HTML depends on, and the function that renders it."""

    basis: Any
    render: Callable[[], str]

    @property
    def mark(self) -> str:
        # A browser that shows another hash needs the part's new HTML.
        return hashlib.sha256(json.dumps(self.basis, default=str).encode()).hexdigest()[:MARK_DIGITS]


def unseen_parts(names: Sequence[str], parts: Mapping[str, PanelPart], shown: str) -> JsonObject:
    """Return the HTML of each part that a browser does not show yet, by the marks of those that it does (`shown`)."""
    marks = {name: parts[name].mark for name in names}
    shown_marks = dict(zip_longest(names, shown.split()[: len(names)], fillvalue=""))
    unseen = {name: parts[name].render() for name, mark in marks.items() if mark != shown_marks[name]}
    return {"parts": unseen, "shown": " ".join(marks.values())}


# Why: docs/decisions/2026-11-23-panel-asks-for-news.md
class RunPanel:
    """The panel beside the tabs: its place on the page, and the changes that monitor.js polls for."""

    def __init__(self) -> None:
        gr.HTML(_markup(), js_on_load="window.kohya.mountPanel(element)", apply_default_css=False)

    @property
    def handlers(self) -> dict[str, Handler]:
        return {"panel": self.changes}

    # Why: docs/decisions/2026-11-27-panel-answers-with-changed-parts.md
    def changes(self, request: ApiRequest) -> JsonObject:
        """Return the HTML of each part that the browser does not show yet, and in `shown` the marks of all parts then.

        The browser sends `shown` back with its next request, so the server remembers nothing of it.
        """
        answer = unseen_parts(PARTS, panel_parts(request.text("run"), request.flag("log")), request.text("shown"))
        return answer if answer["parts"] else {"parts": {}}


def styles() -> str:
    # They keep the place of the panel's first content where runs are known.
    return html.RUNS_TO_COME if registry.run_folders() else ""


def panel_parts(picked: str, is_log_open: bool = True) -> dict[str, PanelPart]:
    """Return all parts of the panel for the run that a user has picked, or else for the newest one."""
    all_runs = reader.runs()
    runs = all_runs[:MAX_RUNS_LISTED]
    run = _choose_run(picked, runs)
    waits = html.waiting(queue.read_queue())
    parts = dict.fromkeys(PARTS, _ready(""))
    if run is None:
        return parts | {"queue": _ready(waits), "head": _ready(html.EMPTY)}
    progress, now = reader.progress(run.folder).update(), time.time()
    parts |= {
        "runs": _ready(html.run_list_html([(_label(r), r.id) for r in runs], picked)),
        "queue": _ready(html.other_run_html(run, all_runs) + waits),
        "head": _ready(html.run_head_html(run, progress, now)),
        "acts": _ready(actions.buttons(run, all_runs)),
        "numbers": _ready(html.numbers(run, progress, now)),
        "usage": _ready(html.machine_usage_html(run) if run.active else ""),
        "history": _ready(history.history_html(run, progress)),
    }
    parts |= _costly(run, progress)
    if is_log_open:
        basis = [run.id, run.state, _log_size(run)]
        parts["log"] = PanelPart(basis, lambda: html.log_of(run))
    return parts


def _costly(run: reader.RecordedRun, progress: reader.RunProgress) -> dict[str, PanelPart]:
    """Return the parts that take long to render, with the values that tell whether they have changed."""
    line, gpus, shots = progress.line, progress.events.get("gpu", ()), progress.events.get("sample", ())
    previews = progress.events.get("preview", ())
    warnings = len(progress.events.get("warning", ()))
    samples_basis = [run.id, shots[-1] if shots else None, previews[-1] if previews else None, warnings, run.active]
    line_basis = [run.id, line.points[-1:], line.resumed]
    return {
        "learned": PanelPart(samples_basis, lambda: samples.learned_html(run, progress)),
        "chart": PanelPart(line_basis, lambda: charts.chart(line.points, line.resumed)),
        "rates": PanelPart(line_basis, lambda: charts.rate_chart(line.rates, line.resumed)),
        "gpu_chart": PanelPart([run.id, gpus[-1] if gpus else None], lambda: charts.gpu_charts(gpus)),
        "pictures" if run.active else "gallery": PanelPart(samples_basis, lambda: samples.gallery(run, progress)),
    }


def _ready(markup: str) -> PanelPart:
    # Rendering these parts is quicker than comparing what they are based on.
    return PanelPart(markup, lambda: markup)


def _markup() -> str:
    """Return the panel in its initial state: a place for each part."""
    places = {name: f'<div data-part="{name}"></div>' for name in PARTS}
    places["head"] = f'<div data-part="head">{html.UNREAD}</div>'
    places["log"] = f'<details class="log"><summary>Log</summary>{places["log"]}</details>'
    # They stay in view while a panel taller than the window scrolls.
    places["head"] = f'<div class="at-hand">{places["head"]}{places.pop("acts")}</div>'
    announced = '<p class="announced" role="status"></p>'
    return f'<div class="card live">{HEADING}{UNFOLD}{announced}{"".join(places.values())}</div>'


def _choose_run(picked: str, runs: list[reader.RecordedRun]) -> reader.RecordedRun | None:
    if picked and (picked_run := next((run for run in runs if run.id == picked), None)):
        return picked_run
    return next((run for run in runs if run.active), runs[0] if runs else None)


def _label(run: reader.RecordedRun) -> Message:
    when = dates.moment(run.facts.get("started", 0))
    state = Message(html.STATES.get(run.state, (run.state,))[0].lower())
    return Message("{name} · {when} · {state}", name=run.name, when=when, state=state)


def _log_size(run: reader.RecordedRun) -> int:
    try:
        return (run.folder / layout.LOG).stat().st_size
    except OSError:
        return 0
