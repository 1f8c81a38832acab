"""`kohya check`: report every problem of a training at once, without starting it."""

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from library.check.isolated import environment_for_check, finding
from library.cli.launch import LAUNCH_FLAGS, script_of_toml, split_launch, with_config
from library.cli.main import EXIT_DONE, EXIT_FAILED, EXIT_MISUSED, complain
from library.cli.train_script import read_command_line
from library.config import environment as surroundings
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
  --script SCRIPT  the training script, one of those that kohya train --help lists; else detected from the file
  --json           print one JSON object instead of text"""


def main(argv: list[str]) -> int:
    """Print what is known about a training before a model is loaded; return 0 if nothing must be fixed."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return EXIT_DONE if argv else EXIT_MISUSED
    as_json = "--json" in argv
    try:
        what, reading, how = read_check_request([token for token in argv if token != "--json"])
        os.environ.update(environment_for_check(how))
        report = make_check_report(reading)
    except ConfigError as wrong:
        if not as_json:
            raise
        print(json.dumps(_only(wrong)))
        return EXIT_FAILED
    except Exception as error:
        traceback.print_exc()
        said = f"the check itself failed ({type(error).__name__}: {error}); this is a mistake in this program"
        if as_json:
            print(json.dumps({**_only(ConfigError(said)), "failed": True}))
        return complain(said, EXIT_FAILED)
    if as_json:
        print(json.dumps(report.as_json()))
        return EXIT_FAILED if report.problems else EXIT_DONE
    from library.check import report as checking

    for line in checking.report_lines([one for one in report.findings if one.verdict != "bad"]):
        print(line)
    if report.problems:
        to_fix = [f"{one.text}{one.advice}" for one in report.findings if one.verdict == "bad"]
        return complain("\n".join([*to_fix, f"{len(to_fix)} to fix in {what}"]), EXIT_FAILED)
    print(f"{what}: no problems found")
    return EXIT_DONE


def read_check_request(argv: list[str]) -> tuple[str, Reading[Any], JsonObject]:
    """Return a description of a command line, the reading of its config, and its launch options."""
    how, rest, wrong = split_launch(argv)
    script, rest = _take_script_option(rest)
    what = rest.pop(0) if rest and not rest[0].startswith("--") else ""
    is_file = bool(what) and (what.lower().endswith(".toml") or Path(what).is_file() or bool(script))
    if is_file:
        rest = ["--config_file", what, *rest]
    script = script or (script_of_toml(Path(what)) if is_file else what)
    if not is_file and (named := with_config(rest)) != rest:
        what, rest, is_file = rest[0], named, True
    if not script:
        raise ConfigError("kohya check needs the TOML of a training, or the name of a script and its options")
    reading = read_command_line(config_class(script), rest, [*LAUNCH_FLAGS, *CHECK_FLAGS])
    problems = [*reading.problems, *wrong, *gpu_slots.find_launch_problems(how)]
    about = f"{what} ({script.removesuffix('.py')})" if is_file else script.removesuffix(".py")
    return about, dataclasses.replace(reading, problems=problems), how


def make_check_report(reading: Reading[Any]) -> Any:
    """Return the report."""
    # Torch is imported only here, after the environment matches the training's.
    try:
        surroundings.check_cache_variables()
    except ConfigError as wrong:
        reading = dataclasses.replace(reading, problems=[*reading.problems, *wrong.problems])
        surroundings.forget_problems()
    with without_collecting():
        from library.check import report as checking

    return checking.make_report(reading.config, reading)


def _take_script_option(argv: list[str]) -> tuple[str, list[str]]:
    """Return the value of --script, and the other arguments."""
    for at, token in enumerate(argv):
        name, equals, value = token.partition("=")
        if name == "--script":
            rest = argv[at + 1 :]
            if not equals:
                value, rest = (rest[0], rest[1:]) if rest else ("", [])
            config_class(value)  # the error lists the scripts
            return value, argv[:at] + rest
    return "", argv


def _only(wrong: ConfigError) -> JsonObject:
    return {"findings": [finding(problem, "other", "bad") for problem in wrong.problems], "fit": None}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
