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
    kept_file,
    mistakes,
    presets,
    prompts,
    recipes,
    start_preset,
)
from kohya_gui.form.adapter_size import SizeProcess
from kohya_gui.form.form import SettingsForm, Submission
from kohya_gui.form.requested import of_tab, requested_submission
from kohya_gui.form.typed_paths import MODEL_OPTION
from kohya_gui.i18n.sentences import data
from kohya_gui.server import allowed_folders, paths
from kohya_gui.server.json_api import ApiRequest, Handler
from library.check import check_process
from library.config.building import draft, find_missing
from library.config.command import is_on_cpu
from library.config.formats import to_toml
from library.config.ineffective import ineffective_options
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, MessageLike
from library.config.run_config import RunConfig
from library.config.schema import option_values, options_of
from library.config.sections import AdapterRun
from library.families.recognition import index_of
from library.files import names_apart, write_atomic
from library.jobs import jobs
from library.recipes import preset_files
from library.runs import keys

PROBE_KIND = "probe"
BEGUN = {"state": "running", "doing": "Preparing", "tries": [], "best": None}


class FormApi:
    """Handlers for the forms of all training tabs, by tab."""

    def __init__(self, forms: Mapping[str, SettingsForm], kinds: Mapping[str, str], roots: Sequence[Path]) -> None:
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
            "save_name": self.save_name,
            "compile_log": self.compile_log,
            "prompts": self.prompts,
            "prompts_save": self.save_prompts,
            "prompts_captions": self.captions,
            "datasets": self.datasets,
            "adapter_size": self.adapter_size,
            "datasets_count": self.count_images,
            "datasets_save": self.save_datasets,
        }

    def judge(self, request: ApiRequest) -> JsonObject:
        """Return mistakes, ineffective options, the outlook on compiling, and the type of the model's file."""
        check_process.spare.prepare()  # someone edits the form, so a check will probably follow
        form, submission = self._parse(request)
        places = form.places(submission.family)
        config, adapters = form.lenient_config(submission), None
        if isinstance(config, AdapterRun):
            adapters = adapter.adapter_state(config, self.sizes.counts(config))
        problems, model = mistakes.find_mistakes(form, submission, self.roots, request.text("typing"))
        wrong: dict[str, MessageLike] = {}
        for problem in problems:
            wrong.setdefault(places[problem.option][1], problem.about.capitalized())
        reasons = ineffective_options(config) | datasets.reasons_of_rows(config)
        ineffective = {places[name][1]: reason for name, reason in reasons.items() if name in places}
        fields_with_keys = [places[name][1] for name in keys.stored_keys() if name in places]
        allow = {
            str(problem.about.capitalized()): folder
            for problem in problems
            if (folder := allowed_folders.asked_folder(problem))
        }
        return {
            "wrong": wrong,
            "ineffective": ineffective,
            "outlook": compile_summary.outlook(config),
            "kept": fields_with_keys,
            "model": model,
            "profile": presets.chosen_profile(config),
            "adapter": adapters,
            "chosen": self._chosen(form, submission, config, model),
            "allow": allow,
        }

    def _chosen(self, form: SettingsForm, submission: Submission, config: RunConfig, model: JsonObject) -> str:
        """Return the base model as sent, if the tab can train it and its other files are there; otherwise ""."""
        text, parts = str(submission.values.get(MODEL_OPTION) or ""), {part.option.name for part in form.parts}
        is_id = mistakes.is_id_on_hub(form, MODEL_OPTION, text)
        if not (is_id or model.get("family")) or any(problem.option in parts for problem in find_missing(config)):
            return ""
        folder = None if is_id or not parts else paths.allowed_path(text, self.roots)
        if folder and folder.is_dir() and not index_of(folder):  # it may lack parts
            return ""
        files = {name: str(submission.values[name]) for name in parts if submission.values.get(name)}
        existing = (mistakes.is_id_on_hub(form, name, file) or self._is_there(file) for name, file in files.items())
        return text if all(existing) else ""

    def _is_there(self, file: str) -> bool:
        return paths.is_allowed(file, self.roots) and paths.allowed_path(file, self.roots).exists()

    def preset(self, request: ApiRequest) -> JsonObject:
        """Return the values of a preset, a profile or the defaults, on top of the form; paths and names are kept."""
        form, submission = self._parse(request)
        # Mistakes elsewhere in the form do not prevent this.
        before = form.lenient_config(submission)
        form_values = {name: value for name, value in option_values(before).items() if name in submission.values}
        if request.text("id") == start_preset.DEFAULTS:
            options = options_of(type(before))
            own_values = {name: value for name, value in form_values.items() if presets.is_own(options[name])}
            start = start_preset.bare(submission.family)
            config = draft(type(before), own_values)
            return {"fill": form.fill(config, start), "title": start["title"], "text": start["text"]}
        chosen = self._chosen_preset(form, request.text("id"))
        if chosen.is_profile:
            return _with_profile(form, chosen, before, form_values)
        notes: list[MessageLike] = []
        config = start_preset.apply_preset(chosen, form.configs[chosen.family], form_values, notes)
        own_values = {name: value for name, value in option_values(config).items() if name in presets.OWN_NAMES}
        situation = start_preset.Situation(recipes.model_values(type(config), own_values), request.text("purpose"))
        start = self._start(form, chosen, situation)
        config, recipe = recipes.apply_recipe(config, config, situation.purpose, 0, 1)
        config = start_preset.with_room_for_references(config, chosen, recipe, notes)
        filled = {"fill": form.fill(config, start), "changes": compare.difference_rows(before, config)}
        return filled | {"title": chosen.title, "text": start["text"], "notes": notes}

    def purpose(self, request: ApiRequest) -> JsonObject:
        """Return the start of a form for a purpose and a number of images, on top of its preset."""
        form, submission = self._parse(request)
        chosen = self._chosen_preset(form, request.text("id"))
        if chosen.is_profile or chosen.family != submission.family:
            raise ConfigError("there is no such preset: load the page again")
        model = recipes.model_values(form.configs[submission.family], option_values(form.lenient_config(submission)))
        images = recipes.number_of_images(request.fields.get("images"))
        at_once = recipes.images_in_step({**submission.values, **submission.launch})
        return self._start(form, chosen, start_preset.Situation(model, request.text("purpose"), images, at_once))

    def _chosen_preset(self, form: SettingsForm, name: str) -> preset_files.Preset:
        chosen = preset_files.by_id(name)
        if chosen is None or not (chosen.is_profile or chosen.kind == self.kinds[form.tab]):
            raise ConfigError("there is no such preset: load the page again")
        return chosen

    def _start(self, form: SettingsForm, preset: preset_files.Preset, situation: start_preset.Situation) -> JsonObject:
        config, folder = form.configs[preset.family], start_preset.results(self.roots)
        why = start_preset.reason_for(preset, self.kinds[form.tab])  # so that no later answer changes the sentences
        return start_preset.preset_as_start(form.tab, preset, config, folder, why, situation)

    def choices(self, request: ApiRequest) -> JsonObject:
        return {"choices": compare.comparable_configs(self.kinds[of_tab(self.forms, request.text("tab")).tab])}

    def save_name(self, request: ApiRequest) -> JsonObject:
        """Return a path for a new config with these settings; "" if the form does not say where its result goes."""
        form, submission = self._parse(request)
        config = form.lenient_config(submission)
        try:
            path = presets.suggestion(config)
            # The picker lists an existing folder.
            folder = next((folder for folder in path.parents if folder.is_dir()), path.parent)
            path = paths.config_file(str(kept_file.free_path(folder / path.name)), self.roots)
        except ConfigError:
            return {"path": ""}
        return {"path": str(path)}

    def compare(self, request: ApiRequest) -> JsonObject:
        """Return the options that differ between two settings."""
        form, submission = self._parse(request)
        config_keys = [request.text("first"), request.text("second")]
        chosen = [compare.config_of_key(key, lambda: form.collect(submission)[0], self.roots) for key in config_keys]
        (first_title, first), (second_title, second) = chosen
        if first_title == second_title:  # such as two files of one name, or two runs of one minute
            first_title, second_title = names_apart([Path(key.removeprefix("run:")) for key in config_keys])
        rows = compare.compare_settings(config_keys, [first, second], self.roots)
        return {"first": first_title, "second": second_title, "rows": rows}

    def probe(self, request: ApiRequest) -> JsonObject:
        """Start a probe."""
        form, submission = self._parse(request)
        config, _ = form.ready(submission)
        paths.allow(config, self.roots)
        return {"id": start_probe(config, {**submission.launch})}

    def probing(self, request: ApiRequest) -> JsonObject:
        """Return the progress of a probe, with its proposal as values of fields."""
        form, submission = self._parse(request)
        state = probe_state(request.text("id"))
        return {**state, "fix": form.shown(submission.family, state.get("best") or {})}

    def unprobe(self, request: ApiRequest) -> JsonObject:
        jobs.stop_job(jobs.find_job(request.text("id")), at_once=True)
        return {}

    def prompts(self, request: ApiRequest) -> JsonObject:
        return prompts.load_rows(request, self.roots)

    def save_prompts(self, request: ApiRequest) -> JsonObject:
        return prompts.save_rows(*self._parse(request), request, self.roots)

    def captions(self, request: ApiRequest) -> JsonObject:
        return prompts.some_captions(*self._parse(request), self.roots)

    def datasets(self, request: ApiRequest) -> JsonObject:
        return datasets.scan_form_datasets(*self._parse(request), self.roots)

    def count_images(self, request: ApiRequest) -> JsonObject:
        return datasets.count_images(*self._parse(request), self.roots)

    def save_datasets(self, request: ApiRequest) -> JsonObject:
        return datasets.save_datasets(*self._parse(request), request, self.roots)

    def adapter_size(self, request: ApiRequest) -> JsonObject:
        """Return the number of trained layers, in total and by block, and the size of the file."""
        form, submission = self._parse(request)
        config = form.lenient_config(submission)
        paths.allow(config, self.roots)
        return self.sizes.ask(config)

    def compile_log(self, request: ApiRequest) -> JsonObject:
        return {"text": compile_summary.running()}

    def forget(self, request: ApiRequest) -> JsonObject:
        keys.forget_key(request.text("name"))
        return {}

    def _parse(self, request: ApiRequest) -> tuple[SettingsForm, Submission]:
        return requested_submission(self.forms, request)


