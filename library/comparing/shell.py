"""`kohya compare`: find the best saved file of a run, on a GPU that no training uses."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from library import families
from library.comparing import plan
from library.config.arguments import Arguments
from library.config.problems import ConfigError, Problem, collecting
from library.downloads.shell import default_folder
from library.jobs.work import join_work
from library.runs import gpu_slots
from library.runs.gpu_wait import reserve_devices
from library.runs.reader import RecordedRun
from library.sampling.prompts import Prompt
from library.sampling.shell import prompts_to_sample

if TYPE_CHECKING:
    from library.comparing.compute import Comparison

EXIT_DONE = 0


def main(argv: list[str]) -> int:
    """Compare and return 0. Raises ConfigError."""
    arguments = build_compare_parser().parse_args(argv)
    run, prompts = read_inputs(arguments)
    with join_work("compare") as work, reserve_devices({"cpu": arguments.cpu}, work.wait) as devices:
        os.environ.update(gpu_slots.device_environment(devices))
        # Loads torch, which detects GPUs only once.
        compare = families.load_object("library.comparing.work:compare_files")
        comparison = compare(run, arguments, prompts, work)
        for line in comparison_lines(comparison):
            print(line)
    return EXIT_DONE


def build_compare_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    arguments = Arguments(
        "kohya compare",
        description="Compare the files that a run has saved with each other and with the base model, and propose one: "
        "by images with the same seeds, held-out loss, copies of training images, and likeness to them. Waits while a "
        "training uses the GPU.",
    )
    arguments.add_argument(
        "run", nargs="?", default="", metavar="RUN", help="id or folder of a run (default: the newest)"
    )
    arguments.add_argument(
        "--encoder",
        default="",
        metavar="dinov2|clip|FOLDER",
        help="measure likeness with an image encoder; dinov2 (350 MB) and clip (1.7 GB) are downloaded once",
    )
    arguments.add_argument(
        "--files",
        type=int,
        default=plan.MAX_COMPARED_FILES,
        metavar="N",
        help="compare at most this many files, evenly spread",
    )
    arguments.add_argument("--prompt", action="append", default=[], help="what to generate, as a line of a prompt file")
    arguments.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a prompt file; else the prompts of the run's samples, or captions of its data set",
    )
    arguments.add_argument(
        "--seed",
        type=int,
        default=plan.SEED,
        help="for prompts that have none; -1: a random one",
    )
    arguments.add_argument("--into", type=Path, default=default_folder(), metavar="FOLDER", help="folder for encoders")
    arguments.add_argument("--cpu", action="store_true", help="compute on the CPU")
    return arguments


def read_inputs(arguments: argparse.Namespace) -> tuple[RecordedRun, list[Prompt]]:
    """Return the run to compare, and the prompts. Raises ConfigError with the problems of all words."""
    problems: list[Problem] = []
    run, prompts = None, list[Prompt]()
    if arguments.files < 1:
        template = "--files {count}: write how many files are compared at most, such as 8"
        problems.append(Problem("", template, count=arguments.files))
    with collecting(problems):
        prompts = prompts_to_sample(arguments)
    with collecting(problems):
        run = plan.run_of(arguments.run)
        # Loads torch, but asks for no GPU: the wait decides which one it is.
        problems += families.load_object("library.comparing.work:find_problems")(run, arguments, prompts)
    if problems or run is None:
        raise ConfigError(*problems)
    return run, prompts


def comparison_lines(comparison: "Comparison") -> list[str]:
    """Return the printed lines: one per file, the proposal, and what was left out."""
    lines = []
    for at, file in enumerate(comparison.files):
        parts = [str(file.title), file.path.name]
        if (loss := comparison.losses[at]) is not None:
            parts.append(f"loss {loss:.5f}")
        if (likeness := comparison.likeness[at]) is not None:
            parts.append(f"likeness {likeness:.3f}")
        if copied := comparison.copied[at]:
            parts.append(f"copies {len(copied)}")
        lines.append("  ".join(parts))
    if comparison.proposal:
        lines.append(str(comparison.proposal.reason))
    return [*lines, *map(str, comparison.notes), comparison.grid]
