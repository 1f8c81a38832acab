"""The actions on a run and on the queue: their buttons, and what each one does."""

import html
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from starlette.responses import Response

from kohya_gui.form import gpus, reopen, start_preset
from kohya_gui.form.form import SettingsForm
from kohya_gui.i18n.sentences import data
from kohya_gui.panel import samples
from kohya_gui.panel.html import duration_in_words
from kohya_gui.server.json_api import ApiRequest, Handler, PictureHandler
from library.comparing import plan
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, join_messages
from library.config.run_config import RunConfig
from library.families import RUNS, config_class
from library.runs import bundle, explain, gpu_slots, layout, queue, reader, resume, start, stop

PROJECT_ROOT = Path(__file__).resolve().parents[2]
DOCTOR = [sys.executable, "-m", "library.cli.main", "doctor", "--json", "--quick"]
CONFIRM_FROM = 60.0  # seconds; discarding more work needs a confirmation
DOCTOR_TIMEOUT = 120  # seconds; it imports PyTorch
ACTION_ANSWERS = {
    "after_step": "It stops after this step and saves a state to resume from.",
    "now": "It ends this step early, saves what it has learned with a state to resume from, and stops.",
    "kill": "It was killed.",
    "sample": "Sample images are generated after this step.",
    "save": "It saves a file and a state after this step.",
}