def _with_profile(
    form: SettingsForm, profile: preset_files.Preset, before: RunConfig, form_values: JsonMapping
) -> JsonObject:
    """Return the values that a profile changes. Other options stay as typed, right or wrong."""
    notes: list[MessageLike] = []
    config, values_before = presets.apply(profile, type(before), form_values, notes), option_values(before)
    values = {name: value for name, value in option_values(config).items() if value != values_before[name]}
    return {
        "fill": json.dumps({"family": config.family, "values": form.shown(config.family, values)}),
        "title": compile_summary.name(profile),
        "text": profile.description.short(),
        "profile": True,
        "notes": notes,
        "changes": compare.difference_rows(before, config),
    }


def menu(tab: str, families: Mapping[str, str]) -> str:
    """Return the button that opens the list of presets, each with its description; profiles are in their own section of
    the form."""
    groups, gpu = "", start_preset.training_gpu()
    for family, members in groupby(preset_files.of_kind(tab, families), key=lambda preset: preset.family):
        buttons = "".join(
            f'<button type="button" class="preset" data-preset="{preset.id}"{data(preset.title)}>'
            f"<b>{escape(str(preset.title))}</b>{_lines(start_preset.description_for(preset, gpu))}</button>"
            for preset in members
        )
        groups += f'<section data-family="{family}"><h3>{escape(families[family])}</h3>{buttons}</section>'
    sheet = f"{tab}-presets"
    return (
        f'<button type="button" class="opens" popovertarget="{sheet}">Presets</button>'
        f'<div id="{sheet}" class="sheet" popover data-tab="{tab}" role="dialog" aria-label="Presets">'
        f'<header><h2>Presets</h2><button type="button" class="close" popovertarget="{sheet}" '
        f'popovertargetaction="hide" aria-label="Close">✕</button></header>{groups}</div>'
    )


