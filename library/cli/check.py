"""`kohya check`: report every problem of a training at once, without starting it."""

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from library.check.check_process import environment_for_check
from library.check.isolated import finding
from library.cli.launch import LAUNCH_FLAGS, file_or_word, script_of_toml, split_launch, with_config
from library.cli.main import EXIT_DONE, EXIT_FAILED, EXIT_MISUSED, complain
from library.cli.train_script import read_command_line
from library.config import environment
from library.config.building import Reading
from library.config.json_types import JsonObject
from library.config.problems import ConfigError
from library.families import config_class
from library.imports import without_collecting
from library.runs import gpu_slots

CHECK_FLAGS = ("script", "json")
USAGE = """kohya check RUN.toml [options]
kohya check SCRIPT [--config_file] RUN.toml [options]

Looks for mistakes without training, and names all of them. Options are those of the training and of the launcher, as in
kohya train, and besides:
  --script SCRIPT  the training script, one of those that kohya train --help lists (default: detected)
  --json           print one JSON object instead of text"""


def main(argv: list[str]) -> int:
    """Print what a check finds before a model is loaded; return 0 if nothing must be fixed."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return EXIT_DONE if argv else EXIT_MISUSED
    as_json = "--json" in argv
    try:
        target, reading, launch_options = read_check_request([token for token in argv if token != "--json"])
        os.environ.update(environment_for_check(launch_options))
        report = make_check_report(reading)
    except ConfigError as error:
        if not as_json:
            raise
        print(json.dumps(_report_of_error(error)))
        return EXIT_FAILED
    except Exception as error:
        traceback.print_exc()
        text = f"the check itself failed ({type(error).__name__}: {error}); this is a mistake in this program"
        if as_json:
            print(json.dumps({**_report_of_error(ConfigError(text)), "failed": True}))
        return complain(text, EXIT_FAILED)
    if as_json:
        print(json.dumps(report.as_json()))
        return EXIT_FAILED if report.problems else EXIT_DONE
    from library.check import report as checking

    for line in checking.report_lines([entry for entry in report.findings if entry.verdict != "bad"]):
        print(line)
    if report.problems:
        to_fix = [f"{entry.text}{entry.advice}" for entry in report.findings if entry.verdict == "bad"]
        return complain("\n".join([*to_fix, f"{len(to_fix)} to fix in {target}"]), EXIT_FAILED)
    print(f"{target}: no problems found")
    return EXIT_DONE


def read_check_request(argv: list[str]) -> tuple[str, Reading[Any], JsonObject]:
    """Return a description of a command line, the reading of its config, and its launch options."""
    launch_options, flags, launch_problems = split_launch(argv)
    script, flags = _take_script_option(flags)
    target = file_or_word(flags.pop(0)) if flags and not flags[0].startswith("--") else ""
    is_file = bool(target) and (target.lower().endswith(".toml") or Path(target).is_file() or bool(script))
    if is_file:
        flags = ["--config_file", target, *flags]
    script = script or (script_of_toml(Path(target)) if is_file else target)
    if not is_file and (flags_with_config := with_config(flags)) != flags:
        target, flags, is_file = flags[0], flags_with_config, True
    if not script:
        raise ConfigError("kohya check needs the TOML of a training, or the name of a script and its options")
    reading = read_command_line(config_class(script), flags, [*LAUNCH_FLAGS, *CHECK_FLAGS])
    problems = [*reading.problems, *launch_problems, *gpu_slots.find_launch_problems(launch_options)]
    description = f"{target} ({script.removesuffix('.py')})" if is_file else script.removesuffix(".py")
    return description, dataclasses.replace(reading, problems=problems), launch_options


def make_check_report(reading: Reading[Any]) -> Any:
    """Check a training. Loads torch: by now the environment must be the training's."""
    try:
        environment.check_cache_variables()
    except ConfigError as error:
        reading = dataclasses.replace(reading, problems=[*reading.problems, *error.problems])
        environment.forget_problems()
    with without_collecting():
        from library.check import report as checking

    return checking.make_report(reading.config, reading)


def _take_script_option(argv: list[str]) -> tuple[str, list[str]]:
    """Return the value of --script, and the other arguments."""
    for at, token in enumerate(argv):
        name, equals, value = token.partition("=")
        if name == "--script":
            following = argv[at + 1 :]
            if not equals:
                value, following = (following[0], following[1:]) if following else ("", [])
            config_class(value)  # the error lists the scripts
            return value, argv[:at] + following
    return "", argv


def _report_of_error(error: ConfigError) -> JsonObject:
    return {"findings": [finding(problem, "other", "bad") for problem in error.problems], "fit": None}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
