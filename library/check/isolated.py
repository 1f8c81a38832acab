"""The preflight check from the page, in a separate process, since it needs torch, which the page never loads."""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from library.config.building import Reading, working_fix
from library.config.command import PROJECT_ROOT
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import Message, MessageLike, Problem, as_problems, problem_from_json
from library.config.run_config import RunConfig
from library.config.schema import changed, flatten_sections
from library.runs import keys, queue

CHECK_TIMEOUT = 120.0  # timeout in seconds; 10,000 images take less than 10
Report = dict[str, Any]  # as library.check.report.Report.as_json


# The check needs torch for facts about the GPU and the compiler, and the page must never load torch.
# Why: docs/decisions/2026-11-20-check-in-a-process-of-its-own.md
def check_reading(reading: Reading[Any], launch: JsonMapping) -> Report:
    # A crash of the check is reported, but does not prevent training.
    return check_all([reading], launch)[0]


def check_all(readings: Sequence[Reading[Any]], launch: JsonMapping) -> list[Report]:
    """Return the reports on several forms, from one process."""
    requests = [
        {
            "script": reading.config.script,
            "values": sent(reading.config),
            "wrong": sorted(reading.wrong),
            "problems": [problem.as_json() for problem in reading.problems],
        }
        for reading in readings
    ]
    command = [sys.executable, "-m", "library.check"]
    try:
        completed = subprocess.run(
            command,
            input=json.dumps(requests),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=CHECK_TIMEOUT,
            env=environment_for_check(launch),
        )
    except subprocess.TimeoutExpired:
        why = Message("the check took more than {seconds} s and was given up", seconds=f"{CHECK_TIMEOUT:.0f}")
        return [failed(why, reading) for reading in readings]
    try:
        # Packages may print while they are imported; the reports are the last line.
        return [dict(report) for report in json.loads(completed.stdout.strip().splitlines()[-1])]
    except (ValueError, IndexError):
        error_lines = completed.stderr.strip().splitlines()
        why = error_lines[-1] if error_lines else Message("it ended with code {code}", code=completed.returncode)
        failure = Message("the check itself failed: {reason}", reason=why)
        return [failed(failure, reading) for reading in readings]


def sent(config: RunConfig) -> JsonObject:
    """Return the changed options as another process reads them, paths as text."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in flatten_sections(changed(config)).items()
    }


def environment_for_check(launch: JsonMapping) -> dict[str, str]:
    """Return what a process must know about the launch of the training."""
    paths = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **keys.key_environment(), "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    environment |= {"ACCELERATE_USE_CPU": "true"} if launch.get("cpu") in (True, "true") else {}
    number = str(launch.get("num_processes") or "1")
    return environment | ({"WORLD_SIZE": number} if number.isdecimal() and number != "1" else {})


def finding(text: MessageLike, topic: str, verdict: str, fix: Mapping[str, Any] = {}) -> JsonObject:
    problem = next(as_problems([text])) if isinstance(text, Message) else Problem("", text)
    return {**problem.as_json(), "topic": topic, "verdict": verdict, "fix": dict(fix)}


def known(reading: Reading[Any]) -> list[JsonObject]:
    return [finding(problem, "settings", "bad", working_fix(problem, reading.config)) for problem in reading.problems]


def failed(why: MessageLike, reading: Reading[Any]) -> Report:
    return {"findings": [*known(reading), finding(why, "other", "hint")], "fit": None, "failed": True}


def findings_to_fix(report: Report) -> list[JsonObject]:
    return [finding for finding in report["findings"] if finding["verdict"] == "bad"]


def estimate_of(report: Report) -> queue.Estimate:
    """Return what the queue shows of a report."""
    fit = report.get("fit") or {}
    return queue.Estimate(report.get("steps") or 0, fit.get("step") or 0.0, fit.get("peak") or 0.0)


def uncaptioned(report: Report) -> Problem | None:
    # Legal but rarely intended, so the page asks for confirmation.
    return next((problem_from_json(entry) for entry in report["findings"] if entry["code"] == "no_captions"), None)


def without_ineffective(report: Report, typed: Collection[str]) -> Report:
    # A preset sets options whose switch is off; the form already shows beside each why it has no effect.
    shown = [entry for entry in report["findings"] if entry["code"] != "ineffective" or entry["option"] in typed]
    return {**report, "findings": shown}
