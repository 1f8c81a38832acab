"""The console command `kohya`. Subcommand modules are imported on demand, so that --help is instant."""

import difflib
import importlib.metadata
import pkgutil
import sys
from dataclasses import dataclass

from library.config import environment, problems
from library.imports import without_collecting

EXIT_DONE, EXIT_FAILED, EXIT_MISUSED, EXIT_STOPPED = 0, 1, 2, 130


@dataclass(frozen=True)
class Command:
    """A subcommand: its description in one line, and the function (`module:name`) that gets its arguments."""

    about: str
    entry: str


COMMANDS = {
    "gui": Command("open the page", "kohya_gui.app:main"),
    "train": Command("train with a config", "library.cli.launch:launch_training"),
    "check": Command("check a config for errors, without training", "library.cli.check:main"),
    "queue": Command("add trainings to the queue, and change it; works without the page", "library.cli.queue:main"),
    "runs": Command("list trainings; stop, save, sample, resume, compare or remove them", "library.cli.runs:main"),
    "probe": Command(
        "run some steps of a training, and propose settings that fit into memory", "library.cli.launch:launch_probe"
    ),
    "demo": Command(
        "train a LoRA of a small model on images that it draws, and show what it learned", "library.demo:main"
    ),
    "doctor": Command("check this machine: GPU, PyTorch, packages, compiling", "library.doctor.report:main"),
    "caption": Command("caption images with a local tagger or captioning model", "library.captioning.shell:main"),
    "mask": Command("make masks for a training with a local segmentation model", "library.masking.shell:main"),
    "cache": Command("encode images or captions of a data set; show or clean compiled code", "library.cli.cache:main"),
    "models": Command("find models on this computer, or download them", "library.downloads.shell:main"),
    "sample": Command("generate images with LoRAs, embeddings or LLLite, side by side", "library.cli.launch:sample"),
    "compare": Command("compare the files that a run has saved, and propose one", "library.comparing.shell:main"),
    "tools": Command("merge, extract, resize, convert and check LoRA files", "library.tools.shell:main"),
    "preset": Command(
        "list the presets, or write one as a config, by purpose and number of images", "library.recipes.shell:main"
    ),
    "import": Command("convert the settings of another trainer into a config", "library.cli.import_config:main"),
    "diff": Command("list the differences between two config files", "library.cli.import_config:diff"),
    "bench": Command(
        "benchmark a model on this machine, compiled and not; --profile shows where the time goes",
        "library.cli.launch:launch_bench",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand. Returns the exit code: 0 success, 1 failure, 2 wrong usage."""
    environment.print_any_text()
    with environment.reader_may_leave():
        return _run_command(sys.argv[1:] if argv is None else argv)
    return EXIT_DONE


def _run_command(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(command_usage())
        return EXIT_DONE
    if argv[0] == "--version":
        print(importlib.metadata.version("kohya-trainer"))
        return EXIT_DONE
    if argv[0] not in COMMANDS:
        close = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        suggestion = f" Did you mean {close[0]}?" if close else ""
        return complain(f"there is no command called {argv[0]}.{suggestion} kohya --help lists all", EXIT_MISUSED)
    try:
        with without_collecting():
            entry = pkgutil.resolve_name(COMMANDS[argv[0]].entry)
        return entry(argv[1:])
    except problems.ConfigError as error:
        return complain(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_STOPPED


def command_usage() -> str:
    lines = [f"  {name:<9} {command.about}" for name, command in COMMANDS.items()]
    return "\n".join(["kohya COMMAND [options]", "", *lines, "", "kohya COMMAND --help says more about one of them."])


def complain(text: str, code: int) -> int:
    """Print what is wrong, a line each, and return the exit code."""
    for line in text.splitlines():
        print(f"error: {problems.printable_text(line)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
