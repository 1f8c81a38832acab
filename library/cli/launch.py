"""`kohya train`, `probe` and `bench`: find the script of a TOML, and separate the launcher's options from the
training's.
"""

import contextlib
import dataclasses
import textwrap
import time
from pathlib import Path

from library import importers
from library.bench import shell
from library.cli import train_script
from library.cli.main import EXIT_DONE, EXIT_MISUSED, complain
from library.config.building import Layer, read_layers
from library.config.command import Launch
from library.config.formats import read_toml
from library.config.json_types import JsonObject
from library.config.outside_files import load_toml
from library.config.pasted import expand_home, strip_pasted
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig, configs_of_kind
from library.config.schema import options_of, section_options
from library.downloads.finding import MODEL_OPTION
from library.families import RUNS, config_class, recognition
from library.recipes.preset_files import path_today
from library.runs import foreground, gpu_slots, keys, watching
from library.runs.launcher import launch_command
from library.sampling import shell as sampling

SCRIPTS = textwrap.fill(", ".join(RUNS), 100, initial_indent="  ", subsequent_indent="  ")
LAUNCH_FLAGS = {name: option for name, option in section_options(Launch).items() if name != "mixed_precision"}
TRAIN_USAGE = f"""kohya train SCRIPT --config_file RUN.toml [options]
kohya train [SCRIPT] RUN.toml [options]

SCRIPT is one of:
{SCRIPTS}.

Options are those of the script (kohya train SCRIPT --help), and those of the launcher: --num_processes, --gpu_ids,
--cpu, --num_machines, --machine_rank, --main_process_ip, --main_process_port, --num_cpu_threads_per_process."""


# `accelerate launch` loads torch for seconds before a script could report a wrong flag.
# Why: docs/decisions/2026-11-20-check-before-launch.md
def launch_training(argv: list[str]) -> int:
    """Check the options here, then train; return the exit code of the training or of its launcher."""
    if not argv or argv[0] in ("-h", "--help"):
        print(TRAIN_USAGE)
        return EXIT_DONE if argv else EXIT_MISUSED
    target, tokens = file_or_word(argv[0]), argv[1:]
    launch_options, flags, launch_problems = split_launch(tokens)
    if target.lower().endswith(".toml"):
        flags = ["--config_file", target, *flags]
        target = script_of_toml(Path(target))
    flags = with_config(flags)
    # Check here first, as a launcher loads torch for seconds before the script can report mistakes.
    reading = train_script.read_command_line(config_class(target), flags, LAUNCH_FLAGS)
    if problems := [*reading.problems, *launch_problems, *gpu_slots.find_launch_problems(launch_options)]:
        reading = dataclasses.replace(reading, problems=problems)
        return complain("\n".join(map(str, [*problems, *train_script.problems_beyond_reading(reading)])), EXIT_MISUSED)
    path, flags = split_file(flags)
    arguments, variables = launch_command(path or "", target, **launch_options)
    start = time.time()
    code = foreground.run_in_foreground(
        [*(arguments if path else arguments[:-2]), *flags], variables | keys.key_environment()
    )
    if code:  # a training that was killed could not tell it
        watching.tell_ends_since(start)
    return code


def launch_probe(argv: list[str]) -> int:
    """Try a few steps with a config, and report what fits."""
    from library.bench.probe import main  # loads torch

    return main(argv, script_of_toml)


def launch_bench(argv: list[str]) -> int:
    return shell.main(argv, script_of_toml)


def sample(argv: list[str]) -> int:
    return sampling.main(argv, script_of_toml)


def script_of_toml(path: Path) -> str:
    """Return the script of a TOML: by its first line, as in our own files, else by the file's name, else by its
    options. Raises ConfigError if unclear.
    """
    path = path_today(path)
    if script := importers.script_in_name(path, {script: config_class(script) for script in RUNS}):
        return script
    values = read_toml(path)
    importers.refuse_dataset(load_toml(path), path)
    options_by_script = {script: set(options_of(config_class(script))) for script in RUNS}
    # An option that only some scripts have points to these scripts; unknown names are no evidence.
    telling = {name for name in values if any(name in names for names in options_by_script.values())}
    candidates = configs_of_kind(telling, {script: config_class(script) for script in RUNS})
    fitting = [script for script in candidates if telling <= options_by_script[script]]
    if len(fitting) > 1:  # prefer the family whose own files are named
        shared = set[str].intersection(*(options_by_script[script] for script in fitting))
        fitting = [script for script in fitting if _has_its_files(config_class(script), telling, shared)]
        of_all = set[str].intersection(*options_by_script.values())
        fitting = _with_family_of_model(fitting, values.get(MODEL_OPTION), of_all)
    if len(fitting) > 1:  # exclude scripts that reject the value of an option
        fitting = [script for script in fitting if not read_layers(config_class(script), [Layer(values)]).wrong]
    of_first = config_class(fitting[0]).family if fitting else ""
    if all(config_class(script).family.startswith(of_first) for script in fitting):
        fitting = fitting[:1]  # the others are later versions of its family, whose files say what they are, as ours do
    if len(fitting) != 1:
        template = "the training script cannot be told from {path}: name it, {runs}"
        raise ConfigError(template, path=path, runs=", ".join(RUNS))
    return fitting[0]


def _has_its_files(config: type[RunConfig], set_options: set[str], shared: set[str]) -> bool:
    file_options = {o.name for o in options_of(config).values() if o.section == "model" and o.kind == "file"} - shared
    return not file_options or bool(file_options & set_options)


def _with_family_of_model(scripts: list[str], model: object, of_all: set[str]) -> list[str]:
    """Return the scripts for the base model if its file is on this machine, else those of the first family, if none of
    these families has options for files that are not `of_all`.
    """
    family = ""
    if isinstance(model, str) and Path(model).exists():
        with contextlib.suppress(ConfigError, OSError):
            family = recognition.recognise_file(Path(model)).family
    if not family and scripts and all(_has_its_files(config_class(script), set(), of_all) for script in scripts):
        family = config_class(scripts[0]).family
    return [script for script in scripts if config_class(script).family == family] or scripts


def split_launch(argv: list[str]) -> tuple[JsonObject, list[str], list[Problem]]:
    # Returns the launcher's options by name, the remaining flags, and problems of the former. mixed_precision, which
    # both have, goes to the script.
    return train_script.take_flags(LAUNCH_FLAGS, argv)


def with_config(flags: list[str]) -> list[str]:
    """Return the flags; a leading file becomes the value of --config_file."""
    first = file_or_word(flags[0]) if flags else "-"
    if not first.startswith("-") and (first.lower().endswith(".toml") or Path(first).is_file()):
        return ["--config_file", first, *flags[1:]]
    return flags


def file_or_word(text: str) -> str:
    """Return the path of a file without quotes around it and ~, or another word as it is."""
    path = expand_home(strip_pasted(text))
    return path if path.lower().endswith(".toml") or Path(path).is_file() else text


def split_file(flags: list[str]) -> tuple[str | None, list[str]]:
    """Return the value of --config_file, and the other flags."""
    for at, flag in enumerate(flags):
        if flag == "--config_file" and at + 1 < len(flags):
            return flags[at + 1], flags[:at] + flags[at + 2 :]
        if flag.startswith("--config_file="):
            return flag.partition("=")[2], flags[:at] + flags[at + 1 :]
    return None, flags
