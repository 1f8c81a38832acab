"""The live panel: which run, how it stands, and what can be done with it. It only reads a run's files."""

import time
from typing import Any

import gradio as gr

from kohya_gui.panel import actions, charts, html, samples
from library.config.json_types import JsonObject
from library.config.problems import Text
from library.runs import layout, queue, reader

FOLLOW = ""  # the choice that always means the newest run, one that works before one that has ended
KEPT = 30  # runs to choose from
# On a phone the panel is one line until it is opened.
UNFOLD = '<button type="button" class="unfold" aria-expanded="false" aria-label="Details of the run"></button>'
SECONDS = 1.0
# Nothing of an event is queued or overlaid: each answers within some milliseconds.
QUICK: JsonObject = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


class RunPanel:
    """The panel beside the tabs. What it shows is read anew every second; nothing of a run is kept in it."""

    def __init__(self) -> None:
        with gr.Column(elem_classes=["card", "live"]):
            gr.HTML(UNFOLD, elem_classes=["unfolds"], apply_default_css=False)
            self.picker = _part("")
            self.queue = _part("")
            self.head = gr.HTML(html.EMPTY, apply_default_css=False)
            self.acts = _part("")
            self.chart = _part("")
            self.facts = _part("")
            self.gallery = _part("")
            with gr.Accordion("Log", open=False, visible=False, elem_classes=["log"]) as self.fold:
                self.log = gr.HTML("", autoscroll=True, max_height=320, apply_default_css=False)
        self.picked = gr.Textbox(visible=False)  # the chosen run on its way to the server
        chosen = gr.Button(elem_classes=["chosen"], visible="hidden")  # pressed by monitor.js, which has no other way
        self.seen = gr.State({})  # what this browser shows at the moment, so that only news is sent
        self.shown = [self.picker, self.queue, self.head, self.acts, self.chart, self.facts, self.gallery, self.fold,
                      self.log, self.seen]  # fmt: skip
        timer = gr.Timer(SECONDS)
        read = "(picked, seen) => [window.kohya.pickedRun(), seen]"
        for event in (timer.tick, chosen.click):
            event(self.look, [self.picked, self.seen], self.shown, js=read, **QUICK)

    def on_load(self, page: gr.Blocks) -> None:
        """Show a run at once when the page is opened or loaded again."""
        page.load(lambda: self.look(FOLLOW, {}), None, self.shown, **QUICK)

    def look(self, picked: str, seen: JsonObject) -> list[Any]:
        """What has changed since the last look, for each part of the panel; `gr.skip()` for what has not."""
        every = reader.runs()
        runs = every[:KEPT]
        run = _chosen(picked, runs)
        waits = html.waiting(queue.read())
        if run is None:
            return [gr.skip()] * len(self.shown) if seen.get("none") == waits else _blank(waits)
        progress = reader.progress(run.folder).update()
        line = progress.line
        buttons, shown = actions.buttons(run, every), samples.gallery(run, progress)
        gpus = progress.events.get("gpu", ())
        fresh = {
            "run": run.id,
            "runs": [(_label(r), r.id) for r in runs],
            "queue": waits,
            "head": [run.id, run.state, run.error, progress.offset, int(time.time()) if run.active else 0],
            "acts": buttons,
            "chart": [run.id, line.points[-1] if line.points else None, line.resumed, gpus[-1].get("t") if gpus else 0],
            "gallery": [run.id, len(progress.events.get("sample", ()))],
            "log": [run.id, run.state, _size(run)],
        }
        same = {part: seen.get(part) == value for part, value in fresh.items()}
        now = time.time()
        return [
            gr.skip() if same["runs"] else html.choices(fresh["runs"], picked),
            gr.skip() if same["queue"] else waits,
            gr.skip() if same["head"] else html.head(run, progress, now),
            gr.skip() if same["acts"] else buttons,
            gr.skip() if same["chart"] else charts.curves(line.points, line.rates, line.resumed, gpus),
            gr.skip() if same["head"] else html.facts(run, progress, now),
            gr.skip() if same["gallery"] else shown,
            gr.skip() if same["run"] else gr.update(visible=True),
            gr.skip() if same["log"] else html.log(reader.tail(run.folder), run),
            gr.skip() if all(same.values()) else fresh,
        ]


def _part(value: str) -> gr.HTML:
    return gr.HTML(value, elem_classes=["plot"], apply_default_css=False)


def _blank(waits: str) -> list[Any]:
    hidden = gr.update(visible=False)
    return ["", waits, html.EMPTY, "", "", "", "", hidden, "", {"none": waits}]


def _chosen(picked: str, runs: list[reader.RecordedRun]) -> reader.RecordedRun | None:
    if picked and (found := next((run for run in runs if run.id == picked), None)):
        return found
    return next((run for run in runs if run.active), runs[0] if runs else None)


def _label(run: reader.RecordedRun) -> str:
    when = time.strftime("%d %b %H:%M", time.localtime(run.facts.get("started", 0)))
    state = Text(html.STATES.get(run.state, (run.state,))[0].lower())
    return Text("{name} · {when} · {state}", name=run.facts.get("output_name") or run.id, when=when, state=state)


def _size(run: reader.RecordedRun) -> int:
    try:
        return (run.folder / layout.LOG).stat().st_size
    except OSError:
        return 0
