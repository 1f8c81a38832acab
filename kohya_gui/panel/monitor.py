"""The live panel: which run, how it stands, and what can be done with it. It only reads a run's files."""

import hashlib
import json
import time
from typing import Any

import gradio as gr

from kohya_gui.i18n import dates
from kohya_gui.panel import actions, charts, html, samples
from kohya_gui.server.json_api import ApiRequest, Handler
from library.config.json_types import JsonObject
from library.config.problems import Message
from library.runs import layout, queue, reader, registry

KEPT = 30  # runs to choose from
# On a phone the panel is one line until it is opened.
UNFOLD = '<button type="button" class="unfold" aria-expanded="false" aria-label="Details of the run"></button>'
# Nothing of an event is queued or overlaid: each answers within some milliseconds.
QUICK: JsonObject = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


class RunPanel:
    """The panel beside the tabs. What it shows is read anew where there is news; nothing of a run is kept in it."""

    def __init__(self) -> None:
        with gr.Column(elem_classes=["card", "live"]):
            gr.HTML(UNFOLD, elem_classes=["unfolds"], apply_default_css=False)
            self.picker = _part("")
            self.queue = _part("")
            self.head = gr.HTML(html.UNREAD, apply_default_css=False)
            self.acts = _part("")
            self.chart = _part("")
            self.facts = _part("")
            self.gallery = _part("")
            with gr.Accordion("Log", open=False, visible=False, elem_classes=["log"]) as self.fold:
                self.log = gr.HTML("", autoscroll=True, max_height=320, apply_default_css=False)
        self.picked = gr.Textbox(visible=False)  # the chosen run on its way to the server
        news = gr.Button(elem_classes=["news"], visible="hidden")  # pressed by monitor.js, which has no other way
        self.seen = gr.State({})  # what this browser shows at the moment, so that only news is sent
        self.shown = [
            self.picker,
            self.queue,
            self.head,
            self.acts,
            self.chart,
            self.facts,
            self.gallery,
            self.fold,
            self.log,
            self.seen,
        ]
        read = "(picked, seen) => [window.kohya.beginLook(), seen]"
        # News that come while it still looks are looked at afterwards.
        looked = news.click(
            self.look, [self.picked, self.seen], self.shown, js=read, trigger_mode="always_last", **QUICK
        )
        looked.success(None, js="() => window.kohya.endLook()", show_progress="hidden")  # asks the server nothing

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of requests from the page's scripts."""
        return {"panel": self.mark}

    # Why: docs/decisions/2026-11-23-panel-asks-for-news.md
    def mark(self, asked: ApiRequest) -> JsonObject:
        """A mark of what the panel would show: another one means that there is news."""
        _, fresh = _read(asked.text("run"))
        return {"mark": hashlib.sha256(json.dumps(fresh, default=str).encode()).hexdigest()[:16]}

    def look(self, picked: str, seen: JsonObject) -> list[Any]:
        """What has changed since the last look, for each part of the panel; `gr.skip()` for what has not."""
        run, fresh = _read(picked)
        if run is None:
            return [gr.skip()] * len(self.shown) if seen == fresh else _blank(fresh)
        progress = reader.progress(run.folder)
        line, gpus, now = progress.line, progress.events.get("gpu", ()), time.time()
        same = {part: seen.get(part) == value for part, value in fresh.items()}
        return [
            gr.skip() if same["runs"] else html.choices(fresh["runs"], picked),
            gr.skip() if same["queue"] else fresh["queue"],
            gr.skip() if same["head"] else html.head(run, progress, now),
            gr.skip() if same["acts"] else fresh["acts"],
            gr.skip() if same["chart"] else charts.curves(line.points, line.rates, line.resumed, gpus),
            gr.skip() if same["head"] else html.facts(run, progress, now),
            gr.skip() if same["gallery"] else samples.gallery(run, progress),
            gr.skip() if same["run"] else gr.update(visible=True),
            gr.skip() if same["log"] else html.log(reader.tail(run.folder), run),
            gr.skip() if all(same.values()) else fresh,
        ]


def styles() -> str:
    """For the page's head, as runs are at the moment: nothing that is shown first moves when the newest comes."""
    return html.RUNS_TO_COME if registry.folders() else ""


def _part(value: str) -> gr.HTML:
    return gr.HTML(value, elem_classes=["plot"], apply_default_css=False)


def _read(picked: str) -> tuple[reader.RecordedRun | None, JsonObject]:
    """The run to show, and what the look of each part of the panel follows from."""
    every = reader.runs()
    runs = every[:KEPT]
    run = _chosen(picked, runs)
    waits = html.waiting(queue.read())
    if run is None:
        return None, {"none": waits}
    progress = reader.progress(run.folder).update()
    line, gpus = progress.line, progress.events.get("gpu", ())
    return run, {
        "run": run.id,
        "runs": [(_label(r), r.id) for r in runs],
        "queue": html.elsewhere(run, every) + waits,
        "head": [run.id, run.state, run.error, progress.offset, int(time.time()) if run.active else 0],
        "acts": actions.buttons(run, every),
        "chart": [run.id, line.points[-1] if line.points else None, line.resumed, gpus[-1].get("t") if gpus else 0],
        "gallery": [run.id, len(progress.events.get("sample", ())), run.active],
        "log": [run.id, run.state, _size(run)],
    }


def _blank(fresh: JsonObject) -> list[Any]:
    hidden = gr.update(visible=False)
    return ["", fresh["none"], html.EMPTY, "", "", "", "", hidden, "", fresh]


def _chosen(picked: str, runs: list[reader.RecordedRun]) -> reader.RecordedRun | None:
    if picked and (found := next((run for run in runs if run.id == picked), None)):
        return found
    return next((run for run in runs if run.active), runs[0] if runs else None)


def _label(run: reader.RecordedRun) -> Message:
    when = dates.moment(run.facts.get("started", 0))
    state = Message(html.STATES.get(run.state, (run.state,))[0].lower())
    return Message("{name} · {when} · {state}", name=run.facts.get("output_name") or run.id, when=when, state=state)


def _size(run: reader.RecordedRun) -> int:
    try:
        return (run.folder / layout.LOG).stat().st_size
    except OSError:
        return 0
