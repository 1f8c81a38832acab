"""`kohya compare`: which of the files that a run has saved is best, on a GPU that no training uses."""

import argparse
import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from library.comparing import plan
from library.config.arguments import Arguments
from library.config.problems import ConfigError
from library.downloads.shell import default_folder
from library.files import clear_errors
from library.outputs.prompts import Prompt
from library.runs import gpu_slots, reader
from library.runs.gpu_wait import free_devices
from library.runs.job_work import JobRecord, joined
from library.sampling.plan import check_size
from library.sampling.shell import prompts_of

if TYPE_CHECKING:
    from library.comparing.compute import Comparison

DONE = 0
FOLDER = "compare"


def main(argv: list[str]) -> int:
    """Compare; 0 when it worked. Raises ConfigError."""
    asked = parser().parse_args(argv)
    if asked.files < 1:
        raise ConfigError("--files {count}: write how many files are compared at most, such as 8", count=asked.files)
    given = prompts_of(asked)
    run = plan.run_of(asked.run)
    with joined("compare") as work, free_devices({"cpu": asked.cpu}, work.wait) as own:
        os.environ.update(gpu_slots.environment(own))
        made = _compared(run, asked, given, work)
        for line in lines(made):
            print(line)
    return DONE


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = Arguments(
        "kohya compare",
        description="Compare the files that a run has saved: pictures with the same seeds, held-out loss, likeness to "
        "the training pictures, copies of them, and which file to take. Waits while a training uses the GPU.",
    )
    made.add_argument("run", nargs="?", default="", metavar="RUN", help="a run's id or folder; else the newest one")
    made.add_argument(
        "--encoder",
        default="",
        metavar="dinov2|clip|FOLDER",
        help="measure likeness with an image encoder; dinov2 (350 MB) and clip (1.7 GB) are downloaded once",
    )
    made.add_argument(
        "--files", type=int, default=plan.MOST, metavar="N", help="most files, evenly spread (default: %(default)s)"
    )
    made.add_argument("--prompt", action="append", default=[], help="what to generate, as a line of a prompt file")
    made.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a prompt file; else the prompts of the run's samples, or captions of its data set",
    )
    made.add_argument("--seed", type=int, default=plan.SEED, help="for prompts that have none (default: %(default)s)")
    made.add_argument("--into", type=Path, default=default_folder(), metavar="FOLDER", help="where encoders are kept")
    made.add_argument("--cpu", action="store_true", help="compute on the processor")
    return made


def _compared(run: reader.RecordedRun, asked: argparse.Namespace, given: list[Prompt], work: JobRecord) -> "Comparison":
    """All that can be wrong is found before the model is loaded."""
    from library.comparing import compute, encoder  # with torch, which looks for GPUs only once
    from library.sampling import generate

    with _started_in(run):
        config = plan.config_of(run)
        files, notes = plan.files_of(run, asked.files)
        files, damaged = compute.sound(files, config)
        place = encoder.folder_of(asked.encoder, asked.into, work.phase) if asked.encoder else None
        eye = encoder.ImageEncoder(place) if place else None
        images, unread = compute.survey(config, work.phase)
        prompts = given or plan.prompts_of(run, config) or compute.caption_prompts(images)
        prompts = plan.with_seed(prompts, asked.seed)
        check_size(len(files), prompts)
        generate.check_before(plan.model_config(config, None if config.adapters else files[0].path), prompts)
        folder = new_folder(run.folder)
        made = compute.Comparison(run.id, folder, files, [*notes, *damaged, *unread])

        def store(one: "Comparison") -> None:
            work.store(one.as_json())

        return compute.FileComparer(config, images, prompts, made, work.phase, store)(eye)


def _started_in(run: reader.RecordedRun) -> contextlib.AbstractContextManager[object]:
    """The folder that a run was started in, where its relative paths begin."""
    folder = Path(str(run.facts.get("folder") or "."))
    return contextlib.chdir(folder) if folder.is_dir() else contextlib.nullcontext()


def new_folder(run: Path) -> Path:
    """A folder of this comparison in that of the run. Raises ConfigError where none can be made."""
    name = f"{FOLDER}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(100):
        place = run / (f"{name}-{number}" if number else name)
        with clear_errors(place), contextlib.suppress(FileExistsError):
            place.mkdir()
            return place
    raise ConfigError("{folder} already exists: delete it, or try again later", folder=run / name)


def lines(made: "Comparison") -> list[str]:
    """What is printed: a line for each file, the proposal, and what was left out."""
    said = []
    for at, file in enumerate(made.files):
        parts = [str(file.title), file.path.name]
        if (loss := made.losses[at]) is not None:
            parts.append(f"loss {loss:.5f}")
        if (likeness := made.likeness[at]) is not None:
            parts.append(f"likeness {likeness:.3f}")
        if copied := made.copied[at]:
            parts.append(f"copies {len(copied)}")
        said.append("  ".join(parts))
    if made.proposal:
        said.append(str(made.proposal.reason))
    return [*said, *map(str, made.notes), made.grid]
