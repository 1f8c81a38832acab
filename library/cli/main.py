"""The console command `kohya`. Each subcommand imports what it needs only when asked for, so that --help is instant."""

import difflib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.config.json_types import JsonObject
from library.config.problems import Problem

DONE, FAILED, MISUSED, STOPPED = 0, 1, 2, 130


@dataclass(frozen=True)
class Command:
    """A subcommand: what it does in one line, and the function that gets the arguments after its name."""

    about: str
    run: Callable[[list[str]], int]


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand. Returns the exit code: 0 done, 1 it did not work, 2 it was called wrongly."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return DONE
    if argv[0] == "--version":
        print(importlib.metadata.version("kohya-trainer"))
        return DONE
    if argv[0] not in COMMANDS:
        close = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
        return complain(f"there is no command called {argv[0]}.{meant} kohya --help lists all", MISUSED)
    from library.config.problems import ConfigError

    try:
        return COMMANDS[argv[0]].run(argv[1:])
    except ConfigError as wrong:
        return complain(str(wrong), FAILED)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED


def usage() -> str:
    """The help of the command itself."""
    lines = [f"  {name:<9} {command.about}" for name, command in COMMANDS.items()]
    return "\n".join(["kohya COMMAND [options]", "", *lines, "", "kohya COMMAND --help says more about one of them."])


def complain(text: str, code: int) -> int:
    """Say what is wrong, a line each, and hand back the exit code."""
    for line in text.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return code


# ---- the subcommands


def gui(argv: list[str]) -> int:
    """Open the page."""
    from kohya_gui.app import main as page

    return page(argv) or DONE


# Why: docs/decisions/2026-11-20-check-before-launch.md
def train(argv: list[str]) -> int:
    """Check the options here and now, then train with `accelerate launch`; the launcher's exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_with_scripts(TRAIN_USAGE))
        return DONE if argv else MISUSED
    import dataclasses

    from library.cli import train_script
    from library.config.command import command
    from library.families import config_class
    from library.runs import foreground, gpu_slots, keys

    what, *rest = argv
    how, flags, wrong = split_launch(rest)
    if what.lower().endswith(".toml"):
        flags = ["--config_file", what, *flags]
        what = script_of(Path(what))
    # The launcher loads torch for seconds before the script can say what is wrong, so it is asked here first.
    reading = train_script.read(config_class(what), flags)
    if problems := [*reading.problems, *wrong, *gpu_slots.problems(how)]:
        reading = dataclasses.replace(reading, problems=problems)
        return complain("\n".join([*problems, *train_script.beyond(reading)]), MISUSED)
    path, flags = split_file(flags)
    arguments = command(path or "", what, **how)
    os.environ.update(keys.environment())
    return foreground.run([*(arguments if path else arguments[:-2]), *flags])


def _with_scripts(usage: str) -> str:
    from library.families import RUNS

    return usage.replace("[scripts]", ", ".join(RUNS))


TRAIN_USAGE = """kohya train SCRIPT --config_file RUN.toml [options]
kohya train RUN.toml [options]

SCRIPT is one of [scripts]. Options are those of the script
(kohya train SCRIPT --help), and those of the launcher: --num_processes, --gpu_ids, --cpu, --num_machines,
--machine_rank, --main_process_ip, --main_process_port, --num_cpu_threads_per_process."""


def check(argv: list[str]) -> int:
    """Print what is known about a training before a model is loaded; 0 when nothing has to be fixed."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_with_scripts(CHECK_USAGE))
        return DONE if argv else MISUSED
    from library.cli.check import look

    return look(argv)


CHECK_USAGE = """kohya check RUN.toml [options]
kohya check SCRIPT --config_file RUN.toml [options]

Looks for mistakes without training, and names all of them. Options are those of the training and of the launcher, as in
kohya train, and besides:
  --script SCRIPT  what RUN.toml is for ([scripts]);
                   guessed from the file when not given
  --json           print one JSON object instead of text"""


def probe(argv: list[str]) -> int:
    """Try two steps with a config, and say what fits."""
    from library.bench.probe import main as try_out

    return try_out(argv, script_of)


def demo(argv: list[str]) -> int:
    """Make a tiny model and pictures, and train on them."""
    from library.demo import main as make

    return make(argv)