def buttons(run: reader.RecordedRun, other_runs: list[reader.RecordedRun]) -> str:
    """The buttons for a run in its present state; for a run that was asked to stop, how it stops."""
    answer_text: MessageLike = ""
    if run.active:
        stop_kind = layout.stop_asked(run.folder)
        answer_text = _with_next(ACTION_ANSWERS[stop_kind]) if stop_kind else ""
        shown = [("after_step", "Stop after this step", "")] * (not stop_kind)
        shown += [("now", "Stop now", "stop")] * (stop_kind in ("", "after_step"))
        shown += [("kill", "Kill", "stop")] * stop.hangs(run)
        if run.state == "running":
            shown += [("sample", "Sample now", "")] * _has_prompts(resume.run_settings(run).get("sample", {})) + [
                ("save", "Save now", "")
            ]
    else:
        shown = [("open", "Use these settings", ""), ("bundle", "Support bundle", "")]
        if _is_wanted(run, other_runs):
            state = resume.newest_state(run)
            words = Message("Resume from step {step}", step=resume.step_of(state)) if state else "Start again"
            shown = [("resume", words, "primary"), *shown]
    buttons_html = "".join(
        f'<button type="button" class="{kind}" data-act="{act}"{data(words)}>{html.escape(str(words))}</button>'
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


def _question(run: reader.RecordedRun, how: str) -> MessageLike:
    """The question to confirm before stopping a run in this way; "" if next to nothing is lost."""
    if how == "kill":
        step, seconds = stop.lost_by_kill(run)
        if step is None:
            return Message(
                "No state was saved: all that was learned in {time} is lost. Kill it?", time=duration_in_words(seconds)
            )
        return Message(
            "What was learned after step {step} is lost, {time} of work. Kill it?",
            step=step,
            time=duration_in_words(seconds),
        )
    what, seconds = stop.lost_now(run) if how == "now" else ("", 0.0)
    if seconds <= CONFIRM_FROM:
        return ""
    lost = {
        "start": "No step is done yet: {time} of loading, caching and compiling are lost. Stop it?",
        "step": "{time} of work on this step are lost; what was learned before is saved. Stop it?",
        "look": "{time} of work on samples or validation are lost; what was learned is saved. Stop it?",
    }
    return Message(lost[what], time=duration_in_words(seconds))


def _has_prompts(sample_settings: JsonMapping) -> bool:
    """Whether a run has prompts to sample, according to its section of samples."""
    return sample_settings.get("sample_images", True) is not False and bool(
        sample_settings.get("sample_prompts") or sample_settings.get("sample_from_captions")
    )


def _is_wanted(run: reader.RecordedRun, other_runs: list[reader.RecordedRun]) -> bool:
    return resume.is_wanted(run, other_runs) and not any(
        entry.resumes == run.id for entry in queue.read_queue().waiting
    )


def _can_be_tried(run: reader.RecordedRun) -> bool:
    script = str(run.facts.get("script"))
    return script in RUNS and config_class(script).kind in ("lora", "textual-inversion", "lllite")


class RunActions:
    """Handlers for the panel and the Queue tab. Nothing that they are sent is trusted."""

    def __init__(self, forms: Mapping[str, SettingsForm]) -> None:
        self.forms = forms

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of requests that change something."""
        return {
            "act": self.act,
            "queue": self.queue,
            "queue-act": self.queue_act,
            "gpus": lambda sent: {"gpus": gpus.list_gpus()},
        }

    @property
    def picture_handlers(self) -> dict[str, PictureHandler]:
        return {"picture": samples.serve_sample, "learned": samples.show_learned, "bundle": self.bundle}

    def act(self, request: ApiRequest) -> JsonObject:
        """Perform an action on a run."""
        what, run = request.text("act"), _run(request.text("run"))
        if what in layout.STOPS[1:]:
            if what == "kill" and not stop.hangs(run):
                raise ConfigError("It has reported within the last minutes: let it save and stop.")
            if not request.flag("sure") and (question := _question(run, what)):
                return {"ask": question}
            stop.request(run.id, what)
        elif what in layout.REQUESTS:
            stop.request_output(run.id, what)
        elif what == "resume":
            answer, run_id = self.resumed(run)
            return {"said": answer, "run": run_id}
        elif what == "open":
            return self._opened(reopen.started_config(run), resume.run_launch_options(run), run.id)
        else:
            raise ConfigError("There is no such button: load the page again.")
        return {"said": _with_next(ACTION_ANSWERS[what]) if what in layout.STOPS else ACTION_ANSWERS[what]}

    def resumed(self, run: reader.RecordedRun) -> tuple[MessageLike, str]:
        """Resume a run now, or queue it until devices are free: a sentence about that, and the id of the new run or
        ""."""
        if not run.active and not _is_wanted(run, reader.runs()):  # another browser was faster, or the run is complete
            raise ConfigError("{run} has finished, or was resumed already.", run=run.id)
        job, state = reopen.continuation(run), resume.newest_state(run)
        active = [other.facts for other in reader.runs() if other.active and other.is_here]
        if gpu_slots.choose_devices(job.how, gpu_slots.free_devices(active)):
            run_id = start.begin_job(job)
            if state:
                return Message("It resumes after step {step}: this is the new run.", step=resume.step_of(state)), run_id
            return "It starts again from the beginning: this is the new run.", run_id
        queue.add_to_queue(job, first=True)
        return "Another training is running: this one resumes when that has ended (see the Queue tab).", ""

    def bundle(self, query: Mapping[str, str]) -> Response:
        """The support bundle of a run, as a download."""
        run = _run(query.get("run", ""))
        archive = bundle.bundle_run(run, _doctor())
        name = f"support-{time.strftime('%Y%m%d-%H%M%S')}.zip"
        headers = {"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"}
        return Response(archive, media_type="application/zip", headers=headers)

    # ---- the queue

    def queue(self, request: ApiRequest) -> JsonObject:
        """The current queue, for the tab."""
        queue_now = queue.read_queue()
        return {
            "entries": [_entry_as_json(entry) for entry in queue_now.entries],
            "paused": queue_now.paused,
            "halted": queue_now.halted,
            "go_on": queue_now.go_on,
            "waiting": len(queue_now.waiting),
            "gpus": gpus.list_gpus(),
        }

    def queue_act(self, request: ApiRequest) -> JsonObject:
        """Change the queue, and return its new state."""
        what, which = request.text("act"), request.text("id")
        changes: JsonObject = {
            "up": lambda: queue.move(which, -1),
            "down": lambda: queue.move(which, 1),
            "remove": lambda: queue.remove_entry(which),
            "clear": queue.clear,
            "pause": queue.pause,
            "go_on": queue.go_on,
            "after_failure": lambda: queue.after_failure(request.flag("go_on")),
        }
        if what == "open":
            job = queue.job_of_entry(queue.read_queue().find(which))
            return self._opened(reopen.config_from(job.script, job.toml), job.how, which)
        if what not in changes:
            raise ConfigError("There is no such button: load the page again.")
        changes[what]()
        return self.queue(request)

    def _opened(self, config: RunConfig, launch: JsonMapping, name: str) -> JsonObject:
        """A config for the form of its tab, with its `launch` settings, and the name of its source."""
        tab = _tab_of_config(config)
        filled = self.forms[tab].fill(config, start_preset.loaded_as_start(name))
        return {"tab": tab, "fill": filled, "launch": {name: str(value) for name, value in launch.items()}}


def _with_next(answer: str) -> MessageLike:
    """The answer to an action, and the training that the queue starts when the run has ended."""
    queue_now = queue.read_queue()
    if queue_now.paused or queue_now.halted or not queue_now.waiting:
        return answer
    return join_messages([answer, Message("Then the queue starts {name}.", name=queue_now.waiting[0].name)], " ")


def _run(run_id: str) -> reader.RecordedRun:
    try:
        return reader.find_run(run_id)
    except KeyError:
        raise ConfigError("This run is not there any more: load the page again.") from None


def _tab_of_config(config: RunConfig) -> str:
    """The tab that a config belongs to."""
    if config.kind != "finetune":
        return config.kind
    return "finetune" if config.data.in_json or config.data.dataset_config else "dreambooth"


def _entry_as_json(entry: queue.QueueEntry) -> JsonObject:
    state, why = queue.state_of(entry)
    shown: JsonObject = {
        "id": entry.id,
        "name": entry.name,
        "title": entry.title,
        "state": state,
        "why": explain.cause(str(why)) or why,
        "run": entry.run,
        "waits": entry.waits,
    }
    shown["gpus"], shown["processes"] = str(entry.how.get("gpu_ids") or ""), gpu_slots.wanted_processes(entry.how)
    if entry.run:
        try:
            run = reader.find_run(entry.run)
        except KeyError:
            return shown
        shown |= {"step": run.facts.get("step") or 0, "total": run.facts.get("total_steps") or 0}
        shown["gpus"] = ", ".join(device for device in run.facts.get("devices") or () if device != gpu_slots.CPU)
        shown["again"] = _is_wanted(run, reader.runs())
    return shown


def _doctor() -> str:
    """The output of `kohya doctor` on this machine."""
    try:
        return subprocess.run(
            DOCTOR,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DOCTOR_TIMEOUT,
            check=False,
            cwd=PROJECT_ROOT,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"kohya doctor could not be asked: {type(error).__name__}\n"
