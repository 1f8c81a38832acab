"""Configs over HTTP: check them, queue them, import those of other trainers, and read presets."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from kohya_gui.api import queue_routes
from kohya_gui.api.answers import Answer, Body, Sentence, answer
from kohya_gui.form import presets
from kohya_gui.server import paths
from library import importers
from library.check import isolated
from library.config.building import Layer, Reading, find_missing, read_layers
from library.config.formats import read_toml, to_toml
from library.config.outside_files import parse_toml
from library.config.problems import ConfigError, Problem
from library.config.schema import flatten_sections
from library.families import RUNS, config_class
from library.recipes import preset_files
from library.runs import gpu_slots, queue
from library.trainings import adding

MAX_TEXT = 1_000_000  # maximum characters of a config


class TrainingBody(Body):
    """A training: its script, its options as JSON or as TOML, and how it is launched."""

    script: str = Field(description=f"One of {', '.join(RUNS)}")
    config: dict[str, Any] = Field({}, description="Options by name, or by section; they override the TOML")
    toml: str = Field("", max_length=MAX_TEXT, description="A config file's text")
    launch: dict[str, Any] = Field({}, description="num_processes, gpu_ids, cpu and the like")


class EntryBody(TrainingBody):
    """A training to add to the queue."""

    first: bool = Field(False, description="Before all others that wait")
    without_captions: bool = Field(False, description="Also if no image has a caption, or caption files are not read")


class OneFinding(BaseModel):
    """One line of a check."""

    text: Sentence
    option: str
    topic: str
    verdict: str = Field(description="bad: to be fixed; hint: a remark; ok: what was found")
    fix: dict[str, Any] = Field(description="Values by option that would solve it")


class CheckReport(Answer):
    """What a check has found; nothing is to be fixed if none is bad."""

    good: bool
    findings: list[OneFinding]
    fit: dict[str, Any] | None = Field(description="The estimate: peak (GiB), step (seconds) and what it rests on")
    steps: int | None


class ImportBody(Body):
    """The settings of another trainer, or of this one."""

    name: str = Field(max_length=200, description="The name of the file, whose ending tells its format")
    text: str = Field(max_length=MAX_TEXT)
    script: str = Field("", description="The training script, if the file does not tell it")


class ImportedConfig(Answer):
    """A config for this trainer, and the outcome of every key."""

    trainer: str
    script: str
    guessed: Sentence
    toml: str
    settings: dict[str, Any]
    keys: list[dict[str, Any]]
    notes: list[Sentence]
    to_fix: list[Sentence]
    files: dict[str, str] = Field(description="Texts that the config names and that have to be files")


class PresetAbout(BaseModel):
    """A preset of this trainer."""

    id: str
    family: str
    kind: str = Field(description="lora, finetune, textual-inversion, lllite; empty for a way of compiling")
    gigabytes: int = Field(description="The GPU memory that it is made for, 0 for any")
    title: Sentence
    sentence: str


class PresetList(Answer):
    """Presets, by family, kind and memory."""

    presets: list[PresetAbout]


class PresetValues(Answer):
    """A preset with its options."""

    preset: PresetAbout
    values: dict[str, Any]
    toml: str


def read_training(body: TrainingBody, roots: Sequence[Path]) -> Reading[Any]:
    """Return the reading of a training about to start, with all its problems; files outside `roots` are problems,
    too."""
    if body.script not in RUNS:
        scripts = ", ".join(RUNS)
        raise ConfigError(
            Problem("script", ": {script} is not a script: choose one of {known}", script=body.script, known=scripts)
        )
    values = {**flatten_sections(parse_toml(body.toml, "toml")), **flatten_sections(body.config)}
    reading = read_layers(config_class(body.script), [Layer(values)])
    problems = [*reading.problems, *gpu_slots.find_launch_problems(body.launch)]
    named = reading.wrong.union(*(problem.options for problem in problems))
    problems += [problem for problem in find_missing(reading.config) if problem.option not in named]
    return paths.within_roots(replace(reading, problems=problems), roots)


def router(roots: Sequence[Path]) -> APIRouter:
    """Return the routes of configs."""
    routes = APIRouter()

    @routes.post(
        "/check", operation_id="check", tags=["configs"], summary="Check a training", response_model=CheckReport
    )
    def check(body: TrainingBody) -> Any:
        reading = read_training(body, roots)
        report = isolated.check_reading(reading, body.launch)
        findings = [_finding(finding) for finding in report["findings"]]
        good = not isolated.findings_to_fix(report)
        return answer(CheckReport, good=good, findings=findings, fit=report.get("fit"), steps=report.get("steps"))

    @routes.post(
        "/queue/add",
        operation_id="add_entry",
        tags=["queue"],
        summary="Check a training and add it to the queue",
        response_model=queue_routes.Queue,
    )
    def add_entry(body: EntryBody) -> Any:
        reading = read_training(body, roots)
        added = adding.check_and_add(reading, body.launch, body.first, body.without_captions)
        return queue_routes.show_queue(added.said, added.entry.id)

    @routes.post(
        "/import",
        operation_id="import_config",
        tags=["configs"],
        summary="Convert the settings of another trainer",
        response_model=ImportedConfig,
    )
    def import_config(body: ImportBody) -> Any:
        return _imported(body, roots)

    _add_presets(routes)
    return routes


def _finding(finding: Any) -> Any:
    return {name: finding.get(name) or default for name, default in _NOTHING.items()}


_NOTHING: dict[str, Any] = {"text": "", "option": "", "topic": "", "verdict": "", "fix": {}}


def _imported(body: ImportBody, roots: Sequence[Path]) -> Any:
    """Return the answer to an import. The file exists only while it is read."""
    name = paths.plain_name(body.name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(body.text, encoding="utf-8", newline="")
        configs = {script: config_class(script) for script in RUNS}
        may_read = presets.readable_below(roots)
        try:
            imported = importers.import_file(path, configs, body.script, may_read=may_read)
        except ConfigError as error:
            shorter = [p.replaced(path=name) if "path" in p.arguments else p for p in error.problems]
            raise ConfigError(*shorter) from None
    account = imported.account()
    to_fix = account.pop("problems")
    toml = to_toml(imported.config, presets.comment(imported.config))
    return answer(ImportedConfig, **{**account, "guessed": account["guessed"] or ""}, to_fix=to_fix, toml=toml)


def _add_presets(routes: APIRouter) -> None:
    tags: list[Any] = ["presets"]

    @routes.get("/presets", operation_id="list_presets", tags=tags, summary="List presets", response_model=PresetList)
    def list_presets(
        family: Annotated[str, Query(description="Only those of this family")] = "",
        kind: Annotated[str, Query(description="Only those of this kind of training")] = "",
    ) -> Any:
        listed = [p for p in preset_files.all_presets() if family in ("", p.family) and kind in ("", p.kind)]
        return answer(PresetList, presets=[_about(preset) for preset in listed])

    @routes.get(
        "/presets/{family}/{name}",
        operation_id="show_preset",
        tags=tags,
        summary="Show a preset",
        response_model=PresetValues,
    )
    def show_preset(family: str, name: str) -> Any:
        preset = preset_files.by_id(f"{family}/{name}")
        if preset is None:
            template = "There is no preset called {name}."
            raise ConfigError(Problem("", template, name=f"{family}/{name}", code=queue.GONE))
        toml = preset.path.read_text(encoding="utf-8")
        return answer(PresetValues, preset=_about(preset), values=read_toml(preset.path), toml=toml)


def _about(preset: preset_files.Preset) -> Any:
    return {name: getattr(preset, name) for name in PresetAbout.model_fields}
