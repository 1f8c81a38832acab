"""Probes from the page: a process of its own, which tells in a file how it gets on."""

import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kohya_gui.checking import environment
from library.config.schema import ConfigError, to_toml
from library.files import write_atomic
from library.runs import layout, process, registry

PROGRESS, TOML, LOG, PROCESS = "probe.json", "run.toml", "log.txt", "process.json"
ID = re.compile(r"[0-9a-f]{12}")
DAY = 86400.0


def start(config: Any, launch: Mapping[str, Any]) -> str:
    """Begin a probe of a config; what it is asked for by. Raises ConfigError while another one is at work."""
    if any(process.alive(layout.load(folder / PROCESS)) for folder in _folders()):
        raise ConfigError("A probe is at work already: wait until it has ended, or stop it.")
    for old in _folders():
        if time.time() - old.stat().st_mtime > DAY:
            _clear(old)
    folder = _home() / secrets.token_hex(6)
    write_atomic(folder / TOML, to_toml(config))
    arguments = [sys.executable, "-m", "kohya_gui.cli", "probe", str(folder / TOML), "--script", config.script,
                 "--progress", str(folder / PROGRESS)]  # fmt: skip
    arguments += ["--cpu"] if launch.get("cpu") in (True, "true") else []
    apart: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.DETACHED_PROCESS}
    with (folder / LOG).open("ab") as log:
        begun = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                 env=environment(launch), **apart)  # fmt: skip
    layout.store(folder / PROCESS, process.identity(begun.pid))
    threading.Thread(target=begun.wait, name="probe reaper", daemon=True).start()
    return folder.name


def state(probe_id: str) -> dict[str, Any]:
    """How a probe gets on, as library.train.probing.Probe.as_json; `state` is "failed" when its process is gone."""
    folder = _folder(probe_id)
    alive = process.alive(layout.load(folder / PROCESS))
    found = layout.load(folder / PROGRESS) or {"state": "running", "doing": "Getting ready", "tries": [], "best": None}
    if found.get("state") == "running" and not alive:
        log = (folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line.removeprefix("error: ") for line in log if line.startswith("error: ")]
        why = "\n".join(errors) or (log[-1] if log else "It ended without a word.")
        found = {**found, "state": "failed", "text": why}
    return found


def stop(probe_id: str) -> None:
    """End a probe and what it has started."""
    if found := process.find(layout.load(_folder(probe_id) / PROCESS)):
        process.end([found])


def _home() -> Path:
    return registry.home() / "probes"


def _folders() -> list[Path]:
    return [folder for folder in _home().glob("*") if ID.fullmatch(folder.name)]


def _folder(probe_id: str) -> Path:
    if not ID.fullmatch(probe_id) or not (_home() / probe_id).is_dir():
        raise ConfigError("This probe is not known any more: start a new one.")
    return _home() / probe_id


def _clear(folder: Path) -> None:
    for name in (PROGRESS, TOML, LOG, PROCESS):
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()