def _lines(description: preset_files.Description) -> str:
    """Return what a preset sets, and below it its figures."""
    lines = filter(str, (description.short(), description.figures_alone()))
    return "".join(f"<small{data(line)}>{escape(str(line))}</small>" for line in lines)


def start_probe(config: RunConfig, launch: JsonMapping) -> str:
    """Start a probe of a config, and return its id. Raises ConfigError while another one is running."""
    if any(job.active for job in jobs.jobs_of_kinds(PROBE_KIND)):
        raise ConfigError("A probe is already running: wait until it has ended, or stop it.")
    folder = jobs.new(PROBE_KIND)
    toml = write_atomic(folder / "run.toml", to_toml(config))
    cpu = ["--cpu"] if is_on_cpu(launch) else []
    words = [PROBE_KIND, str(toml), "--script", config.script, *cpu]
    return jobs.start_job(PROBE_KIND, words, folder, check_process.environment_for_check(launch)).id


def probe_state(probe_id: str) -> JsonObject:
    """Return the progress of a probe, as library.bench.probe.Probe.as_json; `state` is "failed" when its process has
    ended."""
    job = jobs.find_job(probe_id)
    progress = {**BEGUN, **job.result}
    if progress["state"] == "running" and not job.active:
        last = "".join(job.log.strip().splitlines()[-1:]) if job.state == "interrupted" else ""
        return {**progress, "state": "failed", "text": last or job.error or jobs.GONE}
    return progress
