"""Starting a run in processes of its own, which live on when the page, the browser or the shell goes away."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from library.config.command import command
from library.config.schema import ConfigError, options, to_toml
from library.files import write_atomic
from library.runs import layout, process, reader, registry

ENVIRONMENT = {"wandb_api_key": "WANDB_API_KEY", "huggingface_token": "HF_TOKEN"}


def launch(config: Any, **how: Any) -> str:
    """Write the config into a new run folder and start `accelerate launch` on it; the run's id.

    `how` goes to `library.config.command.command` (number of processes and the like). Secrets of the config reach the
    training by its environment and are written nowhere. Raises ConfigError when the run cannot begin.
    """
    if busy := reader.active():
        raise ConfigError(f"{busy.id} is still {busy.state}: stop it, or wait until it has ended.")
    secrets = {variable: value for name, variable in ENVIRONMENT.items() if (value := _secret(config, name))}
    folder = _prepare(config)
    environment = {**os.environ, **secrets, "KOHYA_RUN_DIR": str(folder), "PYTHONUNBUFFERED": "1"}
    arguments = command(folder / layout.TOML, config.script, **how)
    try:
        started = _detached(arguments, folder / layout.LOG, environment)
    except OSError as error:
        _failed(folder, f"The training could not be started: {error}.")
        raise ConfigError(f"The training could not be started: {error}.") from error
    layout.store(folder / layout.LAUNCHER, {**process.identity(started.pid), "command": arguments})
    # Someone has to take note of the end, or the ended process stays in the table as a zombie.
    threading.Thread(target=started.wait, name="run reaper", daemon=True).start()
    return folder.name


def _secret(config: Any, name: str) -> str | None:
    known = options(type(config))
    return getattr(getattr(config, known[name].section), name) if name in known else None


def _prepare(config: Any) -> Path:
    name = config.save.output_name or config.script
    output = Path(config.save.output_dir).expanduser().absolute()
    folder = output / "runs" / layout.new_id(name)
    try:
        folder.mkdir(parents=True)
        write_atomic(folder / layout.TOML, to_toml(config))
        facts = {"id": folder.name, "script": config.script, "title": config.title, "state": "starting",
                 "started": time.time(), "from": "page", "output_dir": str(output), "output_name": name,
                 "error": None}  # fmt: skip
        layout.store(folder / layout.RUN, facts)
        registry.add(folder)
    except OSError as error:
        raise ConfigError(f"output_dir: {output} cannot be written ({error.strerror or error}).") from error
    return folder


def _detached(arguments: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[Any]:
    """Start a process in a session of its own (a process group without a console on Windows), its words in a file."""
    apart: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.DETACHED_PROCESS}
    with log.open("ab") as out:
        return subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment, **apart
        )


def _failed(folder: Path, why: str) -> None:
    facts = layout.load(folder / layout.RUN)
    layout.store(folder / layout.RUN, facts | {"state": "failed", "error": why, "ended": time.time()})
