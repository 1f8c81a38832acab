"""One comparison from a run to its stored result. Importing this loads torch."""

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from library.adapter_files.storage import silent
from library.comparing import compute, encoder, plan
from library.comparing.compute import Comparison
from library.comparing.plan import SavedFile
from library.config.problems import ConfigError, Message, Problem, Report, collecting
from library.config.run_config import RunConfig
from library.downloads import hub_files
from library.families.shared import tokenizers
from library.files import clear_errors
from library.jobs.work import JobRecord, progress_line
from library.runs import reader
from library.sampling import generate
from library.sampling.plan import check_image_count, with_one_seed
from library.sampling.prompts import Prompt
from library.train.saving import base_files

COMPARE_FOLDER = "compare"


def compare_files(
    run: reader.RecordedRun, arguments: argparse.Namespace, requested_prompts: list[Prompt], work: JobRecord
) -> Comparison:
    """Compare the files of a run with the options of the command line. Finds mistakes before loading the model."""
    report: Report = work.phase if work.folder else progress_line()
    config = plan.config_of_run(run)
    plan.saved_files_of_run(run, arguments.files)  # before an encoder is downloaded
    weights_folder = encoder.encoder_folder(arguments.encoder, arguments.into, report) if arguments.encoder else None
    eye = encoder.ImageEncoder(weights_folder) if weights_folder else None
    with _change_to_start_folder(run), tokenizers.trained_from(config.model.pretrained_model_name_or_path):
        files, notes = plan.saved_files_of_run(run, arguments.files)
        files, damaged = compute.readable_files(files, config)
        images, unread = compute.survey_run_images(config, report)
        prompts = (
            requested_prompts
            or plan.prompts_of_run(run, config)
            or compute.caption_prompts(images, config.control_images)
        )
        prompts = with_one_seed(prompts, arguments.seed)
        base, without_base = _base_model(config, prompts)
        check_image_count(len(base) + len(files), prompts)
        generate.check_before(plan.model_config(config, None if config.adapters else files[0].path), prompts)
        config = hub_files.with_local_lora(config, "sample_lora", hub_files.find_or_download(report))
        config = base_files.with_all_files(config, report)
        folder = new_folder(run.folder)
        comparison = Comparison(run.id, folder, [*base, *files], [*notes, *damaged, *unread, *without_base])

        def store(current: Comparison) -> None:
            work.store(current.as_json())

        return compute.FileComparer(config, images, prompts, comparison, report, store)(eye)


def _base_model(config: RunConfig, prompts: list[Prompt]) -> tuple[list[SavedFile], list[Message]]:
    """Return the model that a run started from; a note instead if it cannot be opened, which only a whole model does
    without.
    """
    problems = () if config.adapters else [*generate.find_problems(plan.model_config(config), prompts)]
    for problem in problems:
        return [], [Message("The base model is left out ({why}).", why=problem)]
    return [plan.base_of_run(config)], []


def find_problems(
    run: reader.RecordedRun, arguments: argparse.Namespace, requested_prompts: list[Prompt]
) -> Iterator[Problem]:
    """Yield everything that would end the comparison of a run before its first image: what its record, saved files,
    encoder, prompts and model lack. Asks for no GPU, and downloads nothing.
    """
    problems: list[Problem] = []
    with collecting(problems):
        encoder.check_name(arguments.encoder)
    files: list[SavedFile] = []
    with collecting(problems):
        files, _ = plan.saved_files_of_run(run, max(arguments.files, 1))
    with collecting(problems):
        config = plan.config_of_run(run)
        with _change_to_start_folder(run), tokenizers.trained_from(config.model.pretrained_model_name_or_path):
            problems += _find_in_config(config, run, files, requested_prompts)
    yield from problems


def _find_in_config(
    config: RunConfig, run: reader.RecordedRun, files: list[SavedFile], requested_prompts: list[Prompt]
) -> list[Problem]:
    problems: list[Problem] = []
    if files:
        with collecting(problems):
            files, _ = compute.readable_files(files, config)
    prompts = requested_prompts
    with collecting(problems):
        prompts = prompts or plan.prompts_of_run(run, config) or _prompts_of_captions(config)
        check_image_count(len(_base_model(config, prompts)[0]) + len(files), prompts)
    with collecting(problems):
        opened = plan.model_config(config, None if config.adapters or not files else files[0].path)
        problems += generate.find_problems(opened, prompts)
    return problems


def _prompts_of_captions(config: RunConfig) -> list[Prompt]:
    images, unread = compute.survey_run_images(config, silent)
    if unread:
        raise ConfigError("there are no prompts, and no captions to take them from ({why})", why=unread[0])
    return compute.caption_prompts(images, config.control_images)


def _change_to_start_folder(run: reader.RecordedRun) -> contextlib.AbstractContextManager[object]:
    folder = Path(str(run.facts.get("folder") or "."))
    return contextlib.chdir(folder) if folder.is_dir() else contextlib.nullcontext()


def new_folder(run: Path) -> Path:
    """Create a folder for this comparison in the run's folder. Raises ConfigError on failure."""
    name = f"{COMPARE_FOLDER}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(100):
        candidate = run / (f"{name}-{number}" if number else name)
        with clear_errors(candidate), contextlib.suppress(FileExistsError):
            candidate.mkdir()
            return candidate
    raise ConfigError("{folder} already exists: delete it, or try again later", folder=run / name)
