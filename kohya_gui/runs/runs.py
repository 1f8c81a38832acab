"""The room *Runs*: its place on the page, and the handlers of its requests."""

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import gradio as gr
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, Response, StreamingResponse

from kohya_gui.runs import differences, folders, page_parts
from kohya_gui.server import paths, vendored
from kohya_gui.server.json_api import ApiRequest, Handler, ImageHandler
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message
from library.runs import export, keys, reader, webhook

MARKUP = Path(__file__).with_name("runs.html")
CHUNK = 2**18  # bytes of an export that are sent at once


class RunsRoom:
    """Requests of the room beyond /api/v1: parts of a page, settings with a form's labels, files to download, and
    actions that only this computer may request. Does not trust its input.
    """

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
            "run": lambda request: page_parts.changed_parts(request, reader.existing_run(request.text("run"))),
            "run-choices": lambda request: differences.choices_for(reader.existing_run(request.text("run"))),
            "run-differences": lambda request: differences.differences(request.texts("sides"), self.roots),
            "run-folder": self.show_folder,
            "webhook": self.webhook,
        }

    @property
    def image_handlers(self) -> dict[str, ImageHandler]:
        return {"run-export": self.export, "run-file": self.saved_file}

    def export(self, query: Mapping[str, str]) -> Response:
        """Return a run with its samples as a zip file, as a download."""
        run = reader.existing_run(query.get("run", ""))
        packed = export.export_run(run)
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", run.id)[:100]
        headers = {"content-disposition": f'attachment; filename="{name}.zip"', "cache-control": "no-store"}
        chunks = iter(lambda: packed.read(CHUNK), b"")
        return StreamingResponse(
            chunks, media_type="application/zip", headers=headers, background=BackgroundTask(packed.close)
        )

    def saved_file(self, query: Mapping[str, str]) -> Response:
        """Return a model or LoRA that a run has saved, as a download."""
        run = reader.existing_run(query.get("run", ""))
        events = reader.progress(run.folder).update().events.get("saved", ())
        saved = {path.name: path for path in reader.saved_files(run, events)}
        if not (path := saved.get(query.get("file", ""))):
            raise ConfigError("This file no longer exists: {file}", file=query.get("file", ""))
        # A training from the shell may have saved outside of the folders that the page allows.
        roots = [*self.roots, reader.output_folder(run).resolve()]
        path = paths.existing_file(str(path), roots, paths.WEIGHTS)
        return FileResponse(path, filename=path.name, headers={"cache-control": "no-store"})

    def show_folder(self, request: ApiRequest) -> JsonObject:
        """Open the output folder of a run, on the computer itself only."""
        if not request.is_here:
            raise ConfigError("This can be done on the computer itself only.")
        run = reader.existing_run(request.text("run"))
        folder = reader.output_folder(run)
        folders.show_folder(folder)
        return {"said": Message("The folder is open: {folder}", folder=folder)}

    def webhook(self, request: ApiRequest) -> JsonObject:
        """Read or store the webhook, or send a test. Only this computer may change it or see its address."""
        act = request.text("act")
        if act and not request.is_here:
            raise ConfigError("This can be done on the computer itself only.")
        sentence = ""
        if act == "store":
            webhook.store_address(request.text("address"))
            sentence = (
                "A message goes there when a run ends." if keys.stored_webhook() else "Nothing is sent when a run ends."
            )
        elif act == "test":
            webhook.send(webhook.checked_address(request.text("address")), webhook.trial_event())
            sentence = "The test has arrived."
        address = keys.stored_webhook()
        shown = address if request.is_here else webhook.shown_address(address)
        return {"address": shown, "here": request.is_here, "said": sentence}
