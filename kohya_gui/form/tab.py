"""A training tab: a form, its buttons, and what they do."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr

from kohya_gui.form import (
    adapter,
    api,
    caches,
    compile_summary,
    datasets,
    gpus,
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
from library import families, importers
from library.check import isolated
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Problem, Text
from library.config.problems import read as read_problem
from library.config.run_config import RunConfig
from library.config.schema import changed, flat, mending, read_text, to_toml
from library.downloads import finding
from library.families import RUNS, config_class
from library.runs import keys, queue, start

FAMILIES = {family.name: family.title for family in families.every()}
BASE = {finding.BASE: 6}
# Nothing of an event is queued or overlaid: each answers within some milliseconds.
QUICK: JsonObject = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
Said = dict[Any, Any]  # component -> its new value

MORE = '<button type="button" class="opens extra" aria-expanded="false" data-tab="{tab}">More</button>'
COMPARE = (
    '<button type="button" class="opens saveas" data-tab="{tab}">Save as</button>'
    '<button type="button" class="opens undo" data-tab="{tab}">Undo</button>'
    '<button type="button" class="opens compare" data-tab="{tab}">Compare</button>'
)


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
        **BASE, "train_data_dir": 3, "output_dir": 3, "output_name": 2,
        "resolution": 2, "train_batch_size": 2, "max_train_steps": 2, "network_dim": 2, "learning_rate": 2,
    }),
    Tab("dreambooth", "DreamBooth", "finetune", {
        **BASE, "train_data_dir": 3, "reg_data_dir": 3, "output_dir": 4, "output_name": 2,
        "resolution": 2, "max_train_steps": 2, "learning_rate": 2,
    }),
    Tab("finetune", "Finetune", "finetune", {
        **BASE, "in_json": 3, "train_data_dir": 3, "dataset_config": 3, "output_dir": 3, "output_name": 2,
        "resolution": 2, "train_batch_size": 2, "max_train_steps": 2, "learning_rate": 2, "mixed_precision": 2,
    }),
    Tab("textual-inversion", "Textual inversion", "textual-inversion", {
        **BASE, "train_data_dir": 3, "output_dir": 3, "token_string": 2, "init_word": 2, "num_vectors_per_token": 2,
        "output_name": 2, "resolution": 2, "train_batch_size": 2, "max_train_steps": 3, "learning_rate": 3,
    }),
    Tab("lllite", "LLLite", "lllite", {
        **BASE, "train_data_dir": 3, "conditioning_data_dir": 3, "output_dir": 4, "output_name": 2,
        "network_dim": 3, "cond_emb_dim": 3, "resolution": 2, "max_train_steps": 2, "learning_rate": 2,
    }),
)  # fmt: skip


class TrainingTab:
    """One training tab. Made inside `gr.Blocks`; all that it remembers between clicks is on screen."""

    def __init__(self, tab: Tab, roots: Sequence[Path]) -> None:
        self.tab, self.roots = tab, roots
        extra = {
            "compile": compile_summary.section(),
            "sample": prompts.section(),
            "images": datasets.section(tab.configs),
            "basics": gpus.CHOOSER,
            "network": adapter.section(),
        }
        below = {
            finding.BASE: models.button("Base model"),
            **dict.fromkeys(("learning_rate", "network_dim"), several.BUTTON),
            **caches.BUTTONS,
        }
        self.form = SettingsForm(tab.id, FAMILIES, tab.configs, tab.basics, extra, below)
        self.sent = gr.Textbox(visible=False)  # the form on its way to the server
        self.values = gr.Textbox(visible=False)  # values on their way into the form
        self.file = gr.Textbox(visible=False)  # a config on its way to the downloads
        self.opened = gr.State("")  # the file that was loaded or saved here last, which may be written over
        # The JSON of kohya_ss that was loaded last, for an export that loses no key. The browser keeps it with
        # the form: both outlive the page.
        self.base = gr.Textbox(visible=False)
        with gr.Column(elem_classes=["training"]):
            self._top()
            markup = self.form.markup(start_preset.starts(tab.id, tab.configs))
            gr.HTML(markup, js_on_load="window.kohya.mountForm(element)", apply_default_css=False)
            with gr.Column(elem_classes=["bar"]):
                self.message = gr.HTML(elem_classes=["said"], apply_default_css=False)
                with gr.Row():
                    self.train = gr.Button("Train", variant="primary", scale=2, min_width=0, elem_classes=["train"])
                    self.later = gr.Button("Add to queue", scale=1, min_width=0, elem_classes=["later"])
                    self.check = gr.Button("Check", scale=1, min_width=0)
                    self.show = gr.Button("Print command", scale=1, min_width=0)
        self._wire()

    def _top(self) -> None:
        """A preset or a file to begin with, and what else can be done with settings."""
        bare: JsonObject = {"show_label": False, "container": False, "min_width": 0}
        small: JsonObject = {"size": "sm", "min_width": 0}
        with gr.Row(elem_classes=["begin"]):
            gr.HTML(api.menu(self.tab.id, FAMILIES), apply_default_css=False, min_width=0)
            hint = "Config file, such as ~/kohya/cat.toml"
            self.path = gr.Textbox(label="Config file", placeholder=hint, elem_classes=["path"], **bare)
            gr.HTML(
                picker.button("config", "Config file", "file", ".path textarea"), apply_default_css=False, min_width=0
            )
            self.load = gr.Button("Load config", **small)
            self.save = gr.Button("Save config", elem_classes=["save"], **small)
            gr.HTML(MORE.format(tab=self.tab.id), apply_default_css=False, min_width=0)
        with gr.Row(elem_classes=["begin", "more"]):
            self.upload = gr.UploadButton("Upload", file_types=list(importers.SUFFIXES), **small)
            self.download = gr.Button("Download", **small)
            self.export = gr.Button("Download for kohya_ss", **small)
            gr.HTML(COMPARE.format(tab=self.tab.id), apply_default_css=False, min_width=0)

    def _wire(self) -> None:
        said = [self.message]
        filled = [self.message, self.values, self.path, self.opened]
        self._on(self.train.click, self.on_train, [self.sent], said, "Checking the settings")
        self._on(self.later.click, self.on_queue, [self.sent], said, "Checking the settings")
        self._on(self.check.click, self.on_check, [self.sent], said, "Checking the settings")
        self._on(self.show.click, self.on_print, [self.sent, self.path], said)
        self._on(self.save.click, self.on_save, [self.sent, self.path, self.opened], [*said, self.path, self.opened])
        for event, handler, inputs, more in (
            (self.download.click, self.on_download, [self.sent], ""),
            (self.export.click, self.on_export, [self.sent, self.base], f"window.kohya.base('{self.tab.id}')"),
        ):
            made = self._on(event, handler, inputs, [*said, self.file], more=more)
            made.success(None, self.file, None, js="(file) => window.kohya.download(file)", **QUICK)
        for event, handler, source in (
            (self.load.click, self.on_load, self.path),
            (self.path.submit, self.on_load, self.path),
            (self.upload.upload, self.on_upload, self.upload),
        ):
            done = self._on(event, handler, [self.sent, source], filled)
            done.then(None, self.values, None, js=f"(sent) => window.kohya.fill('{self.tab.id}', sent)", **QUICK)

    def _on(self, event: Any, handler: Callable[..., Said], inputs: list[Any], outputs: list[Any],
            busy: str = "", more: str = "...rest") -> Any:  # fmt: skip
        """Bind a handler. What it raises for the user to fix is said beside the buttons; until it is done, `busy`.

        `more` is what the browser sends besides the form."""

        def handle(sent: str, *rest: Any) -> Said:
            clear = {self.values: ""} if self.values in outputs else {}
            try:
                return clear | handler(sent, *rest)
            except ConfigError as error:
                said = messages.problems(error.problems, self._places(sent), lambda one: self._fix(sent, one))
                return clear | {self.message: said}

        read = f"(sent, ...rest) => [window.kohya.read('{self.tab.id}', '{busy}'), {more}]"
        if busy:
            event = event(self.on_first, inputs=inputs, outputs=[self.message], js=read, **QUICK).then
        done = event(handle, inputs=inputs, outputs=outputs, js=read, **QUICK)
        if busy:
            done.then(None, None, None, js=f"() => window.kohya.rest('{self.tab.id}')", **QUICK)
        return done

    def _places(self, sent: str) -> messages.Places:
        try:
            return self.form.places(self.form.parse_submission(sent).family)
        except ConfigError:
            return {}

    def _fix(self, sent: str, problem: Problem) -> Mapping[str, bool | str]:
        """What would mend a problem, as fields hold it."""
        given = self.form.parse_submission(sent)
        return self.form.shown(given.family, mending(problem, self.form.lenient_config(given)))

    # ---- what the buttons do

    def on_first(self, sent: str) -> Any:
        """Say at once what is wrong with the form in itself: the whole check, which follows, takes seconds."""
        with contextlib.suppress(ConfigError):  # which the whole check says
            given = self.form.parse_submission(sent)
            reading = paths.allowed(self.form.reading(given), self.roots)
            if reading.problems:
                return self._report({"findings": isolated.known(reading), "fit": None, "early": True}, given.family)
        return gr.skip()

    def on_train(self, sent: str) -> Said:
        """Check the form and all that it names, and start the training in processes of its own."""
        given, config, notes, report = self.checked(sent)
        if isolated.problems(report):
            return {self.message: self._report(report, given.family)}
        if (bare := isolated.uncaptioned(report)) and not given.anyway:
            return {self.message: messages.without_captions(bare, "train")}
        run_id = start.launch(config, **self.launch_of(config, given.launch))
        hints = [read_problem(one) for one in report["findings"] if one["verdict"] == "hint"]
        said = Text("Started {run_id}. It goes on when this page is closed.", run_id=run_id)
        return {self.message: messages.good(said, [*notes, *hints])}

    def on_queue(self, sent: str) -> Said:
        """Check the form and all that it names, and let its training wait for its turn."""
        given, config, notes, report = self.checked(sent)
        if isolated.problems(report):
            return {self.message: self._report(report, given.family)}
        if (bare := isolated.uncaptioned(report)) and not given.anyway:
            return {self.message: messages.without_captions(bare, "later")}
        entry = queue.add(start.job(config, **self.launch_of(config, given.launch)))
        return {self.message: messages.good(queue.queued_sentence(entry), notes)}

    def on_check(self, sent: str) -> Said:
        """Say all that can be known about this training before it starts."""
        given, _, notes, report = self.checked(sent)
        known = [isolated.finding(note, "settings", "hint") for note in notes]
        return {self.message: self._report({**report, "findings": [*known, *report["findings"]]}, given.family)}

    def checked(self, sent: str) -> tuple[Submission, Any, list[str], isolated.Report]:
        """A form -> it, its config, notes about it, and the preflight report. To be asked before any start or queueing.

        The report has everything that is wrong, with the form itself as well as with what it names; that an option has
        no effect only where somebody typed it. Tokens that the form holds are kept in their own file.
        """
        given = self.form.parse_submission(sent)
        reading = self.form.reading(given)
        reading = paths.allowed(reading, self.roots)
        notes = [*reading.notes, *self._keep(reading.config)]
        report = isolated.check(replace(reading, notes=[]), given.launch)
        return given, reading.config, notes, isolated.without_idle(report, given.typed)

    def _keep(self, config: RunConfig) -> list[str]:
        new = keys.keep(api.secrets_of(config))
        return [
            Text("{name} is kept in {folder}, for you only, and is in no config.", name=name, folder=keys.place())
            for name in new
        ]

    def _report(self, report: isolated.Report, family: str) -> str:
        places = self.form.places(family)
        return messages.report(report, places, lambda fix: self.form.shown(family, fix))

    def on_print(self, sent: str, where: str) -> Said:
        """Show the command that trains what the form says, and its TOML. Nothing is written."""
        given = self.form.parse_submission(sent)
        config, notes = self.form.ready(given)
        how = self.launch_of(config, given.launch)
        return {self.message: print_command.printed(config, where, how, notes, self.roots)}

    def on_save(self, sent: str, where: str, known: str) -> Said:
        """Write the form into the config file that is named."""
        config, notes = self.form.collect(self.form.parse_submission(sent))
        notes += self._keep(config)
        path = paths.config_file(where or presets.suggestion(config), self.roots)
        count = presets.save(path, config, known)
        said = messages.good(Text("Saved {path} ({changes}).", path=path, changes=differing(count)), notes)
        return {self.message: said, self.path: str(path), self.opened: presets.seen(path)}

    def on_download(self, sent: str) -> Said:
        """Hand the form to the browser as a file."""
        config, notes = self.form.collect(self.form.parse_submission(sent))
        name = re.sub(r"[^\w.-]+", "_", config.save.output_name or config.script) + ".toml"
        file = json.dumps({"name": name, "text": to_toml(config, presets.comment(config))})
        return {self.message: messages.good(Text("{name} is among your downloads.", name=name), notes), self.file: file}

    def on_export(self, sent: str, base: str) -> Said:
        """Hand the form to the browser as the JSON of kohya_ss, with the other keys of the one that was loaded."""
        given = self.form.parse_submission(sent)
        config, notes = self.form.collect(given)
        text = self._prompts(config.sample.sample_prompts)
        scripts = {script: config_class(script) for script in RUNS}
        fields, lost = importers.export(config, scripts, _theirs(base), text, given.launch)
        name = re.sub(r"[^\w.-]+", "_", config.save.output_name or config.script) + ".json"
        file = json.dumps({"name": name, "text": json.dumps(fields, indent=2, ensure_ascii=False) + "\n"})
        said = Text(
            "{name} is among your downloads: load it in the {tab} tab of kohya_ss.",
            name=name,
            tab=importers.tab_title(fields),
        )
        return {self.message: messages.good(said, [*notes, *lost]), self.file: file}

    def _prompts(self, name: str | None) -> str:
        """The text of a prompt file, which kohya_ss has in its JSON; none of a file where the page may not look."""
        try:
            return read_text(paths.readable(name, self.roots, (".txt",)))
        except ConfigError:
            return ""

    def on_load(self, sent: str, where: str) -> Said:
        """Read the config file that is named into the form."""
        path = paths.readable(where, self.roots, importers.SUFFIXES)
        filled = self._filled(path, sent)
        # A file of another trainer stays as it is: Save writes a TOML of its own.
        is_ours = path.suffix.lower() == ".toml" and not importers.of_others(importers.parse(path))
        ours = str(path) if is_ours else ""
        return filled | {self.path: ours, self.opened: presets.seen(path) if is_ours else ""}

    def on_upload(self, sent: str, uploaded: str) -> Said:
        """Read a config file that the browser sent into the form; where it was saved last is forgotten."""
        path = Path(uploaded)  # made by Gradio, in its own folder for uploads, and checked by it to be there
        return self._filled(path, sent) | {self.path: "", self.opened: ""}

    def _filled(self, path: Path, sent: str) -> Said:
        family, notes = self.form.parse_submission(sent).family, []
        try:
            config = presets.load(path, self.tab.configs, family, notes)
        except ConfigError as error:
            raise ConfigError(*error.problems, *self._other_tab(path, family)) from None
        count = len(flat(changed(config)))
        said = Text(
            "Loaded {name} for {family} ({changes}).",
            name=path.name,
            family=FAMILIES[config.family],
            changes=differing(count),
        )
        shown = messages.good(said, notes, undo=True)
        base = {key: value for key, value in presets.base(path).items() if key not in keys.ENVIRONMENT}
        filled = json.loads(self.form.fill(config, start_preset.loaded(path.name)))
        launch = self.form.shown_launch(importers.launch(base))
        return {self.message: shown, self.values: json.dumps({**filled, "base": base, "launch": launch})}

    def _other_tab(self, path: Path, family: str) -> Iterator[Text]:
        """A hint when a file that does not fit here would fit in another tab."""
        for tab in TABS:
            if tab.kind != self.tab.kind:
                try:
                    presets.load(path, tab.configs, family, [])
                except ConfigError:
                    continue
                yield Text("This is a config for the {title} tab: load it there.", title=tab.title)
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


def differing(count: int) -> str:
    """How many settings a file holds, in words."""
    template = (
        "{count} setting differs from the defaults" if count == 1 else "{count} settings differ from the defaults"
    )
    return Text(template, count=count)
