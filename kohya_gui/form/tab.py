"""A training tab: a form, its buttons, and their actions."""

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kohya_gui.form import (
    adapter,
    api,
    caches,
    compile_summary,
    datasets,
    few_steps,
    gpus,
    loading,
    messages,
    presets,
    print_command,
    prompts,
    several,
    start_preset,
)
from kohya_gui.form.form import SettingsForm, Submission
from kohya_gui.form.tabs import FAMILY_TITLES, TABS, Tab
from kohya_gui.models import models
from kohya_gui.server import paths, picker
from kohya_gui.server.json_api import ApiRequest
from library import families, importers
from library.check import check_process, isolated
from library.config.building import Reading, working_fix
from library.config.commented_toml import to_commented_toml
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import read_outside_text
from library.config.problems import ConfigError, Message, MessageLike, Problem, problem_from_json
from library.config.values import LIMITS
from library.downloads import finding
from library.families import RUNS, config_class
from library.runs import queue, start
from library.trainings import adding

FORM_FOLDER = Path(__file__).parent
# The answer to a button: a "message" as HTML, and optionally values to "fill" into the form, the "path" of its config
# file with a hash of its contents ("opened"), the "run" that was started, or a "file" to download. The rest stays.
Answer = JsonObject


class TrainingTab:
    """A training tab: its contents, and the actions of its buttons. All state between clicks is on
    screen."""

    def __init__(self, tab: Tab, roots: Sequence[Path]) -> None:
        self.tab, self.roots = tab, roots

    # Built on first use: five forms for ten families take a third of a second of the start.
    @cached_property
    def form(self) -> SettingsForm:
        """The form, which parses and fills."""
        extra = {
            "compile": compile_summary.compile_section(),
            "sample": prompts.prompts_section(
                any(config().control_images.guided for config in self.tab.configs.values())
            ),
            "images": datasets.datasets_section(self.tab.configs),
            "basics": gpus.CHOOSER,
            "network": adapter.adapter_section(),
        }
        below = {
            finding.MODEL_OPTION: models.download_button("Base model"),
            **dict.fromkeys(("learning_rate", "network_dim"), several.BUTTON),
            **caches.BUTTONS,
            "sample_lora": few_steps.few_step_buttons(self.tab.configs),
            "assistant_lora": few_steps.assistant_buttons(self.tab.configs),
        }
        return SettingsForm(self.tab.id, FAMILY_TITLES, self.tab.configs, self.tab.basics, extra, below)

    @cached_property
    def markup(self) -> str:
        """The contents of the tab as HTML."""
        starts = start_preset.starts(self.tab.id, self.tab.configs, start_preset.results(self.roots))
        parts = {
            "menu": api.menu(self.tab.id, FAMILY_TITLES),
            "browse": picker.browse_button("config", "Config file", "file", ".path"),
            "endings": ",".join(importers.SUFFIXES),
            "tab": self.tab.id,
            "form": self.form.markup(starts),
        }
        markup = (FORM_FOLDER / "tab.html").read_text(encoding="utf-8")
        for name, part in parts.items():
            markup = markup.replace(f"[{name}]", part)
        return markup

    def press(self, request: ApiRequest) -> Answer:
        """Perform the action of a button. Problems for the user to fix are shown beside the buttons."""
        sent, where = request.text("sent"), request.text("path")
        buttons: dict[str, Callable[[], Answer]] = {
            "first": lambda: self.on_first(sent, request.text("then")),
            "train": lambda: self.on_train(sent),
            "later": lambda: self.on_queue(sent),
            "check": lambda: self.on_check(sent),
            "print": lambda: self.on_print(sent, where),
            "save": lambda: self.on_save(sent, where, request.text("opened"), request.text("source")),
            "load": lambda: self.on_load(sent, where),
            "upload": lambda: self.on_upload(sent, request.text("name"), request.text("text")),
            "download": lambda: self.on_download(sent, request.text("source")),
            "export": lambda: self.on_export(sent, request.text("base")),
        }
        act = request.choice("act", buttons)
        try:
            return buttons[act]()
        except ConfigError as error:
            return {
                "message": messages.list_problems(
                    error.problems, self._places(sent), lambda problem: self._fix(sent, problem)
                )
            }

    def _places(self, sent: str) -> messages.Places:
        try:
            return self.form.places(self.form.parse_submission(sent).family)
        except ConfigError:
            return {}

    def _fix(self, sent: str, problem: Problem) -> Mapping[str, bool | str]:
        """Return the fix for a problem, as values of fields."""
        submission = self.form.parse_submission(sent)
        fix_values = self.form.shown(submission.family, working_fix(problem, self.form.lenient_config(submission)))
        return (
            {**fix_values, **self._preset_value(submission.family, problem.option)}
            if problem.code == LIMITS
            else fix_values
        )

    def _shown_fix(self, family: str, finding: JsonMapping) -> Mapping[str, bool | str]:
        """Return the fix for a finding, as values of fields; a number beyond its limits becomes the preset's."""
        if finding["code"] == LIMITS:
            return {**self.form.shown(family, finding["fix"]), **self._preset_value(family, finding["option"])}
        return self.form.shown(family, finding["fix"])

    def _preset_value(self, family: str, name: str) -> Mapping[str, bool | str]:
        # Empty if the preset does not set the option.
        return start_preset.value(self.tab.id, self.tab.configs[family], name)

    # ---- the actions of the buttons

    def on_first(self, sent: str, then: str) -> Answer:
        """Report problems in the form itself at once, as the full check for the button `then` takes seconds."""
        with contextlib.suppress(ConfigError):  # the full check reports it
            submission = self.form.parse_submission(sent)
            reading = paths.within_roots(self.form.reading(submission), self.roots)
            findings = isolated.findings_of_reading(reading)
            if then == "later" and (twin := queue.twin_problem(queue.read_queue(), *start.result_of(reading.config))):
                findings.append(isolated.finding(twin, "settings", "bad"))
            if findings:
                report: isolated.Report = {"findings": findings, "fit": None, "early": True}
                return {"message": self._report(report, submission.family)}
        return {}

    def on_train(self, sent: str) -> Answer:
        """Check the form and all that it names, and start the training in separate processes."""
        submission, config, notes, report = self.check_form(sent)
        if objections := self._objections(submission, report, "train"):
            return {"message": objections}
        run_id = start.begin_job(start.job_of_config(config, submission.preset, **submission.launch))
        hints = [problem_from_json(reported) for reported in report["findings"] if reported["verdict"] == "hint"]
        name = start.result_of(config)[1]
        sentence = Message("Started {name}. It continues when you close this page.", name=name)
        return {"message": messages.good(sentence, [*notes, *hints]), "run": run_id}

    def on_queue(self, sent: str) -> Answer:
        """Check the form and all that it names, and add its training to the queue."""
        submission, config, notes, report = self.check_form(sent)
        if objections := self._objections(submission, report, "later"):
            return {"message": objections}
        job = start.job_of_config(config, submission.preset, **submission.launch)
        entry = queue.add_to_queue(job, estimate=isolated.estimate_of(report))
        return {"message": messages.good(queue.queued_sentence(entry), notes)}

    def _objections(self, submission: Submission, report: isolated.Report, act: str) -> str:
        """Return the reason why a button (`act`) does not start or queue a training, as HTML, or ""."""
        if isolated.findings_to_fix(report):
            return self._report(report, submission.family)
        uncaptioned = isolated.find_caption_warning(report)
        if not uncaptioned or submission.anyway:
            return ""
        values = self.form.shown(submission.family, uncaptioned.fix)
        return messages.without_captions(uncaptioned, act, values)

    def on_check(self, sent: str) -> Answer:
        """Report everything that can be known about this training before it starts."""
        submission, _, notes, report = self.check_form(sent)
        hints = [isolated.finding(note, "settings", "hint") for note in notes]
        return {"message": self._report({**report, "findings": [*hints, *report["findings"]]}, submission.family)}

    def check_form(self, sent: str) -> tuple[Submission, Any, list[MessageLike], isolated.Report]:
        """Return a form's contents, config, notes and preflight report. Call this before any start or queueing.

        The report has all problems, of the form itself as well as of what it names; ineffective options only if the
        user has typed them. Tokens in the form are stored in their own file.
        """
        submission, reading, notes = self.read_form(sent)
        report = isolated.check_reading(replace(reading, notes=[]), submission.launch)
        if isolated.findings_to_fix(report):
            check_process.spare.prepare()  # the next press follows soon
        return submission, reading.config, notes, isolated.without_ineffective(report, submission.typed)

    def read_form(self, sent: str) -> tuple[Submission, Reading[Any], list[MessageLike]]:
        """Return a form's contents, its reading for a training, and notes; tokens are stored in their own file."""
        submission = self.form.parse_submission(sent)
        reading = paths.within_roots(self.form.reading(submission), self.roots)
        return submission, reading, [*reading.notes, *adding.keep_keys(reading.config)]

    def _report(self, report: isolated.Report, family: str) -> str:
        places = self.form.places(family)
        files = (finding.MODEL_OPTION, *families.facts_of(family).part_options)
        return messages.report_html(report, places, lambda reported: self._shown_fix(family, reported), files)

    def on_print(self, sent: str, where: str) -> Answer:
        """Show the command that runs the form's training, and its TOML. Nothing is written."""
        submission = self.form.parse_submission(sent)
        config, notes = self.form.ready(submission)
        launch = start.launch_options(config, submission.launch)
        return {"message": print_command.printed(config, where, launch, notes, self.roots)}

    def on_save(self, sent: str, where: str, opened: str, source: str = "") -> Answer:
        """Save the form to the named config file."""
        config, notes = self.form.collect(self.form.parse_submission(sent))
        notes += adding.keep_keys(config)
        path = paths.config_file(where or str(presets.suggestion(config)), self.roots)
        count = presets.save_config(path, config, opened, source)
        message = messages.good(
            Message("Saved {path} ({changes}).", path=path, changes=loading.settings_count(count)), notes
        )
        return {"message": message, "path": str(path), "opened": presets.config_file_state(path)}

    def on_download(self, sent: str, source: str = "") -> Answer:
        """Offer the form as a download."""
        config, notes = self.form.collect(self.form.parse_submission(sent))
        name = re.sub(r"[^\w.-]+", "_", config.save.output_name or config.script) + ".toml"
        file = {"name": name, "text": to_commented_toml(source, config, presets.comment(config))}
        return {"message": messages.good(Message("{name} is among your downloads.", name=name), notes), "file": file}

    def on_export(self, sent: str, base: str) -> Answer:
        """Offer the form as a kohya_ss JSON for download, with the other keys of the one that was loaded."""
        submission = self.form.parse_submission(sent)
        config, notes = self.form.collect(submission)
        text = self._prompts(config.sample.sample_prompts)
        scripts = {script: config_class(script) for script in RUNS}
        fields, lost = importers.export(config, scripts, _kohya_ss_json(base), text, submission.launch)
        name = re.sub(r"[^\w.-]+", "_", config.save.output_name or config.script) + ".json"
        file = {"name": name, "text": json.dumps(fields, indent=2, ensure_ascii=False) + "\n"}
        sentence = Message(
            "{name} is among your downloads: load it in the {tab} tab of kohya_ss.",
            name=name,
            tab=importers.tab_title(fields),
        )
        return {"message": messages.good(sentence, [*notes, *lost]), "file": file}

    def _prompts(self, name: str | None) -> str:
        """Return the text of a prompt file, which kohya_ss stores in its JSON; "" if the page may not read the file."""
        try:
            return read_outside_text(paths.readable(name, self.roots, (".txt",)))
        except ConfigError:
            return ""

    def on_load(self, sent: str, where: str) -> Answer:
        """Load the named config file into the form."""
        path = paths.readable(where, self.roots, importers.SUFFIXES)
        filled = self._fill_form(path, sent)
        # A file of another trainer is left alone: Save creates a TOML.
        is_ours = path.suffix.lower() == ".toml" and not importers.is_foreign_config(importers.parse_file(path))
        config_path = str(path) if is_ours else ""
        return filled | {"path": config_path, "opened": presets.config_file_state(path) if is_ours else ""}

    def on_upload(self, sent: str, name: str, text: str) -> Answer:
        """Load an uploaded config into the form, and forget where the form was saved last."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / paths.plain_name(name)
            if path.suffix.lower() in paths.WEIGHTS:
                path.write_bytes(importers.with_header(text))
            else:
                path.write_text(text, encoding="utf-8", newline="")  # keep line ends, on Windows too
            return self._fill_form(path, sent) | {"path": "", "opened": ""}

    def _fill_form(self, path: Path, sent: str) -> Answer:
        submission = self.form.parse_submission(sent)
        try:
            return loading.load_into_form(self.form, path, submission, self.roots)
        except ConfigError as error:
            raise ConfigError(*error.problems, *self._other_tab(path, submission.family)) from None

    def _other_tab(self, path: Path, family: str) -> Iterator[Problem]:
        """Yield a hint that a file that does not fit here would fit in another tab."""
        for tab in TABS:
            if tab.kind != self.tab.kind:
                try:
                    presets.import_fitting(path, tab.configs, family, self.roots)
                except ConfigError:
                    continue
                template = "This is a config for the {title} tab."
                yield Problem("", template, title=tab.title, tab=tab.id, code=messages.OTHER_TAB)
                return


def _kohya_ss_json(sent: Any) -> JsonObject | None:
    """Return the kohya_ss JSON that a browser has kept, if it is valid."""
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        contents = json.loads(sent)
        if isinstance(contents, dict) and importers.is_foreign_config(contents):
            return contents
    return None
