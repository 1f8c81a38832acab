"""The API of the form while it is filled in: mistakes, ineffective options, presets, comparisons, probes, keys."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from kohya_gui.form import (
    adapter,
    compare,
    compile_summary,
    datasets,
    presets,
    probe,
    prompts,
    recipes,
    start_preset,
    typed_paths,
)
from kohya_gui.form.adapter_size import SizeProcess
from kohya_gui.form.form import SettingsForm, Submission
from kohya_gui.server import allowed_folders, named_paths, paths
from kohya_gui.server.json_api import ApiRequest, Handler
from library.config.building import draft, missing
from library.config.ineffective import ineffective_options
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, MessageLike, Problem, either
from library.config.run_config import RunConfig
from library.config.schema import options, values
from library.config.sections import AdapterRun
from library.families.recognition import index_of, proposed_options, recognised
from library.recipes import preset_files
from library.runs import keys

MODEL = "pretrained_model_name_or_path"


class FormApi:
    """Handlers for the forms of all training tabs, by tab."""

    def __init__(self, forms: Mapping[str, SettingsForm], kinds: Mapping[str, str], roots: Sequence[Path]) -> None:
        """`kinds` is the kind of training of each tab."""
        self.forms, self.kinds, self.roots = forms, kinds, roots
        self.sizes = SizeProcess()

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of requests from the page's scripts."""
        return {
            "judge": self.judge,
            "preset": self.preset,
            "purpose": self.purpose,
            "choices": self.choices,
            "compare": self.compare,
            "probe": self.probe,
            "probing": self.probing,
            "unprobe": self.unprobe,
            "forget": self.forget,
            "compile_log": self.compile_log,
            "prompts": self.prompts,
            "prompts_save": self.save_prompts,
            "prompts_captions": self.captions,
            "datasets": self.datasets,
            "adapter_size": self.adapter_size,
            "datasets_count": self.count_images,
            "datasets_save": self.save_datasets,
        }

    def judge(self, sent: ApiRequest) -> JsonObject:
        """Mistakes, ineffective options, the outlook on compiling, and the type of the model's file."""
        form, given = self._heard(sent)
        places = form.places(given.family)
        wrong: dict[str, MessageLike] = {}
        for problem in form.wrong(given):
            if problem.option in places:
                wrong.setdefault(places[problem.option][1], problem.about.capitalized())
        config, adapters = form.lenient_config(given), None
        if isinstance(config, AdapterRun):
            adapters = adapter.state(config, self.sizes.counts(config))
            for problem in adapter.adapter_problems(config):
                wrong.setdefault(places[problem.option][1], problem.about.capitalized())
        typing = sent.text("typing")
        paths_said = typed_paths.wrong(options(type(config)), given.values, self.roots, typing)
        for name, said in paths_said.items():
            wrong.setdefault(places[name][1], said.about.capitalized())
        ineffective = {
            places[name][1]: reason for name, reason in ineffective_options(config).items() if name in places
        }
        known = [places[name][1] for name in keys.kept() if name in places]
        model, none = self._model(form, given, typing == MODEL)
        if none:
            wrong.setdefault(places[MODEL][1], none.about.capitalized())
        said = [*paths_said.values(), *filter(None, [none])]
        allow = {str(one.about.capitalized()): folder for one in said if (folder := allowed_folders.asked(one))}
        return {
            "wrong": wrong,
            "ineffective": ineffective,
            "outlook": compile_summary.outlook(config),
            "kept": known,
            "model": model,
            "profile": presets.chosen_profile(config),
            "adapter": adapters,
            "chosen": self._chosen(form, given, config, model),
            "allow": allow,
        }

    def _chosen(self, form: SettingsForm, given: Submission, config: RunConfig, model: JsonObject) -> str:
        """The base model as sent, if the tab can train it and its other files are there; otherwise ""."""
        text, parts = str(given.values.get(MODEL) or ""), {part.option.name for part in form.parts}
        is_model = bool(model.get("family")) or self._is_id(form, MODEL, text)
        if not is_model or any(problem.option in parts for problem in missing(config)):
            return ""
        files = {name: str(given.values[name]) for name in parts if given.values.get(name)}
        there = (self._is_id(form, name, file) or self._is_there(file) for name, file in files.items())
        return text if all(there) else ""

    def _is_id(self, form: SettingsForm, name: str, text: str) -> bool:
        return any(f.option.name == name and named_paths.is_hub_id(f.option, text) for f in form.fields)

    def _is_there(self, text: str) -> bool:
        try:
            return paths.inside(text, self.roots).exists()
        except ConfigError:
            return False

    def _model(self, form: SettingsForm, given: Submission, is_typed: bool) -> tuple[JsonObject, Problem | None]:
        """The type of the base model's file, if the page may read it, or the problem with it."""
        text = str(given.values.get(MODEL) or "").strip()
        if not text or self._is_id(form, MODEL, text):
            return {}, None
        try:
            path = paths.inside(text, self.roots, MODEL)
        except ConfigError as error:
            problem = error.problems[0]
            is_begun = is_typed and typed_paths.may_become_right(text, problem, self.roots)
            return {}, None if is_begun else problem
        try:
            if not path.suffix and not path.exists():
                raise ConfigError(Problem(MODEL, ": {path} does not exist", path=path))
            if not path.is_dir():
                path = paths.present(text, self.roots, (".safetensors",), MODEL)
            found = recognised(path)
        except ConfigError as error:
            is_begun = is_typed and not path.exists() and typed_paths.is_begun(path)
            return {}, None if is_begun else error.problems[0]
        family = found.family
        if not family:
            said = Problem("", "The file is {kind}, not a model that is trained here.", kind=found.words)
            is_model = path.is_file() or index_of(path) or not is_typed  # it may be typed further
            return {}, said if is_model else None
        if family not in form.configs:
            template = "The file is {kind}; this tab trains {families}."
            names = either(form.families[name] for name in form.configs)
            return {}, Problem("", template, kind=found.words, families=names)
        needed = form.shown(family, found.options)
        proposed = form.shown(family, proposed_options(path, found))
        return {"path": text, "family": family, "words": found.words, "options": needed, "proposed": proposed}, None

    def preset(self, sent: ApiRequest) -> JsonObject:
        """The values of a preset, or the defaults, on top of the form; paths and names are kept."""
        form, given = self._heard(sent)
        known = form.configs[given.family]
        right = values(form.lenient_config(given))  # mistakes elsewhere in the form do not prevent this
        now = {name: value for name, value in right.items() if name in given.values}
        if sent.text("id") == start_preset.DEFAULTS:
            config = draft(known, {name: now[name] for name in now if presets.is_own(options(known)[name])})
            start = start_preset.bare(given.family)
            return {"fill": form.fill(config, start), "title": start["title"], "text": start["text"]}
        chosen, notes = self._chosen_preset(form, sent.text("id")), list[MessageLike]()
        if not chosen.is_profile:
            config = start_preset.applied(chosen, form.configs[chosen.family], now, notes)
            own = {name: value for name, value in values(config).items() if name in presets.OWN_NAMES}
            situation = start_preset.Situation(recipes.of_model(type(config), own), sent.text("purpose"))
            start = self._start(form, chosen, situation)
            config, _ = recipes.applied(config, config, situation.purpose, 0, 1)
            return {"fill": form.fill(config, start), "title": chosen.title, "text": start["text"], "notes": notes}
        made = values(presets.apply(chosen, known, now, notes))
        # Whatever a profile does not set stays as typed, right or wrong.
        made = {name: value for name, value in made.items() if value != right[name]}
        fill = json.dumps({"family": given.family, "values": form.shown(given.family, made)})
        return {
            "fill": fill,
            "title": compile_summary.name(chosen),
            "text": compile_summary.about(chosen),
            "profile": True,
            "notes": notes,
        }

    def purpose(self, sent: ApiRequest) -> JsonObject:
        """The start of a form for a purpose and a number of images, on top of its preset."""
        form, given = self._heard(sent)
        chosen = self._chosen_preset(form, sent.text("id"))
        if chosen.is_profile or chosen.family != given.family:
            raise ConfigError("there is no such preset: load the page again")
        model = recipes.of_model(form.configs[given.family], values(form.lenient_config(given)))
        images, at_once = (
            recipes.number_of_images(sent.fields.get("images")),
            recipes.images_in_step({**given.values, **given.launch}),
        )
        return self._start(form, chosen, start_preset.Situation(model, sent.text("purpose"), images, at_once))

    def _chosen_preset(self, form: SettingsForm, name: str) -> preset_files.Preset:
        chosen = preset_files.by_id(name)
        if chosen is None or not (chosen.is_profile or chosen.kind == self.kinds[form.tab]):
            raise ConfigError("there is no such preset: load the page again")
        return chosen

    def _start(self, form: SettingsForm, preset: preset_files.Preset, situation: start_preset.Situation) -> JsonObject:
        config, folder = form.configs[preset.family], start_preset.results(self.roots)
        return start_preset.start(form.tab, preset, config, folder, "", situation)

    def choices(self, sent: ApiRequest) -> JsonObject:
        """The settings that can be compared."""
        return {"choices": compare.choices(self.kinds[self._form(sent).tab])}

    def compare(self, sent: ApiRequest) -> JsonObject:
        """The options that differ between two settings."""
        form, given = self._heard(sent)
        chosen = [
            compare.config_of(sent.text(which), lambda: form.collect(given)[0], self.roots)
            for which in ("first", "second")
        ]
        (one, first), (two, second) = chosen
        return {"first": one, "second": two, "rows": compare.rows(first, second)}

    def probe(self, sent: ApiRequest) -> JsonObject:
        """Start a probe."""
        form, given = self._heard(sent)
        config, _ = form.ready(given)
        paths.allow(config, self.roots)
        return {"id": probe.start(config, {**given.launch})}

    def probing(self, sent: ApiRequest) -> JsonObject:
        """The progress of a probe, with its proposal as values of fields."""
        form, given = self._heard(sent)
        found = probe.state(sent.text("id"))
        return {**found, "fix": form.shown(given.family, found.get("best") or {})}

    def unprobe(self, sent: ApiRequest) -> JsonObject:
        """End a probe."""
        probe.stop(sent.text("id"))
        return {}

    def prompts(self, sent: ApiRequest) -> JsonObject:
        """The rows of a prompt file."""
        return prompts.load_rows(sent, self.roots)

    def save_prompts(self, sent: ApiRequest) -> JsonObject:
        """Save rows to a prompt file."""
        return prompts.save_rows(*self._heard(sent), sent, self.roots)

    def captions(self, sent: ApiRequest) -> JsonObject:
        """Some captions of the form's images."""
        return prompts.captions(*self._heard(sent), self.roots)

    def datasets(self, sent: ApiRequest) -> JsonObject:
        """The form's data sets with their folders."""
        return datasets.look(*self._heard(sent), self.roots)

    def count_images(self, sent: ApiRequest) -> JsonObject:
        """How a training counts the images of each folder, and the number of steps."""
        return datasets.count_images(*self._heard(sent), self.roots)

    def save_datasets(self, sent: ApiRequest) -> JsonObject:
        """Save data sets to a dataset file."""
        return datasets.save_datasets(*self._heard(sent), sent, self.roots)

    def adapter_size(self, sent: ApiRequest) -> JsonObject:
        """The number of trained layers, in total and by block, and the size of the file."""
        form, given = self._heard(sent)
        config = form.lenient_config(given)
        paths.allow(config, self.roots)
        return self.sizes.ask(config)

    def compile_log(self, sent: ApiRequest) -> JsonObject:
        """What the running training has compiled."""
        return {"text": compile_summary.running()}

    def forget(self, sent: ApiRequest) -> JsonObject:
        """Delete a stored token."""
        keys.forget(sent.text("name"))
        return {}

    def _form(self, sent: ApiRequest) -> SettingsForm:
        form = self.forms.get(sent.text("tab"))
        if form is None:
            raise ConfigError("there is no such tab: load the page again")
        return form

    def _heard(self, sent: ApiRequest) -> tuple[SettingsForm, Submission]:
        form = self._form(sent)
        return form, form.parse_submission(sent.text("sent"))