def doctor(argv: list[str]) -> int:
    """Look at this machine."""
    from library.doctor.report import main as examine

    return examine(argv)


def import_(argv: list[str]) -> int:
    """Read the settings of another trainer."""
    from library.cli.import_config import main as read

    return read(argv)


def diff(argv: list[str]) -> int:
    """Compare two files of settings."""
    from library.cli.import_config import diff as compare

    return compare(argv)


def tools(argv: list[str]) -> int:
    """Work on finished LoRA files."""
    from library.tools.shell import main as work

    return work(argv)


def bench(argv: list[str]) -> int:
    """Measure this machine with a model."""
    from library.bench.shell import main as measure

    return measure(argv, script_of)


def caption(argv: list[str]) -> int:
    """Caption images with a model of the user's own."""
    from library.captioning.shell import main as describe

    return describe(argv)


def cache(argv: list[str]) -> int:
    """Show or clean the compiled code that is kept."""
    from library.cli.cache import main as tidy

    return tidy(argv)


COMMANDS = {
    "gui": Command("open the page", gui),
    "train": Command("train with a config, headless", train),
    "check": Command("check a config for errors, without training", check),
    "probe": Command("run two steps of a training, and propose settings that fit into memory", probe),
    "demo": Command("make a tiny model and pictures, and train a LoRA on them", demo),
    "doctor": Command("check this machine: GPU, PyTorch, packages, compiling", doctor),
    "caption": Command("caption images with a local tagger or captioning model", caption),
    "cache": Command("show or clean the cache of compiled code", cache),
    "tools": Command("merge, extract, resize, convert and check LoRA files", tools),
    "import": Command("convert the settings of another trainer into a config", import_),
    "diff": Command("list the differences between two config files", diff),
    "bench": Command("benchmark a model on this machine, compiled and not; --profile shows where the time goes", bench),
}


# ---- their parts


def script_of(path: Path) -> str:
    """Which script a TOML is for: by the file's name, else by the options in it. Raises ConfigError when unclear."""
    from library import importers
    from library.config.schema import ConfigError, load_toml, options, read_toml
    from library.families import RUNS, config_class

    for script in sorted(RUNS, key=len, reverse=True):
        if script in path.stem:
            return script
    given = read_toml(path)
    importers.refuse_data(load_toml(path), path)
    known = {script: set(options(config_class(script))) for script in RUNS}
    # An option that not every script has speaks for those that have it; what is no option anywhere says nothing.
    telling = {name for name in given if any(name in names for names in known.values())}
    is_lora = any(name.startswith("network_") for name in telling)
    fitting = [s for s, names in known.items() if telling <= names and s.endswith("_network") == is_lora]
    if len(fitting) > 1:  # of two families, not the one whose own files are not named
        fitting = [script for script in fitting if _has_its_files(config_class(script), telling, known)]
    if len(fitting) != 1:
        raise ConfigError(f"the training script cannot be told from {path}: name it, {', '.join(RUNS)}")
    return fitting[0]


def _has_its_files(config: Any, given: set[str], known: dict[str, set[str]]) -> bool:
    """Whether the model files that only this family has are named, if there are such."""
    from library.config.schema import options

    others = set().union(*(names for script, names in known.items() if not script.startswith(config.family)))
    own = {o.name for o in options(config).values() if o.section == "model" and o.kind == "file"} - others
    return not own or bool(own & given)


def split_launch(argv: list[str]) -> tuple[JsonObject, list[str], list[Problem]]:
    """The launcher's options by name, the rest, and what is wrong with the former. What both know (mixed_precision) is
    the script's."""
    from library.cli.train_script import take_flags
    from library.config.command import Launch
    from library.config.schema import section_options

    mine = {name: option for name, option in section_options(Launch).items() if name != "mixed_precision"}
    return take_flags(mine, argv)


def split_file(flags: list[str]) -> tuple[str | None, list[str]]:
    """The value of --config_file, and the other flags."""
    for at, flag in enumerate(flags):
        if flag == "--config_file" and at + 1 < len(flags):
            return flags[at + 1], flags[:at] + flags[at + 2 :]
        if flag.startswith("--config_file="):
            return flag.partition("=")[2], flags[:at] + flags[at + 1 :]
    return None, flags


if __name__ == "__main__":
    sys.exit(main())
