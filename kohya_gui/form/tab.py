"""A training tab: a form, its buttons, and what they do."""

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kohya_gui.form import (
    adapter,
    api,
    caches,
    compile_summary,
    datasets,
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
from kohya_gui.models import models
from kohya_gui.server import paths, picker
from kohya_gui.server.json_api import ApiRequest
from library import families, importers
from library.check import isolated
from library.config.building import Reading, working_fix
from library.config.formats import to_toml
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import read_outside_text
from library.config.problems import ConfigError, Message, MessageLike, Problem
from library.config.problems import problem_from_json as read_problem
from library.config.run_config import RunConfig
from library.config.values import LIMITS
from library.downloads import finding
from library.families import RUNS, config_class
from library.files import RESERVED
from library.runs import keys, queue, start

FAMILIES = {family.name: family.title for family in families.all_families()}
MODEL_FIELD_WIDTH = {finding.MODEL_OPTION: 6}
FORM_FOLDER = Path(__file__).parent
# What came of a button: a "message" as HTML; besides, what to "fill" into the form, the "path" of its config file with
# a mark of its contents ("opened"), a "run" that has begun, or a "file" for the downloads. What is not there stays.
Said = JsonObject


@dataclass(frozen=True)
class Tab:
    """What tells the training tabs apart."""

    id: str
    title: str
    kind: str  # of the configs that it trains
    basics: Mapping[str, int]  # the options on top, and the sixths of a row that each takes

    @property
    def configs(self) -> dict[str, type]:
        """The config class of each family in this tab."""
        made = (config_class(script) for script in RUNS)
        return {config.family: config for config in made if config.kind == self.kind}


TABS = (
    Tab("lora", "LoRA", "lora", {
        **MODEL_FIELD_WIDTH,
        "train_data_dir": 3, "output_dir": 3, "output_name": 2,
        "resolution": 2, "train_batch_size": 2, "max_train_steps": 2, "network_dim": 2, "learning_rate": 2,
        "sample_images": 6,
    }),
    Tab("dreambooth", "DreamBooth", "finetune", {
        **MODEL_FIELD_WIDTH,
        "train_data_dir": 3, "reg_data_dir": 3, "output_dir": 4, "output_name": 2,
        "resolution": 2, "max_train_steps": 2, "learning_rate": 2, "sample_images": 6,
    }),
    Tab("finetune", "Finetune", "finetune", {
        **MODEL_FIELD_WIDTH, "in_json": 3, "train_data_dir": 3, "dataset_config": 3, "output_dir": 3, "output_name": 2,
        "resolution": 2, "train_batch_size": 2, "max_train_steps": 2, "learning_rate": 2, "mixed_precision": 2,
        "sample_images": 6,
    }),
    Tab("textual-inversion", "Textual inversion", "textual-inversion", {
        **MODEL_FIELD_WIDTH,
        "train_data_dir": 3, "output_dir": 3, "token_string": 2, "init_word": 2, "num_vectors_per_token": 2,
        "output_name": 2, "resolution": 2, "train_batch_size": 2, "max_train_steps": 3, "learning_rate": 3,
        "sample_images": 6,
    }),
    Tab("lllite", "LLLite", "lllite", {
        **MODEL_FIELD_WIDTH,
        "train_data_dir": 3, "conditioning_data_dir": 3, "output_dir": 4, "output_name": 2,
        "network_dim": 3, "cond_emb_dim": 3, "resolution": 2, "max_train_steps": 2, "learning_rate": 2,
        "sample_images": 6,
    }),
)  # fmt: skip


class TrainingTab:
    """One training tab: what it shows, and what its buttons do. All that it remembers between clicks is on screen."""

    def __init__(self, tab: Tab, roots: Sequence[Path]) -> None:
        self.tab, self.roots = tab, roots

    # Made when they are first asked for: five forms of ten families are a third of a second of a start.
    @cached_property
    def form(self) -> SettingsForm:
        """The form, which reads and fills."""
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
        }
        return SettingsForm(self.tab.id, FAMILIES, self.tab.configs, self.tab.basics, extra, below)

    @cached_property
    def markup(self) -> str:
        """All that is in the tab, as HTML."""
        starts = start_preset.starts(self.tab.id, self.tab.configs, start_preset.results(self.roots))
        parts = {
            "menu": api.menu(self.tab.id, FAMILIES),
            "browse": picker.browse_button("config", "Config file", "file", ".path"),
            "endings": ",".join(importers.SUFFIXES),
            "tab": self.tab.id,
            "form": self.form.markup(starts),
        }
        made = (FORM_FOLDER / "tab.html").read_text(encoding="utf-8")
        for name, part in parts.items():
            made = made.replace(f"[{name}]", part)
        return made

    def press(self, asked: ApiRequest) -> Said:
        """What a button does. What it refuses for the user to fix is said beside the buttons."""
        sent, where = asked.text("sent"), asked.text("path")
        buttons: dict[str, Callable[[], Said]] = {
            "first": lambda: self.on_first(sent),
            "train": lambda: self.on_train(sent),
            "later": lambda: self.on_queue(sent),
            "check": lambda: self.on_check(sent),
            "print": lambda: self.on_print(sent, where),
            "save": lambda: self.on_save(sent, where, asked.text("opened")),
            "load": lambda: self.on_load(sent, where),
            "upload": lambda: self.on_upload(sent, asked.text("name"), asked.text("text")),
            "download": lambda: self.on_download(sent),
            "export": lambda: self.on_export(sent, asked.text("base")),
        }
        if asked.text("act") not in buttons:
            raise ConfigError("There is no such button: load the page again.")
        try:
            return buttons[asked.text("act")]()
        except ConfigError as error:
            return {
                "message": messages.problems_html(error.problems, self._places(sent), lambda one: self._fix(sent, one))
            }

    def _places(self, sent: str) -> messages.Places:
        try:
            return self.form.places(self.form.parse_submission(sent).family)
        except ConfigError:
            return {}

    def _fix(self, sent: str, problem: Problem) -> Mapping[str, bool | str]:
        """What would mend a problem, as fields hold it."""
        submission = self.form.parse_submission(sent)
        wanted = self.form.shown(submission.family, working_fix(problem, self.form.lenient_config(submission)))
        return {**wanted, **self._of_preset(submission.family, problem.option)} if problem.code == LIMITS else wanted

    def _shown_fix(self, family: str, finding: JsonMapping) -> Mapping[str, bool | str]:
        """What would mend a finding, as fields hold it; a number beyond its limits becomes that of the preset."""
        if finding["code"] == LIMITS:
            return {**self.form.shown(family, finding["fix"]), **self._of_preset(family, finding["option"])}
        return self.form.shown(family, finding["fix"])

    def _of_preset(self, family: str, name: str) -> Mapping[str, bool | str]:
        """The value of an option in what the form begins with; nothing where that leaves it open."""
        return start_preset.value(self.tab.id, self.tab.configs[family], name)

    # ---- what the buttons do

    def on_first(self, sent: str) -> Said:
        """Say at once what is wrong with the form in itself: the whole check, which follows, takes seconds."""
        with contextlib.suppress(ConfigError):  # which the whole check says
            submission = self.form.parse_submission(sent)
            reading = paths.allowed(self.form.reading(submission), self.roots)
            if reading.problems:
                report: isolated.Report = {"findings": isolated.known(reading), "fit": None, "early": True}
                return {"message": self._report(report, submission.family)}
        return {}

    def on_train(self, sent: str) -> Said:
        """Check the form and all that it names, and start the training in processes of its own."""
        given, config, notes, report = self.checked(sent)
        if isolated.findings_to_fix(report):
            return {"message": self._report(report, given.family)}
        if (bare := isolated.uncaptioned(report)) and not given.anyway:
            return {"message": messages.without_captions(bare, "train")}
        run_id = start.launch_run(config, **self.launch_of(config, given.launch))
        hints = [read_problem(one) for one in report["findings"] if one["verdict"] == "hint"]
        said = Message("Started {run_id}. It goes on when this page is closed.", run_id=run_id)
        return {"message": messages.good(said, [*notes, *hints]), "run": run_id}

    def on_queue(self, sent: str) -> Said:
        """Check the form and all that it names, and let its training wait for its turn."""
        given, config, notes, report = self.checked(sent)
        if isolated.findings_to_fix(report):
            return {"message": self._report(report, given.family)}
        if (bare := isolated.uncaptioned(report)) and not given.anyway:
            return {"message": messages.without_captions(bare, "later")}
        entry = queue.add_to_queue(start.job(config, **self.launch_of(config, given.launch)))
        return {"message": messages.good(queue.queued_sentence(entry), notes)}

    def on_check(self, sent: str) -> Said:
        """Say all that can be known about this training before it starts."""
        given, _, notes, report = self.checked(sent)
        known = [isolated.finding(note, "settings", "hint") for note in notes]
        return {"message": self._report({**report, "findings": [*known, *report["findings"]]}, given.family)}

    def checked(self, sent: str) -> tuple[Submission, Any, list[MessageLike], isolated.Report]:
        """A form -> it, its config, notes about it, and the preflight report. To be asked before any start or queueing.

        The report has everything that is wrong, with the form itself as well as with what it names; that an option has
        no effect only where somebody typed it. Tokens that the form holds are kept in their own file.
        """
        given, reading, notes = self.read(sent)
        report = isolated.check_reading(replace(reading, notes=[]), given.launch)
        return given, reading.config, notes, isolated.without_ineffective(report, given.typed)

    def read(self, sent: str) -> tuple[Submission, Reading[Any], list[MessageLike]]:
        """A form -> it, what came of reading it for a training, and notes; its tokens are kept in their own file."""
        submission = self.form.parse_submission(sent)
        reading = paths.allowed(self.form.reading(submission), self.roots)
        return submission, reading, [*reading.notes, *self._keep(reading.config)]

    def _keep(self, config: RunConfig) -> list[MessageLike]:
        new = keys.store_keys(api.secrets_of(config))
        return [
            Message(
                "{name} is kept in {folder}, for you only, and is in no config.", name=name, folder=keys.keys_file()
            )
            for name in new
        ]

    def _report(self, report: isolated.Report, family: str) -> str:
        places = self.form.places(family)
        files = (finding.MODEL_OPTION, *families.facts_of(family).part_options)
        return messages.report_html(report, places, lambda one: self._shown_fix(family, one), files)

    def on_print(self, sent: str, where: str) -> Said:
        """Show the command that trains what the form says, and its TOML. Nothing is written."""
        submission = self.form.parse_submission(sent)
        config, notes = self.form.ready(submission)
        how = self.launch_of(config, submission.launch)
        return {"message": print_command.printed(config, where, how, notes, self.roots)}

    def on_save(self, sent: str, where: str, known: str) -> Said:
        """Write the form into the config file that is named."""
        config, notes = self.form.collect(self.form.parse_submission(sent))
        notes += self._keep(config)
        path = paths.config_file(where or presets.suggestion(config), self.roots)
        count = presets.save_config(path, config, known)
        said = messages.good(
            Message("Saved {path} ({changes}).", path=path, changes=loading.settings_count(count)), notes
        )
        return {"message": said, "path": str(path), "opened": presets.config_file_state(path)}

    def on_download(self, sent: str) -> Said:
        """Hand the form to the browser as a file."""
        config, notes = self.form.collect(self.form.parse_submission(sent))
        name = re.sub(r"[^\w.-]+", "_", config.save.output_name or config.script) + ".toml"
        file = {"name": name, "text": to_toml(config, presets.comment(config))}
        return {"message": messages.good(Message("{name} is among your downloads.", name=name), notes), "file": file}

    def on_export(self, sent: str, base: str) -> Said:
        """Hand the form to the browser as the JSON of kohya_ss, with the other keys of the one that was loaded."""
        submission = self.form.parse_submission(sent)
        config, notes = self.form.collect(submission)
        text = self._prompts(config.sample.sample_prompts)
        scripts = {script: config_class(script) for script in RUNS}
        fields, lost = importers.export(config, scripts, _theirs(base), text, submission.launch)
        name = re.sub(r"[^\w.-]+", "_", config.save.output_name or config.script) + ".json"
        file = {"name": name, "text": json.dumps(fields, indent=2, ensure_ascii=False) + "\n"}
        said = Message(
            "{name} is among your downloads: load it in the {tab} tab of kohya_ss.",
            name=name,
            tab=importers.tab_title(fields),
        )
        return {"message": messages.good(said, [*notes, *lost]), "file": file}

    def _prompts(self, name: str | None) -> str:
        """The text of a prompt file, which kohya_ss has in its JSON; none of a file where the page may not look."""
        try:
            return read_outside_text(paths.readable(name, self.roots, (".txt",)))
        except ConfigError:
            return ""

    def on_load(self, sent: str, where: str) -> Said:
        """Read the config file that is named into the form."""
        path = paths.readable(where, self.roots, importers.SUFFIXES)
        filled = self._filled(path, sent)
        # A file of another trainer stays as it is: Save writes a TOML of its own.
        is_ours = path.suffix.lower() == ".toml" and not importers.of_others(importers.parse_file(path))
        ours = str(path) if is_ours else ""
        return filled | {"path": ours, "opened": presets.config_file_state(path) if is_ours else ""}

    def on_upload(self, sent: str, name: str, text: str) -> Said:
        """Read a config that the browser sent into the form; where it was saved last is forgotten."""
        named = re.sub(r"[^\w.+-]+", "_", re.split(r"[\\/]", name)[-1])[-100:].lstrip(".")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / (f"_{named}" if RESERVED.fullmatch(named) else named or "config")
            if path.suffix.lower() in paths.WEIGHTS:
                path.write_bytes(importers.with_header(text))
            else:
                path.write_text(text, encoding="utf-8", newline="")  # line ends stay, on Windows too
            return self._filled(path, sent) | {"path": "", "opened": ""}

    def _filled(self, path: Path, sent: str) -> Said:
        submission = self.form.parse_submission(sent)
        try:
            return loading.load_into_form(self.form, path, submission, self.roots)
        except ConfigError as error:
            raise ConfigError(*error.problems, *self._other_tab(path, submission.family)) from None

    def _other_tab(self, path: Path, family: str) -> Iterator[Problem]:
        """A hint when a file that does not fit here would fit in another tab."""
        for tab in TABS:
            if tab.kind != self.tab.kind:
                try:
                    presets.import_fitting(path, tab.configs, family, self.roots)
                except ConfigError:
                    continue
                said = "This is a config for the {title} tab."
                yield Problem("", said, title=tab.title, tab=tab.id, code=messages.OTHER_TAB)
                return

    def launch_of(self, config: RunConfig, launch: JsonMapping) -> JsonObject:
        """How a training of the form is started."""
        return {**launch, "mixed_precision": config.precision.mixed_precision}


def _theirs(sent: Any) -> JsonObject | None:
    """The JSON of kohya_ss that a browser has kept, if it is one."""
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        found = json.loads(sent)
        if isinstance(found, dict) and importers.of_others(found):
            return found
    return None