def menu(tab: str, families: Mapping[str, str]) -> str:
    """The button that opens the list of presets, each with its description; profiles are in their own section of the
    form."""
    groups, gpu = "", start_preset.training_gpu()
    for family, members in groupby(preset_files.of_kind(tab, families), key=lambda preset: preset.family):
        made = "".join(
            f'<button type="button" class="preset" data-preset="{preset.id}"><b>{escape(preset.title)}</b>'
            f"{_lines(start_preset.about(preset, gpu))}</button>"
            for preset in members
        )
        groups += f'<section data-family="{family}"><h4>{escape(families[family])}</h4>{made}</section>'
    sheet = f"{tab}-presets"
    return (
        f'<button type="button" class="opens" popovertarget="{sheet}">Presets</button>'
        f'<div id="{sheet}" class="sheet" popover data-tab="{tab}" role="dialog" aria-label="Presets">{groups}</div>'
    )


def _lines(text: str) -> str:
    """What a preset sets, and below it what it needs; in separate pieces, as they are translated separately."""
    made = ""
    for line in text.split("; "):
        pieces = (line[:1].upper() + line[1:]).split(", ")
        made += f"<small>{', '.join(f'<span>{escape(piece)}</span>' for piece in pieces)}</small>"
    return made


def secrets_of(config: RunConfig) -> dict[str, str | None]:
    """The tokens and keys in a form."""
    known = options(type(config))
    return {name: getattr(getattr(config, known[name].section), name) for name in keys.ENVIRONMENT if name in known}
