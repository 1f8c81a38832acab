"""The preflight check from the page: in a process of its own, since it needs torch, and the page never loads that."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from library.config.command import ROOT
from library.config.schema import to_toml
from library.files import write_atomic
from library.runs import keys

PATIENCE = 120.0  # seconds; 10,000 images take less than 10
Report = dict[str, Any]  # as library.train.checking.Report.as_json


def check(config: Any, launch: Mapping[str, Any]) -> Report:
    """The report on a config that is right by itself. A check that breaks is a hint, and keeps nobody from training."""
    with tempfile.TemporaryDirectory(prefix="kohya-check-") as folder:
        path = Path(folder) / "run.toml"
        write_atomic(path, to_toml(config))
        asked = [sys.executable, "-m", "kohya_gui.cli", "check", str(path), "--script", config.script, "--json"]
        try:
            done = subprocess.run(asked, capture_output=True, encoding="utf-8", errors="replace", check=False,
                                  timeout=PATIENCE, env=environment(launch), stdin=subprocess.DEVNULL)  # fmt: skip
        except subprocess.TimeoutExpired:
            return failed(f"the check took more than {PATIENCE:.0f} s and was given up")
    try:
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        said = done.stderr.strip().splitlines()
        return failed(f"the check itself did not work: {said[-1] if said else f'it ended with code {done.returncode}'}")


def environment(launch: Mapping[str, Any]) -> dict[str, str]:
    """What a process has to know of how the training will be started."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    known = {**os.environ, **keys.environment(), "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    known |= {"ACCELERATE_USE_CPU": "true"} if launch.get("cpu") in (True, "true") else {}
    number = str(launch.get("num_processes") or "1")
    return known | ({"WORLD_SIZE": number} if number.isdecimal() and number != "1" else {})


def failed(why: str) -> Report:
    """The report of a check that did not come to an end."""
    return {"findings": [{"topic": "other", "verdict": "hint", "text": why, "fix": {}}], "fit": None}


def problems(report: Report) -> list[dict[str, Any]]:
    """The findings that have to be mended before a start."""
    return [finding for finding in report["findings"] if finding["verdict"] == "bad"]
