"""The buttons of a run, its settings in a form, and its support bundle."""

import html
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from starlette.responses import Response

from kohya_gui.form import start_preset
from kohya_gui.form.form import SettingsForm
from kohya_gui.form.tabs import tab_of_kind
from kohya_gui.i18n.sentences import data
from kohya_gui.panel import samples
from kohya_gui.server.json_api import ApiRequest, Handler, ImageHandler
from library.comparing import plan
from library.config.environment import OUTPUT_IN_UTF_8
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import Message, MessageLike, join_messages
from library.families import RUNS, config_class
from library.runs import bundle, layout, queue, reader, resume, stop
from library.trainings import reopening

PROJECT_ROOT = Path(__file__).resolve().parents[2]
DOCTOR = [sys.executable, "-m", "library.cli.main", "doctor", "--json", "--quick"]
DOCTOR_TIMEOUT = 120  # seconds, as it imports PyTorch


def buttons(run: reader.RecordedRun, other_runs: list[reader.RecordedRun]) -> str:
    """Return the buttons for a run in its present state; for a run that was asked to stop, how it stops."""
    answer_text: MessageLike = ""
    hints: dict[str, MessageLike] = {}
    if run.active:
        stop_kind = layout.stop_asked(run.folder)
        answer_text = _stopping_text(run, stop_kind) if stop_kind else ""
        shown = [("after_step", "Stop after this step", "")] * (not stop_kind)
        shown += [("now", "Stop now", "stop")] * (stop_kind in ("", "after_step"))
        shown += [("kill", "Kill", "stop")] * stop.hangs(run)
        if run.state == "running":
            shown += [("sample", "Sample now", "")] * _has_prompts(resume.run_settings(run).get("sample", {})) + [
                ("save", "Save now", "")
            ]
    else:
        shown = [("open", "Use these settings", ""), ("bundle", "Support bundle", "")]
        if queue.can_resume(run, other_runs):
            words, hints["resume"] = resume.describe_resume(run)
            shown = [("resume", words, "primary"), *shown]
        if resume.fails_again(run):  # so the settings button comes first
            shown = [(act, words, "primary" if act == "open" else "") for act, words, _ in shown]
            shown.sort(key=lambda button: button[0] != "open")
    buttons_html = "".join(
        f'<button type="button" class="{kind}" data-act="{act}"{_title_html(hints.get(act, ""))}{data(words)}>'
        f"{html.escape(str(words))}</button>"
        for act, words, kind in shown
    )
    if run.state == "finished" and _can_be_tried(run):
        buttons_html = (
            f'<button type="button" class="primary" data-try="{html.escape(run.id)}">Try it</button>{buttons_html}'
        )
    if not run.active and plan.is_comparable(run):
        buttons_html += f'<button type="button" data-compare="{html.escape(run.id)}">Which file is best?</button>'
    answer = f'<p class="answer" role="status"{data(answer_text)}>{html.escape(str(answer_text))}</p>'
    return f'<div class="acts" data-run="{html.escape(run.id)}">{buttons_html}{answer}</div>'


def _stopping_text(run: reader.RecordedRun, how: str) -> MessageLike:
    following = queue.starts_next(run)
    if following is None:
        return stop.answer_to(run, how)
    return join_messages([stop.answer_to(run, how), Message("Then the queue starts {name}.", name=following.name)], " ")


def _title_html(hint: MessageLike) -> str:
    return f' title="{html.escape(str(hint))}"' if hint else ""


def _has_prompts(sample_settings: JsonMapping) -> bool:
    """Return whether a run has prompts to sample, according to its section of samples."""
    return sample_settings.get("sample_images", True) is not False and bool(
        sample_settings.get("sample_prompts") or sample_settings.get("sample_from_captions")
    )


def _can_be_tried(run: reader.RecordedRun) -> bool:
    script = str(run.facts.get("script"))
    return script in RUNS and config_class(script).kind in ("lora", "textual-inversion", "lllite")


class RunActions:
    """Requests of the panel beyond /api/v1: settings as a form shows them, and files to download. Does not trust its
    input.
    """

    def __init__(self, forms: Mapping[str, SettingsForm], roots: Sequence[Path] = ()) -> None:
        self.forms, self.roots = forms, roots

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of JSON."""
        return {
            "open": self.open_settings,
        }

    @property
    def image_handlers(self) -> dict[str, ImageHandler]:
        return {"learned": samples.show_learned, "original": self.original, "bundle": self.bundle}

    def open_settings(self, request: ApiRequest) -> JsonObject:
        """Return the settings of a run, or of an entry of the queue, for the form of their tab."""
        if name := request.text("entry"):
            entry = queue.read_queue().find(name)
            job = queue.job_of_entry(entry)
            return self._opened(reopening.config_from(job.script, job.toml), job.how, entry.id)
        run = reader.existing_run(request.text("run"))
        return self._opened(reopening.started_config(run), resume.run_launch_options(run), run.id)

    def original(self, query: Mapping[str, str]) -> Response:
        """Return the image that a sample was made from."""
        return samples.show_original(query, self.roots)

    def bundle(self, query: Mapping[str, str]) -> Response:
        """Return the support bundle of a run, as a download."""
        run = reader.existing_run(query.get("run", ""))
        archive = bundle.bundle_run(run, _doctor())
        name = f"support-{time.strftime('%Y%m%d-%H%M%S')}.zip"
        headers = {"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"}
        return Response(archive, media_type="application/zip", headers=headers)

    def _opened(self, opened: reopening.Reopened, launch: JsonMapping, name: str) -> JsonObject:
        """Return a config for the form of its tab, with its `launch` settings, and the name of its source."""
        config = opened.config
        tab = tab_of_kind(config.kind, bool(config.data.in_json or config.data.dataset_config))
        filled = self.forms[tab].fill(config, start_preset.loaded_as_start(name))
        texts = {name: str(value) for name, value in launch.items()}
        return {"tab": tab, "fill": filled, "launch": texts, "notes": opened.notes}


def _doctor() -> str:
    """Return the output of `kohya doctor` on this machine."""
    try:
        return subprocess.run(
            DOCTOR,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **OUTPUT_IN_UTF_8},
            timeout=DOCTOR_TIMEOUT,
            check=False,
            cwd=PROJECT_ROOT,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"kohya doctor could not be asked: {type(error).__name__}\n"
