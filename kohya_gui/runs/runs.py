"""The room *Runs*: its place on the page, and the handlers of its requests."""

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import gradio as gr
from starlette.background import BackgroundTask
from starlette.responses import Response, StreamingResponse

from kohya_gui.runs import differences, folders, page_parts, rows, samples
from kohya_gui.runs.page_parts import find_run
from kohya_gui.server import vendored
from kohya_gui.server.json_api import ApiRequest, Handler, PictureHandler
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message
from library.runs import export, keys, notes, overview, queue, series, unlisting, webhook

MARKUP = Path(__file__).with_name("runs.html")
MAX_OVERLAID = 8  # runs whose charts lie over each other
MAX_REMOVED = 500  # runs removed at once
CHUNK = 2**18  # bytes of an export that are sent at once
MAX_ENDED = 20  # ends of runs in one answer


class RunsRoom:
    """Handlers of the room. They trust nothing that they receive."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Create it inside `gr.Blocks`. Preset files of `roots` may be compared with."""
        self.roots = roots
        markup = MARKUP.read_text(encoding="utf-8")
        for name in vendored.ADDRESSES:
            markup = markup.replace(f"[{name}]", html.escape(vendored.ADDRESSES[name]))
        gr.HTML(markup, js_on_load="window.kohya.mountRuns(element)", apply_default_css=False)

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of JSON."""
        return {
            "runs": rows.changed_rows,
            "run": lambda request: page_parts.changed_parts(request, find_run(request.text("run"))),
            "run-series": self.series,
            "run-samples": lambda request: samples.sample_grid(find_run(request.text("run"))),
            "run-note": self.note,
            "run-choices": lambda request: differences.choices_for(find_run(request.text("run"))),
            "run-differences": lambda request: differences.differences(request.texts("sides"), self.roots),
            "run-remove": self.remove,
            "run-restore": self.restore,
            "run-folder": self.show_folder,
            "run-ends": self.ends,
            "webhook": self.webhook,
        }

    @property
    def picture_handlers(self) -> dict[str, PictureHandler]:
        return {"run-sample": samples.serve, "run-export": self.export}

    def export(self, query: Mapping[str, str]) -> Response:
        """A run with its samples as a zip file, as a download."""
        run = find_run(query.get("run", ""))
        packed = export.export_run(run)
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", run.id)[:100]
        headers = {"content-disposition": f'attachment; filename="{name}.zip"', "cache-control": "no-store"}
        chunks = iter(lambda: packed.read(CHUNK), b"")
        return StreamingResponse(
            chunks, media_type="application/zip", headers=headers, background=BackgroundTask(packed.close)
        )

    def series(self, request: ApiRequest) -> JsonObject:
        """The points of some runs that a browser lacks: `since` says which it has, by run."""
        since, answer = request.values("since"), {}
        for run_id in request.texts("runs")[:MAX_OVERLAID]:
            run = find_run(run_id)
            got = [int(part) for part in str(since.get(run_id) or "").split() if part.isdecimal() and len(part) < 10]
            generation, steps, checks = got if len(got) == 3 else (-1, 0, 0)
            found = series.series_of(run.folder).update().since(generation, steps, checks)
            likeness = series.likeness_of_files(run.folder)
            answer[run_id] = {**found, "likeness": likeness, "name": overview.summary(run).name, "active": run.active}
        return {"runs": answer}

    def note(self, request: ApiRequest) -> JsonObject:
        """Store the note about a run; `before` is the one that the browser has shown."""
        run = find_run(request.text("run"))
        now, text = notes.read_note(run.folder), request.text("text")
        if now not in (request.text("before").strip(), text.strip()):
            raise ConfigError("The note was changed in another window meanwhile. It says now: {note}", note=now)
        return {"note": notes.write_note(run.folder, text)}

    def remove(self, request: ApiRequest) -> JsonObject:
        """Take runs that have ended off the list; all files stay. Active ones are refused, before any is removed."""
        ids = request.texts("runs")[:MAX_REMOVED]
        if active := next((run for run in map(find_run, ids) if run.active), None):
            name = overview.summary(active).name
            raise ConfigError("{run} is still {state}: stop it first.", run=name, state=Message(active.state))
        for run_id in ids:
            unlisting.remove_run(run_id)
        return {"removed": ids}

    def restore(self, request: ApiRequest) -> JsonObject:
        """Put removed runs back."""
        for run_id in request.texts("runs")[:MAX_REMOVED]:
            unlisting.restore_run(run_id)
        return {}

    def show_folder(self, request: ApiRequest) -> JsonObject:
        """Open the output folder of a run, on the computer itself only."""
        if not request.is_here:
            raise ConfigError("This can be done on the computer itself only.")
        run = find_run(request.text("run"))
        folders.show_folder(Path(str(run.facts.get("output_dir") or run.folder)))
        return {"said": Message("The folder is open: {folder}", folder=run.facts.get("output_dir") or run.folder)}

    def ends(self, request: ApiRequest) -> JsonObject:
        """What a notification says: the runs that have ended after `since`, and why the queue waits, if it does."""
        summaries, since = overview.overview(), request.number("since", largest=10**11)
        ended = [run for run in summaries if not run.active and (run.ended or 0) > since]
        now = queue.read_queue()
        waits = now.waiting[0].name if now.waiting and (now.paused or now.halted) else ""
        paused_by_user = now.paused == queue.BY_USER
        shown = [{"id": run.id, "name": run.name, "state": run.state, "ended": run.ended} for run in ended[:MAX_ENDED]]
        return {
            "ended": shown,
            "newest": max((run.ended or 0 for run in ended), default=since),
            "active": sum(run.active for run in summaries),
            "waits": "" if paused_by_user else waits,
        }

    def webhook(self, request: ApiRequest) -> JsonObject:
        """The webhook: read it, store it or send a test. Only the computer itself may change it or see its address."""
        act = request.text("act")
        if act and not request.is_here:
            raise ConfigError("This can be done on the computer itself only.")
        said = ""
        if act == "store":
            webhook.store_address(request.text("address"))
            said = (
                "A message goes there when a run ends." if keys.stored_webhook() else "Nothing is sent when a run ends."
            )
        elif act == "test":
            webhook.send(webhook.checked_address(request.text("address")), webhook.trial_event())
            said = "The test has arrived."
        address = keys.stored_webhook()
        shown = address if request.is_here else webhook.shown_address(address)
        return {"address": shown, "here": request.is_here, "said": said}
