"""The command line of a config: flags over a TOML file over defaults, every mistake at once, and --help.

Flags are parsed by hand, as argparse stops at the first mistake and prints its usage over it. argparse only formats the
help.
"""

import argparse
import atexit
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil

from library import families
from library.config import environment
from library.config.building import Layer, Reading, draft, read_layers, read_section, understood, unknown_option
from library.config.formats import to_toml
from library.config.json_types import JsonObject
from library.config.outside_files import load_toml
from library.config.pasted import pasted_path
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.config.schema import flatten_sections, options_of
from library.config.values import Option, closest
from library.families.shared import read_ahead
from library.imports import without_collecting
from library.recipes.preset_files import path_today
from library.runs import refusal

C = TypeVar("C", bound=RunConfig)
SCRIPT_FLAGS = ("config_file", "output_config", "help")
NO_MEMORY = (
    "the computer ran out of CPU memory, or reached a limit on it ({why}): close other programs, or raise the limit"
)
INTERRUPTED = 130  # the shells' exit code of Ctrl+C
MAX_START_GAP = 5.0  # maximum seconds between the starts of processes launched together


def run(config: type) -> NoReturn:
    """Run a training script as this process, which ends as soon as all is written."""
    code = main(config)
    end_at_once(code)
    sys.exit(code)


def main(config: type, argv: list[str] | None = None) -> int:
    """Run a training script: parse the command line, then train. Returns the exit code.

    Mistakes are reported all at once, including those that the training would find later. What only the training can
    find (a missing file, a full disk) is also one sentence, with exit code 1, and so is a bug in this program, with the
    place of its traceback. A training stopped before its first step ends with 130; one stopped later has saved its work
    and ends with 0.
    """
    environment.print_any_text()
    reading = read_command_line(config, argv)
    if reading.problems:
        # Only the process that prints loads torch to find more mistakes.
        fail(ConfigError(*reading.problems, *(problems_beyond_reading(reading) if environment.first_process() else ())))
    _print_notes(reading.notes)
    try:
        environment.check_cache_variables()
        model = Path(reading.config.model.pretrained_model_name_or_path or "")
        if model.exists():
            read_ahead.start_reading(model, families.facts_of(config.family).denoiser_prefix)
        # torch reads the variable when it is loaded.
        if reading.config.memory.moves_weights(reading.config) and "torch" not in sys.modules:
            environment.expand_segments()
        with without_collecting():
            from library.cli.train import train  # loads torch, which parsing a command line does not need
            from library.compiler import torch_private

            torch_private.defer_dynamo()
            gc.freeze()  # loaded modules stay, so no collection needs to scan them

        train(reading.config, reading.notes, psutil.Process().create_time())
    except ConfigError as e:
        fail(e, code=1)
    except KeyboardInterrupt:
        if environment.first_process():
            print("Stopped before the first step: nothing was trained, so nothing was saved.", file=sys.stderr)
        return INTERRUPTED
    except Exception as e:
        if environment.lacks_memory(e):  # before the start of the training, which would report more
            fail(ConfigError(NO_MEMORY, why=type(e).__name__), code=1)
        notes = getattr(e, "__notes__", [])
        if not notes:
            traceback.print_exc()
        fail(f"{type(e).__name__}: {e}\n" + "\n".join(notes), code=1)
    return 0


def problems_beyond_reading(reading: Reading[Any]) -> list[Problem]:
    """Return further problems of a training: its files, packages and this machine. Loads torch.

    Empty if a config file could not be read, as its content is then unknown.
    """
    if not reading.known:
        return []
    problems: list[Problem] = []
    try:
        environment.check_cache_variables()
    except ConfigError as e:
        problems = e.problems
        environment.forget_problems()
    with without_collecting():
        from library.check import preflight

    return [*problems, *preflight.evaluate(reading.config, preflight.scan_images(reading), reading)[0]]


def read_command_line(config: type[C], argv: list[str] | None = None, also: Iterable[str] = ()) -> Reading[C]:
    """Build a config from a command line and the file it names, with every problem of both at once: flags win over the
    file, and the file over defaults.

    --help and --output_config act and exit. `also` are flags of the command that were taken out before; an unknown flag
    may be a misspelling of one of them.
    """
    flags, problems = read_flags(config, sys.argv[1:] if argv is None else argv, also)
    if flags.pop("help", False):
        with environment.reader_may_leave():
            print(help_text(config))
        raise SystemExit(0)
    path, writing = config_path(flags.pop("config_file", None)), flags.pop("output_config", False)
    reading = _read_flags(config, flags, problems, None if writing else path)
    if writing:
        if reading.problems:
            fail(ConfigError(*reading.problems))
        _print_notes(reading.notes)
        write_config(reading.config, path)
        raise SystemExit(0)
    return reading


