"""The queue on the page. Its state is in the queue's file; queue.js shows it through the API, compared with the page's
forms."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import gradio as gr

from kohya_gui.form import compare
from kohya_gui.form.form import SettingsForm
from kohya_gui.form.tabs import tab_of_kind
from kohya_gui.server.json_api import ApiRequest, Handler
from library.config.formats import to_toml
from library.config.json_types import JsonMapping, JsonObject
from library.config.schema import options_of
from library.families import RUNS, config_class
from library.runs import job_files, queue, queue_rows

MARKUP = """<div class="queue"><div class="lead"><h2>Queue</h2><p class="how" role="status">Reading the queue</p>
<div class="switches"></div></div><ul class="devices" aria-label="GPUs"></ul>
<div class="answer" role="status"></div>
<p class="keys" id="queue-keys" hidden>Drag an entry by its handle, or press Alt and an arrow key in it.</p>
<ol class="entries" aria-label="Running and waiting"></ol>
<section class="history" hidden><h3>History</h3><ol class="ended"></ol></section></div>"""


class QueueTab:
    """The queue's place on the page, and what differs from the forms on it."""

    def __init__(self, forms: Mapping[str, SettingsForm], roots: Sequence[Path]) -> None:
        """Create it inside `gr.Blocks`."""
        self.forms, self.roots = forms, roots
        gr.HTML(MARKUP, js_on_load="window.kohya.mountQueue(element)", apply_default_css=False)

    @property
    def handlers(self) -> dict[str, Handler]:
        return {"queue-differences": self.differences}

    def differences(self, request: ApiRequest) -> JsonObject:
        """Return how each entry differs from the form of its tab in `forms`; if that was not opened or is about another
        model, from the defaults (`form` is false then)."""
        sent = request.values("forms")
        return {
            "entries": {
                entry.id: self._unlike(entry.script, values, sent)
                for entry in queue.read_queue().entries
                if entry.script in RUNS and (values := queue_rows.entry_contents(entry))
            }
        }

    def _unlike(self, script: str, values: JsonMapping, sent: JsonMapping) -> JsonObject:
        config, before = config_class(script), None
        tab = tab_of_kind(config.kind, bool(values.get("in_json") or values.get("dataset_config")))
        if text := sent.get(tab):
            form = self.forms[tab]
            submission = form.parse_submission(text)
            if submission.family == config.family:
                shown = form.lenient_config(submission)
                before = job_files.values_of(to_toml(shown)) | compare.contents_of_key(compare.FORM, shown, self.roots)
        options = options_of(config)
        differing = sorted(  # settings matter more than paths, which differ in every entry
            queue_rows.differences(before or {}, values),
            key=lambda difference: bool(difference.option in options and options[difference.option].kind),
        )
        return {"form": before is not None, "differences": [asdict(difference) for difference in differing]}
