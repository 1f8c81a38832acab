"""The live panel: which run, how it stands, and how to stop it. It only reads a run's files."""

import time
from typing import Any

import gradio as gr

from kohya_gui import panel
from kohya_gui.training import QUICK
from library.runs import layout, reader, stop

FOLLOW = ""  # the picker's choice that always means the newest run, one that works before one that has ended
KEPT = 30  # runs to choose from
SECONDS = 1.0


class Monitor:
    """The panel beside the tabs. What it shows is read anew every second; nothing of a run is kept in it."""

    def __init__(self) -> None:
        with gr.Column(elem_classes=["card", "live"]):
            self.picker = gr.Dropdown(
                [("Newest run", FOLLOW)], value=FOLLOW, label="Run", show_label=False, container=False,
                filterable=False, visible=False, elem_classes=["picker"],
            )  # fmt: skip
            self.head = gr.HTML(panel.EMPTY, apply_default_css=False)
            with gr.Row(visible=False, elem_classes=["stops"]) as self.stops:
                after = gr.Button("Stop after this step", size="sm", min_width=0)
                now = gr.Button("Stop now", size="sm", variant="stop", min_width=0)
            self.chart = gr.HTML("", elem_classes=["plot"], apply_default_css=False)
            self.facts = gr.HTML("", elem_classes=["plot"], apply_default_css=False)
            with gr.Accordion("Log", open=False, visible=False, elem_classes=["log"]) as self.fold:
                self.log = gr.HTML("", autoscroll=True, max_height=320, apply_default_css=False)
        self.seen = gr.State({})  # what this browser shows at the moment, so that only news is sent
        self.shown = [self.picker, self.head, self.stops, self.chart, self.facts, self.fold, self.log, self.seen]
        self._stop(after, "after_step")
        self._stop(now, "now")
        timer = gr.Timer(SECONDS)
        for event in (timer.tick, self.picker.input):
            event(self.look, [self.picker, self.seen], self.shown, **QUICK)

    def greet(self, page: gr.Blocks) -> None:
        """Show a run at once when the page is opened or loaded again."""
        page.load(lambda: self.look(FOLLOW, {}), None, self.shown, **QUICK)

    def _stop(self, button: gr.Button, how: str) -> None:
        def act(picked: str, seen: dict[str, Any]) -> list[Any]:
            if seen.get("run"):
                stop.request(seen["run"], how)
            return self.look(picked, seen)

        button.click(act, [self.picker, self.seen], self.shown, **QUICK)

    def look(self, picked: str, seen: dict[str, Any]) -> list[Any]:
        """What has changed since the last look, for each part of the panel; `gr.skip()` for what has not."""
        runs = reader.runs()[:KEPT]
        run = _chosen(picked, runs)
        if run is None:
            return [gr.skip()] * len(self.shown) if seen.get("run") == "" else _blank()
        progress = reader.progress(run.folder).update()
        fresh = {
            "run": run.id,
            "runs": [(_label(r), r.id) for r in runs],
            "head": [run.id, run.state, run.error, progress.offset, int(time.time()) if run.active else 0],
            "chart": [run.id, progress.curve[-1] if progress.curve else None],
            "log": [run.id, _size(run)],
            "active": run.active,
        }
        same = {part: seen.get(part) == value for part, value in fresh.items()}
        choices = [("Newest run", FOLLOW), *fresh["runs"]]
        return [
            gr.skip() if same["runs"] else gr.update(choices=choices, visible=len(runs) > 1),
            gr.skip() if same["head"] else panel.head(run, progress, time.time()),
            gr.skip() if same["active"] and same["run"] else gr.update(visible=run.active),
            gr.skip() if same["chart"] else panel.chart(progress.curve),
            gr.skip() if same["head"] else panel.facts(run, progress, time.time()),
            gr.skip() if same["run"] else gr.update(visible=True),
            gr.skip() if same["log"] else panel.log(reader.tail(run.folder)),
            gr.skip() if all(same.values()) else fresh,
        ]


def _blank() -> list[Any]:
    hidden = gr.update(visible=False)
    return [hidden, panel.EMPTY, hidden, "", "", hidden, "", {"run": ""}]


def _chosen(picked: str, runs: list[reader.Run]) -> reader.Run | None:
    if picked and (found := next((run for run in runs if run.id == picked), None)):
        return found
    return next((run for run in runs if run.active), runs[0] if runs else None)


def _label(run: reader.Run) -> str:
    when = time.strftime("%d %b %H:%M", time.localtime(run.facts.get("started", 0)))
    return f"{run.facts.get('output_name') or run.id} · {when} · {panel.STATES.get(run.state, (run.state,))[0].lower()}"


def _size(run: reader.Run) -> int:
    try:
        return (run.folder / layout.LOG).stat().st_size
    except OSError:
        return 0
