"""Every problem that can be known before a model is loaded, reported at once."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from library import data, families, methods
from library.check import (
    adapter_files,
    graph_limit,
    machine,
    meta_model,
    sample_prompts,
    training_length,
)
from library.config import building, code_names, ineffective, schema
from library.config.environment import first_process, process_count
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Problem, as_problems, raise_if_any
from library.config.run_config import RunConfig
from library.data import debug_dataset, text_encoding
from library.families import recognition
from library.families.base import Family
from library.files import blocking_path, free_space
from library.methods import lycoris
from library.optim import optimizers
from library.outputs import hub, metadata, paths, trackers, written_paths
from library.runs import reader, registry
from library.runs.record import Record
from library.train.journal import Progress
from library.train.saving import base_files, resume_check

# Options that rules of the config cover: for them, these stages would repeat the problem.
RULED_STAGES = ("images", "model", "length")
RULED_OPTIONS = {"resolution", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "model_type", "initial_step"}
# Options with which everything is trained.
RATE_DEFAULTS: JsonObject = {"learning_rate": 1e-4, "unet_lr": None, "text_encoder_lr": (), "block_lr": None}
PROGRESS_DELAY = 2.0  # seconds after which scanning the images reports progress
NEEDED_TO_FIT = ("model", "network", "other adapters")  # stages required before parts are checked together
NEEDED_FOR_GRAPHS = ("model", "images", "machine")  # stages required before graphs are counted
# Which weights there are depends on these: no parts are checked together if one is wrong.
SHAPE_OPTIONS = {
    "network_dim",
    "network_args",
    "network_module",
    "dim_from_weights",
    "network_train_unet_only",
    "network_train_text_encoder_only",
    "train_text_encoder",
    "assistant_lora",
}
MIN_SPACE = 64 * 2**20  # bytes, less than any result needs


def check_before_training(config: RunConfig) -> list[Problem]:
    """Raise ConfigError with every problem of this run; return remarks for its user."""
    images = data.check_data(config, config.grid, Progress(print, PROGRESS_DELAY) if first_process() else None)
    problems, remarks = evaluate(config, images)
    raise_if_any(problems)
    if images.masks and first_process():
        print(images.masks)
    return remarks


def print_dataset(config: RunConfig) -> None:
    """Print the data that a training would use, and train nothing (`debug_dataset`). Raises ConfigError for invalid
    data.

    Only a run prepared by the page leaves anything behind: its folder, marked as finished.
    """
    if not first_process():
        return
    page = contextlib.nullcontext()
    if os.environ.get("KOHYA_RUN_DIR"):
        page = Record.start(schema.changed(config), config.script, config.save.output_dir or ".", "", config.title)
    with page, contextlib.suppress(BrokenPipeError):  # the reader of the output may stop early
        for line in debug_dataset.dataset_lines(config, config.steps.seed or 0):
            print(line)


def load_named_code(config: RunConfig) -> None:
    """Import the code of unlisted packages, which a check does not touch. Raises ConfigError for code of the wrong
    kind.
    """
    problems = [*optimizers.named_code_problems(config)]
    try:
        if name := code_names.unlisted(config).get("network_module"):
            lycoris.load_module(name)
    except ConfigError as e:
        problems += e.problems
    raise_if_any(problems)


def code_notes(config: RunConfig) -> list[Problem]:
    template = "{name} is code of a package that this program does not list; it runs when the training starts"
    return [Problem(option, template, name=name) for option, name in code_names.unlisted(config).items()]


def scan_images(reading: building.Reading[Any]) -> data.Check:
    """Scan the images of a config that may itself be invalid."""
    nothing = data.Check([], [])
    with _collect_errors(bool(reading.problems), nothing.problems):
        return data.check_data(reading.config, reading.config.grid, quick=True)
    return nothing


def evaluate(
    config: RunConfig, images: data.Check, reading: building.Reading[Any] | None = None
) -> tuple[list[Problem], list[Problem]]:
    """Return problems and remarks, given the result of `data.check`.

    Problems found when reading the config are not repeated, and their consequences are left out.
    """
    earlier, wrong = (reading.problems, reading.wrong) if reading else ([], frozenset())
    config = base_files.with_local_files(config)
    unreachable, announced = base_files.remote_files(config)
    named_options = wrong.union(*(problem.options for problem in earlier))
    missing = building.find_missing(config)
    missing_options = {problem.option for problem in missing}  # report a missing value only once
    new_problems = [problem for problem in missing if problem.option not in named_options]

    def is_new(problem: Problem, stage: str) -> bool:
        if stage in RULED_STAGES and problem.option in RULED_OPTIONS & named_options:
            return False
        if problem in (*earlier, *new_problems) or problem.option in missing_options:
            return False
        return wrong.isdisjoint(problem.options)

    failed: dict[str, bool] = {}
    for stage, find in _stages(config, images, unreachable, wrong, failed).items():
        stage_problems: list[Problem] = []
        with _collect_errors(bool(earlier), stage_problems):
            stage_problems += as_problems(find())
        failed[stage] = bool(stage_problems)
        for problem in stage_problems:
            if is_new(problem, stage):
                new_problems.append(problem)

    remarks: list[MessageLike] = [*images.warnings, *code_notes(config), *announced]
    if not failed["length"]:
        remarks += training_length.length_notes(config, images)
    # Notes on unreadable parts would only raise errors.
    with _collect_errors(bool(earlier), []):
        for remark in _find_remarks(config, images, failed, earlier, new_problems):
            remarks.append(remark)
        remarks += ineffective.remarks(config, [*earlier, *new_problems, *remarks, *building.config_notes(config)])
    return new_problems, [remark for remark in as_problems(remarks) if wrong.isdisjoint(remark.options)]


def _stages(
    config: RunConfig,
    images: data.Check,
    unreachable: Sequence[Problem],
    wrong: Collection[str],
    failed: Mapping[str, bool],
) -> dict[str, Callable[[], Iterable[MessageLike]]]:
    """Return the checks in the order of their reports. The caller adds to `failed` while it runs them, as the last ones
    depend on earlier ones.
    """
    return {
        "model": lambda: families.family_for(config).problems(),
        "images": lambda: images.problems,
        "length": lambda: training_length.length_problems(config, images),
        "network": lambda: [*methods.find_method_problems(config), *unreachable],
        "optimizer": lambda: optimizers.find_optimizer_problems(config),
        "save": lambda: paths.find_output_problems(config),
        "writable": lambda: written_paths.find_written_path_problems(config),
        "space": lambda: _check_disk_space(config),
        "alone": lambda: _check_other_trainings(config),
        "samples": lambda: sample_prompts.unusable_prompts(config),
        "machine": lambda: machine.find_machine_problems(config),
        "hub": lambda: hub.find_upload_problems(config),
        "trackers": lambda: trackers.find_tracker_problems(config),
        "resume": lambda: _check_resumed_state(config),
        "other adapters": lambda: adapter_files.find_adapter_problems(config),
        "rates": lambda: optimizers.zero_rate_problems(config),
        "graphs": lambda: _find_graph_problems(config, images, failed) if config.compile.compile_fullgraph else [],
        "values": lambda: [] if failed["other adapters"] else adapter_files.find_damaged_values(config),
        "fit": lambda: _find_mismatches(config, wrong, failed),
    }


def _find_remarks(
    config: RunConfig,
    images: data.Check,
    failed: Mapping[str, bool],
    earlier: Sequence[Problem],
    new_problems: Sequence[Problem],
) -> Iterator[MessageLike]:
    """Yield remarks on the parts whose checks passed."""
    family = families.family_for(config)
    if not failed["model"]:
        yield from family.notes()
        yield from _check_caption_lengths(family, images)
        yield from meta_model.find_idle_rounding(config)
        yield from meta_model.find_second_rounding(config)
    model = config.model.pretrained_model_name_or_path or ""
    yield from recognition.find_name_notes(config.family, model, asdict(config.model))
    if not failed["length"] and all(problem.option != "resume" for problem in new_problems):
        yield from _find_changed_options(config, images)
    if not failed["network"]:
        yield from methods.method_notes(config)
    if not failed["model"] and not failed["other adapters"]:
        yield from adapter_files.find_relative_notes(config)
    if not config.compile.compile_fullgraph:
        yield from _find_graph_problems(config, images, failed)
    if not failed["optimizer"]:
        yield from optimizers.optimizer_notes(config, families.facts_of(config.family).trained_in_compute_dtype)
    if not failed["samples"]:
        yield from sample_prompts.idle_prompts(config, family)
    yield from metadata.thumbnail_notes(config.metadata.metadata_thumbnail)
    if unlisted := registry.unusable():
        yield unlisted
    with_problems = {problem.option for problem in (*earlier, *new_problems)}
    for remark in machine.find_machine_notes(config):
        if remark.option not in with_problems:
            yield remark


@contextlib.contextmanager
def _collect_errors(is_invalid: bool, problems: list[Problem]) -> Iterator[None]:
    """Collect the problems that a check raises. If the config is known to be invalid, a check may fail in any way over
    contradictory values, which is ignored; it runs again once they are fixed.
    """
    try:
        yield
    except ConfigError as e:
        problems += e.problems
    except Exception:
        if not is_invalid:
            raise


def _find_mismatches(config: RunConfig, wrong: Collection[str], failed: Mapping[str, bool]) -> Iterator[Problem]:
    """Yield mismatches between parts that are valid by themselves."""
    if any(map(failed.get, NEEDED_TO_FIT)) or not SHAPE_OPTIONS.isdisjoint(wrong):
        return
    config = base_files.without_remote_files(config)
    if failed["resume"]:
        config = replace(config, steps=replace(config.steps, resume=None))
    if failed["rates"]:  # pretend that something is trained
        rates = {name: rate for name, rate in RATE_DEFAULTS.items() if hasattr(config.optim, name)}
        config = replace(config, optim=replace(config.optim, **rates))
    yield from meta_model.find_model_file_problems(config)


def _find_graph_problems(config: RunConfig, images: data.Check, failed: Mapping[str, bool]) -> Iterator[Problem]:
    # An error with compile_fullgraph; otherwise blocks only run more slowly.
    if not any(map(failed.get, NEEDED_FOR_GRAPHS)):
        yield from graph_limit.find_graph_limit_problems(config, images.images, machine.training_device())


def _check_caption_lengths(family: Family, images: data.Check) -> Iterator[Problem]:
    """Remark on captions longer than the text encoder reads; nothing without its tokenizer."""
    with contextlib.suppress(ConfigError):
        variants = family.config.cache.cached_caption_variants if family.config.cache.text else 1
        yield from text_encoding.cut_captions(images.images.items if images.images else (), family, variants)


def _check_resumed_state(config: RunConfig) -> Iterator[Problem]:
    if config.steps.resume and not config.steps.resume_from_huggingface:
        yield from resume_check.problems(Path(config.steps.resume), config)


def _find_changed_options(config: RunConfig, images: data.Check) -> list[Problem]:
    """Return remarks on options that differ from the training that is resumed."""
    if not config.steps.resume or config.steps.resume_from_huggingface:
        return []
    steps = training_length.expected_length(config, images)
    is_single_process = process_count() == 1  # several processes share an epoch
    return resume_check.changes(config, steps.total if steps and is_single_process else None)


def _check_disk_space(config: RunConfig) -> Iterator[Problem]:
    if not config.save.output_dir:
        return
    folder = Path(config.save.output_dir).absolute()
    blocking = blocking_path(folder)
    if blocking and blocking.is_dir():
        yield Problem("output_dir", ": {folder} cannot be written to; choose another folder", folder=blocking)
    elif (left := free_space(folder)) < MIN_SPACE:
        template = (
            ": the disk of {folder} is full: {left} MB left, {least} MB needed; make room, or choose another folder"
        )
        yield Problem("output_dir", template, folder=folder, left=left >> 20, least=MIN_SPACE >> 20)


def _check_other_trainings(config: RunConfig) -> Iterator[Problem]:
    """Reject a second training that would overwrite another's files."""
    if not config.save.output_dir or not first_process():  # other processes belong to the same run
        return
    for folder in (Path(config.save.output_dir) / "runs").glob("*"):
        run = reader.run_at(folder)
        is_this_run = os.environ.get("KOHYA_RUN_DIR") == str(folder.absolute())
        if run.active and not is_this_run and run.facts.get("output_name") == config.save.output_name:
            template = ": a training that writes these files is {state}; stop it, or choose another name"
            yield Problem("output_name", template, state=Message(run.state), fix=paths.free_output_name(config))
