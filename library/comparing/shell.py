"""`kohya compare`: which of the files that a run has saved is best, on a GPU that no training uses."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from library import families
from library.comparing import plan
from library.config.arguments import Arguments
from library.config.problems import ConfigError
from library.downloads.shell import default_folder
from library.jobs.work import joined
from library.runs import gpu_slots
from library.runs.gpu_wait import free_devices
from library.sampling.shell import prompts_of

if TYPE_CHECKING:
    from library.comparing.compute import Comparison

DONE = 0


def main(argv: list[str]) -> int:
    """Compare; 0 when it worked. Raises ConfigError."""
    asked = parser().parse_args(argv)
    if asked.files < 1:
        raise ConfigError("--files {count}: write how many files are compared at most, such as 8", count=asked.files)
    given = prompts_of(asked)
    run = plan.run_of(asked.run)
    with joined("compare") as work, free_devices({"cpu": asked.cpu}, work.wait) as own:
        os.environ.update(gpu_slots.environment(own))
        compare = families.load("library.comparing.work:compare")  # with torch, which looks for GPUs only once
        made = compare(run, asked, given, work)
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