def _read_flags(config: type[C], flags: JsonObject, problems: list[Problem], path: Path | None) -> Reading[C]:
    layers, unreadable = [Layer(flags, "--")], _mentioned_options(config, problems)
    if environment.shards_asked() == 2:  # sharding was chosen in `accelerate config`
        layers.insert(0, Layer({"fsdp": True}, "accelerate's config"))
    if path:
        try:
            duplicates: list[Problem] = []
            layers.insert(0, Layer(flatten_sections(load_toml(path), duplicates), path.name))
            problems = [*problems, *(problem.replaced(place=layers[0].place) for problem in duplicates)]
        except ConfigError as e:
            # Rules across options cannot be checked without the file, but the flags' own values can.
            all_problems = [*problems, *e.problems]
            known_flags = {name: value for name, value in flags.items() if name in options_of(config)}
            read_section(options_of(config), Layer(known_flags, "--"), all_problems)
            return Reading(draft(config, {}), all_problems, [], known=False)
    reading = read_layers(config, layers, unreadable)
    return replace(reading, problems=[*problems, *reading.problems], known="config_file" not in unreadable)


def _mentioned_options(config: type, problems: list[Problem]) -> set[str]:
    """Return the options of invalid flags, or those probably meant, which are not reported as missing."""
    options = options_of(config)
    names = {problem.option.removeprefix("no-") for problem in problems} - {""}
    return {name if name in options else closest(name, [*options, *SCRIPT_FLAGS]) for name in names} - {""}


def _print_notes(notes: list[Problem]) -> None:
    for note in notes if environment.first_process() else ():
        print(f"note: {note}", file=sys.stderr)


def read_flags(config: type[RunConfig], argv: list[str], also: Iterable[str] = ()) -> tuple[JsonObject, list[Problem]]:
    """Return option values by name as text, and what could not be parsed. Of repeated flags the last wins, but that of
    several files with strengths names one more each time.

    Everything up to the next `--flag` belongs to a flag, so negative numbers need no special care; a value that begins
    with two dashes is written --flag=value.
    """
    options, values, problems = options_of(config), dict[str, Any](), list[Problem]()
    for flag, words in _group_by_flag(argv):
        if flag in ("-h", "--help"):
            return {"help": True}, []
        if not flag.startswith("--"):
            template = "{value}: unexpected value. Every value follows a flag, as in --output_dir {value}"
            problems.append(Problem("", template, value=flag))
            continue
        name = flag[2:]
        if name.startswith("no-") and (switched_off := options.get(name[3:])) and switched_off.type is bool:
            values[switched_off.name] = "false"
            problems += [_flag(name, "takes no value")] * bool(words)
        elif name in SCRIPT_FLAGS:
            values[name] = True if name == "output_config" else words[0] if len(words) == 1 else None
            problems += [_flag(name, "takes one value")] * (name == "config_file" and len(words) != 1)
        elif name not in options:
            # It may still be an old name, for which the config has better advice than "no such option".
            is_old = any(name in getattr(config, table, {}) for table in ("aliases", "retired", "foreign", "old"))
            if is_old or getattr(config, "script_with", lambda *_: "")(name, config.family):
                values[name] = words[0] if words else True
            else:
                problems.append(unknown_option(name, "--", [*understood(config), *SCRIPT_FLAGS, *also]))
        elif problem := _store_words(options[name], words, values):
            problems.append(problem)
    return values, problems


def _flag(name: str, template: str, **arguments: Any) -> Problem:
    return Problem(name, template, place="--", **arguments)


def take_flags(options: Mapping[str, Option], argv: list[str]) -> tuple[JsonObject, list[str], list[Problem]]:
    """Take the flags of some options out of a command line: return their values as text, the rest, and problems."""
    values: JsonObject = {}
    remaining: list[str] = []
    problems: list[Problem] = []
    current_words: list[str] | None = None  # collects the values of the current flag
    groups: list[tuple[str, list[str]]] = []
    for token in argv:
        flag, equals, value = token.partition("=")
        if token.startswith("--"):
            current_words = None
            if flag[2:] in options:
                current_words = [value] if equals else []
                groups.append((flag, current_words))
                continue
        (remaining if current_words is None else current_words).append(token)
    for flag, words in groups:
        if problem := _store_words(options[flag[2:]], words, values):
            problems.append(problem)
    return values, remaining, problems


