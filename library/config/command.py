"""Convert a config file to the command that trains with it. Pure: starts, reads and writes nothing."""

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from library.config.building import Layer, read_section
from library.config.problems import Problem, option_name, raise_if_any
from library.config.reading import parse_count
from library.config.schema import opt
from library.config.values import did_you_mean, quoted

PROJECT_ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = PROJECT_ROOT / "sd-scripts"
MANY = 4096  # upper limit of processes, machines and threads
EXTRA = "extra_accelerate_launch_args"
# Words of these characters mean the same in cmd, in PowerShell and to programs.
PLAIN_ON_WINDOWS = re.compile(r"[\w:\\./=+%~-]+")
OTHER_SCRIPTS = ("-m", "-h", "--module", "--no_python", "--help")  # these would start something other than the training


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How `accelerate launch` starts a training: on which devices, in how many processes."""

    num_processes: int = opt(1, "processes, one per GPU", label="Number of processes", min=1)
    gpu_ids: str | None = opt(None, "which GPUs, by number (0,1); all when not set", label="GPUs")
    cpu: bool = opt(False, "train on the CPU even if there is a GPU", label="On the CPU")
    num_machines: int = opt(1, "machines that train together", label="Number of machines", min=1, advanced=True)
    machine_rank: int | None = opt(None, "number of this machine, from 0", min=0, advanced=True)
    main_process_ip: str | None = opt(None, "address of the first machine", label="Main process IP", advanced=True)
    main_process_port: int | None = opt(
        None, "port for the processes to meet at", parse=parse_count, max=65535, advanced=True
    )
    num_cpu_threads_per_process: int | None = opt(
        None,
        "CPU threads of each process",
        label="CPU threads per process",
        parse=parse_count,
        max=MANY,
        advanced=True,
    )
    mixed_precision: Literal["no", "fp16", "bf16"] = opt(
        "no", "for the launcher only; the training uses the value of the config"
    )
    extra_accelerate_launch_args: tuple[str, ...] = opt((), "more arguments for accelerate launch", advanced=True)


def training_command(config_path: str | Path, script: str, **options: Any) -> list[str]:
    """Return the arguments that train with a config file: this Python, `accelerate launch`, the script, the file.

    `options` sets fields of Launch; None keeps the default. Raises ConfigError for invalid values.
    """
    launch = check_launch_options(options)
    values_by_flag = {
        "--num_processes": launch.num_processes,
        "--num_machines": launch.num_machines,
        "--mixed_precision": launch.mixed_precision,
        "--dynamo_backend": "no",  # the training compiles blocks itself; the user's accelerate config may say otherwise
        "--gpu_ids": launch.gpu_ids,
        "--machine_rank": launch.machine_rank,
        "--main_process_ip": launch.main_process_ip,
        "--main_process_port": launch.main_process_port,
        "--num_cpu_threads_per_process": launch.num_cpu_threads_per_process,
    }
    arguments = [sys.executable, "-m", "accelerate.commands.launch"]
    for flag, value in values_by_flag.items():
        arguments += [] if value is None else [flag, str(value)]
    if "--use_fsdp" in launch.extra_accelerate_launch_args:
        pass  # this already means several processes, and accelerate rejects both flags
    elif launch.num_processes > 1:
        # Otherwise accelerate starts a single process without a second GPU. Despite its name the flag works on a CPU
        # as well, if Accelerator gets cpu=True or ACCELERATE_USE_CPU is set.
        arguments.append("--multi_gpu")
    elif launch.cpu:
        arguments.append("--cpu")
    arguments += launch.extra_accelerate_launch_args
    return [*arguments, str(SCRIPTS / f"{script.removesuffix('.py')}.py"), "--config_file", str(config_path)]


def is_on_cpu(options: Mapping[str, Any]) -> bool:
    """Return whether launch options of any origin ask for the processor."""
    return str(options.get("cpu") or "").lower() in ("true", "1", "yes", "on")


def named_gpus(options: Mapping[str, Any]) -> list[str]:
    """Return the GPUs that launch options of any origin name; none for any number of them, or for all."""
    names = [part.strip() for part in str(options.get("gpu_ids") or "").split(",") if part.strip()]
    return [] if names == ["all"] else names


def check_launch_options(values: dict[str, Any]) -> Launch:
    """Return checked launch options from values of any origin. Raises ConfigError with every problem."""
    problems: list[Problem] = []
    launch = _read_launch(values, problems)
    raise_if_any(problems)
    return launch


def launch_problems(values: Mapping[str, Any]) -> list[Problem]:
    """Return every problem of launch options."""
    problems: list[Problem] = []
    _read_launch(values, problems)
    return problems


def _read_launch(values: Mapping[str, Any], problems: list[Problem]) -> Launch:
    section = read_section(Launch, Layer({k: v for k, v in values.items() if v is not None}), problems)
    launch = replace(Launch(), **section)
    if launch.cpu and launch.num_processes > 1:
        problems.append(
            Problem("cpu", "works with one process only: hide the GPUs (gpu_ids) to run several on the CPU")
        )
    for name in ("num_processes", "num_machines"):
        if (number := getattr(launch, name)) > MANY:
            problems.append(Problem(name, "must be at most {ceiling}, got {value}", ceiling=MANY, value=number))
    if (launch.machine_rank or 0) >= launch.num_machines:
        problems.append(
            Problem(
                "machine_rank",
                "must be below num_machines ({machines}), got {rank}",
                machines=launch.num_machines,
                rank=launch.machine_rank,
            )
        )
    problems += _extra_argument_problems(launch)
    return launch


def _extra_argument_problems(launch: Launch) -> Iterator[Problem]:
    """Return arguments that accelerate lacks, or that contradict the options of the same name."""
    arguments, flags = launch.extra_accelerate_launch_args, _launcher_flags()
    if arguments and not arguments[0].startswith("-"):
        yield Problem(EXTRA, ": {given} does not belong to an option; write --option value", given=quoted(arguments[0]))
    own_values = {field.name: getattr(launch, field.name) for field in fields(Launch)}
    for at, token in enumerate(arguments):
        name, equals, value = token.partition("=")
        # accelerate accepts --gpu-ids for --gpu_ids.
        name = name.replace("-", "_").replace("__", "--", 1) if name.startswith("--") else name
        if not equals:
            value = "true" if name == "--cpu" else next(iter(arguments[at + 1 :]), "")
        if name in OTHER_SCRIPTS:
            yield Problem(EXTRA, ": {name} starts something other than the training; leave it out", name=name)
        elif name.startswith("--") and flags and name not in flags:
            yield Problem(
                EXTRA, ": accelerate launch has no option {name}{hint}", name=name, hint=did_you_mean(name, flags)
            )
        elif (option := name.removeprefix("--")) in own_values and str(own_values[option]).lower() != value.lower():
            yield Problem(
                EXTRA,
                ": {name} contradicts {other} ({value}); set {other} instead",
                name=name,
                other=option_name(option),
                value=own_values[option],
            )


@lru_cache(maxsize=1)
def _launcher_flags() -> frozenset[str]:
    """Return the flags of the installed accelerate's launcher; empty if it is not installed."""
    # Its source is parsed, not run, as importing it loads torch.
    spec = importlib.util.find_spec("accelerate")
    places = (
        [Path(place) / "commands" / "launch.py" for place in (spec.submodule_search_locations or ())] if spec else []
    )
    texts = [place.read_text(encoding="utf-8") for place in places if place.is_file()]
    return frozenset(flag for text in texts for flag in re.findall(r"[\"'](--[a-z][a-z0-9_]+)[\"']", text))


def quote_command(arguments: list[str]) -> str:
    """Return the command as typed: quoted for this platform's shell, on Windows for cmd as well as PowerShell."""
    if sys.platform != "win32":
        return shlex.join(arguments)
    quoted_arguments = [quote_argument(argument) for argument in arguments]
    if quoted_arguments[0] == arguments[0]:
        return " ".join(quoted_arguments)
    # PowerShell prints a program in quotes instead of running it, and its operator for that, &, is an error in cmd.
    plain = PLAIN_ON_WINDOWS.fullmatch
    words = [word if plain(word) else "'{}'".format(word.replace("'", "''")) for word in arguments]
    return 'powershell "& {}"'.format(" ".join(words))


def quote_argument(argument: str) -> str:
    """Return one argument of a command as typed."""
    if sys.platform != "win32":
        return shlex.quote(argument)
    if PLAIN_ON_WINDOWS.fullmatch(argument):
        return argument
    # Programs read a backslash before a quote as its escape.
    escaped = re.sub(r"(\\+)$", r"\1\1", re.sub(r'(\\*)"', r'\1\1\\"', argument))
    return f'"{escaped}"'
