"""Start runs in separate processes that outlive the page, the browser and the shell."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from library.config.command import check_launch_options
from library.config.environment import OUTPUT_IN_UTF_8
from library.config.formats import to_toml
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, Problem, together
from library.config.run_config import RunConfig
from library.files import write_atomic
from library.runs import gpu_slots, job_files, keys, layout, process, reader, registry
from library.runs.launcher import launch_command


@dataclass(frozen=True)
class TrainingJob:
    """A training to start: what the launcher needs from a config, without the config's class."""

    script: str
    title: str
    name: str
    output: str  # absolute output folder
    toml: str
    how: JsonMapping = field(default_factory=dict)  # fields of library.config.command.Launch
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # environment variables
    folder: str = ""  # base of relative paths in the config
    resumes: str = ""  # the run to resume
    queued: str = ""  # its entry in the queue
    preset: str = ""  # the id of the preset that its settings started from
    files: Mapping[str, Path] = field(default_factory=dict)  # by option: copied to the run's folder and used from there


def job_of_config(config: RunConfig, preset: str = "", **launch: Any) -> TrainingJob:
    """Return the job of a config. `launch` sets fields of `library.config.command.Launch`. Secrets reach the training
    by its environment and are not written. Raises ConfigError for contradictory launch options.
    """
    launch = launch_options(config, launch)
    check_launch_options(launch)
    secrets = {keys.ENVIRONMENT[name]: value for name, value in keys.keys_of_config(config).items() if value}
    options = {name: value for name, value in launch.items() if value is not None}
    output, name = result_of(config)
    about = (config.script, config.title, name, output, to_toml(config), options, secrets, str(Path.cwd()))
    return TrainingJob(*about, preset=preset)


def launch_options(config: RunConfig, launch: JsonMapping) -> JsonObject:
    """Return launch options with the config's mixed precision, which the launcher has to know, too."""
    return {**launch, "mixed_precision": config.precision.mixed_precision}


def result_of(config: RunConfig) -> tuple[str, str]:
    return str(Path(config.save.output_dir or "").absolute()), config.save.output_name or config.script


def begin_job(job: TrainingJob) -> str:
    """Start a job on free devices and return the run's id. Raises ConfigError without devices, or if it
    cannot start.
    """
    with gpu_slots.choosing():
        devices = _choose_devices(job)
        folder = _prepare(job, devices)
    arguments, variables = launch_command(
        folder / layout.TOML, job.script, **gpu_slots.options_for_devices(job.how, devices)
    )
    environment = {
        **os.environ,
        **variables,
        **keys.key_environment(),
        **job.secrets,
        **gpu_slots.device_environment(devices),
        "KOHYA_RUN_DIR": str(folder),
    }
    try:
        started = detached(arguments, folder / layout.LOG, environment, job.folder)
    except OSError as error:
        why = Message("The training could not be started: {error}.", error=error)
        failed = layout.load_facts(folder / layout.RUN) | {"state": "failed", "error": why, "ended": time.time()}
        layout.store(folder / layout.RUN, failed)
        raise ConfigError(why) from error
    own_process = process.identity(started.pid)
    layout.store(folder / layout.LAUNCHER, {**own_process, "command": arguments})
    registry.add_pointer(folder, layout.load_facts(folder / layout.RUN) | own_process)
    return folder.name


def _choose_devices(job: TrainingJob) -> tuple[str, ...]:
    """Return free devices for a job. Raises ConfigError without any, and if an active run writes the same files."""
    active = [run for run in reader.runs() if run.active and run.is_here]
    devices = gpu_slots.choose_devices(job.how, gpu_slots.free_devices(run.facts for run in active))
    if not devices and not active:
        raise ConfigError("The GPU is busy with generating images or caching: wait until that has ended, or stop it.")
    if not devices:
        names = together([run.name for run in active])
        template = "{runs} is still {state}: stop it, or wait until it has ended, or add this one to the queue."
        if len(active) > 1:
            template = "{runs} are still running: stop it, or wait until it has ended, or add this one to the queue."
        raise ConfigError(template, runs=names, state=active[0].state)
    place = {"output_dir": job.output, "output_name": job.name}
    if twin := next((run for run in active if place.items() <= run.facts.items()), None):
        template = ": {run} is writing {name} into this folder; choose another name."
        raise ConfigError(Problem("output_name", template, run=twin.name, name=job.name))
    return devices


def _prepare(job: TrainingJob, devices: Sequence[str]) -> Path:
    folder = Path(job.output) / "runs" / layout.new_id(job.name)
    try:
        folder.mkdir(parents=True)
        copies = job_files.copy_files(job.files, folder)
        toml = job_files.with_options(job.toml, {option: str(path) for option, path in copies.items()})
        write_atomic(folder / layout.TOML, toml)
        if not job.files:
            job_files.record_files(job_files.values_of(job.toml), job.folder, folder)
        facts = {
            "id": folder.name,
            "script": job.script,
            "title": job.title,
            "state": "starting",
            "started": time.time(),
            "from": "page",
            "output_dir": job.output,
            "output_name": job.name,
            "devices": list(devices),
            "launch": dict(job.how),
            "folder": job.folder,
            "resumes": job.resumes,
            "queued": job.queued,
            "preset": job.preset,
            "error": None,
        }
        layout.store(folder / layout.RUN, facts)
        registry.add_pointer(folder)
    except (OSError, ConfigError) as error:
        if not isinstance(error, FileExistsError):  # otherwise the run would count as starting
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, ConfigError):  # such as a full disk, with its own advice
            raise
        raise ConfigError(
            Problem(
                "output_dir", ": {output} cannot be written ({why}).", output=job.output, why=error.strerror or error
            )
        ) from error
    return folder


def detached(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str], folder: str = ""
) -> subprocess.Popen[Any]:
    """Start a process in its own session (on Windows with a console of its own, hidden), with its output in a file."""
    working_folder = folder if folder and Path(folder).is_dir() else None
    variables = {**environment, **OUTPUT_IN_UTF_8}
    with log.open("ab") as out:
        streams: JsonObject = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        started = _in_own_session(list(arguments), env=variables, cwd=working_folder, **streams)
    # Wait for the end, or the process stays in the table as a zombie.
    threading.Thread(target=started.wait, name="reaper", daemon=True).start()
    return started


def _in_own_session(arguments: list[str], **how: Any) -> subprocess.Popen[Any]:
    if sys.platform == "win32":
        # Its children share the hidden console. Without any, each of them would open a window.
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
        try:
            # An SSH server may put all processes of a session into a job that ends with it.
            return subprocess.Popen(arguments, creationflags=flags | subprocess.CREATE_BREAKAWAY_FROM_JOB, **how)
        except PermissionError:  # a job that its processes may not leave
            return subprocess.Popen(arguments, creationflags=flags, **how)
    return subprocess.Popen(arguments, start_new_session=True, **how)