def _group_by_flag(argv: list[str]) -> list[tuple[str, list[str]]]:
    """Return the command line as flags with their values; a stray value at the start is its own group."""
    groups: list[tuple[str, list[str]]] = []
    for token in argv:
        if token.startswith("--") and len(token) > 2 or token == "-h":
            flag, equals, value = token.partition("=")
            groups.append((flag, [value] if equals else []))
        elif groups and groups[-1][0].startswith("--"):
            groups[-1][1].append(token)
        else:
            groups.append((token, []))
    return groups


def _store_words(option: Option, words: list[str], values: JsonObject) -> Problem | None:
    """Store a flag's words in `values`; return the problem, if any."""
    if option.many:
        before = values.get(option.name, []) if option.hints.get("weighted") else []  # a file each time
        values[option.name] = [*before, *words]
    elif option.type is bool and not words:
        values[option.name] = "true"
    elif not words:
        return _flag(option.name, "needs a value: {expects}", expects=option.expects)
    elif len(words) > 1:
        template = 'takes one value, got {count}; put quotes around a value with blanks: "{values}"'
        return _flag(option.name, template, count=len(words), values=" ".join(words))
    else:
        values[option.name] = words[0]
    return None


def config_path(name: str | None) -> Path | None:
    """Return the file of --config_file: ".toml" may be omitted, and a preset may have its former name."""
    if name is None:
        return None
    path = pasted_path(name)
    complete = path if path.suffix.lower() == ".toml" else Path(f"{path}.toml")
    return path if path.is_dir() and not complete.is_file() else path_today(complete)


def write_config(config: RunConfig, path: Path | None) -> None:
    """--output_config: write the non-default values, without secrets, into a file that must not exist yet."""
    if path is None:
        fail("--output_config needs --config_file, which names the file to write")
    try:
        with open(path, "x", encoding="utf-8", newline="\n") as f:
            f.write(to_toml(config))
    except FileExistsError:
        fail(f"{path} already exists; name another file or delete it first")
    except OSError as e:
        fail(f"{path} cannot be written: {e.strerror or e}")
    print(f"wrote {path}")


def help_text(config: type) -> str:
    """--help: list every option with its help, by section."""
    parser = argparse.ArgumentParser(
        prog=f"{getattr(config, 'script', config.__name__)}.py",
        usage="%(prog)s [--config_file FILE.toml] [--option value ...]",
        description=config.__doc__,
        epilog="Options of a file are overridden by flags; --no-NAME switches a yes/no option off.",
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    parser.add_argument("--config_file", metavar="FILE", help="TOML with options, flat or in tables")
    parser.add_argument("--output_config", action="store_true", help="write the options to --config_file, and exit")
    add_arguments(parser, options_of(config))
    return parser.format_help()


def add_arguments(parser: Any, options: Mapping[str, Option]) -> None:
    """Declare options on an argparse parser, a group per section; an absent flag stays absent."""
    groups: JsonObject = {}
    for o in options.values():
        group = groups.get(o.section) or groups.setdefault(o.section, parser.add_argument_group(o.section))
        default = "" if o.default in (None, (), "", False) else f" (default: {o.text(o.default)})"
        help_text = (o.help + default).replace("%", "%%")
        if o.type is bool:
            group.add_argument(f"--{o.name}", action="store_true", default=argparse.SUPPRESS, help=help_text)
            continue
        word = "{" + ",".join(map(str, o.choices)) + "}" if o.choices and not o.open else o.type.__name__.upper()
        shape = {"nargs": "*"} if o.many else {}
        group.add_argument(f"--{o.name}", metavar=word, default=argparse.SUPPRESS, help=help_text, **shape)


def fail(error: Exception | str, code: int = 2) -> NoReturn:
    """Exit with what the user must fix, a line each, and no traceback."""
    if environment.first_process():
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        if isinstance(error, ConfigError):
            refusal.refuse(error)
    else:  # a launcher kills all processes once one has failed, maybe before the printing one gets here
        time.sleep(MAX_START_GAP)
    raise SystemExit(code)


def end_at_once(code: int) -> None:
    """End this process with `code` once all threads have ended, all exit functions have run and all output is written.

    Python would then clear every module, which takes seconds with torch loaded and frees nothing that the system does
    not. Returns if a program, such as a profiler, has called the script, or if the output is closed, which Python
    reports.
    """
    if not _called_by_script():
        return
    python: Any = threading  # nothing public does what Python does at its end
    python._shutdown()  # joins threads, and tells pools of threads to end
    atexit._run_exitfuncs()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except (OSError, ValueError):
        return
    os._exit(code)


def _called_by_script() -> bool:
    """Return whether only this package is between here and the script that Python was started with."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None and frame.f_globals["__name__"].startswith("library."):
        frame = caller
    return caller is None and frame.f_globals["__name__"] == "__main__"
