"""The preflight check from the page: in a process of its own, since it needs torch, and the page never loads that."""

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
from library.runs import keys

CHECK_TIMEOUT = 120.0  # seconds; 10,000 images take less than 10
Report = dict[str, Any]  # as library.check.report.Report.as_json


# Why: docs/decisions/2026-11-20-check-in-a-process-of-its-own.md
def check_reading(reading: Reading[Any], launch: JsonMapping) -> Report:
    """The report on what came of reading a form, whatever is wrong with it already.

    A check that breaks says so, and keeps nobody from training.
    """
    return check_all([reading], launch)[0]


def check_all(readings: Sequence[Reading[Any]], launch: JsonMapping) -> list[Report]:
    """The reports on several forms, from one process."""
    given = [
        {
            "script": reading.config.script,
            "values": sent(reading.config),
            "wrong": sorted(reading.wrong),
            "problems": [problem.as_json() for problem in reading.problems],
        }
        for reading in readings
    ]
    asked = [sys.executable, "-m", "library.check"]
    try:
        done = subprocess.run(
            asked,
            input=json.dumps(given),
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
        return [dict(found) for found in json.loads(done.stdout.strip().splitlines()[-1])]
    except (ValueError, IndexError):
        said = done.stderr.strip().splitlines()
        why = said[-1] if said else Message("it ended with code {code}", code=done.returncode)
        failure = Message("the check itself failed: {reason}", reason=why)
        return [failed(failure, reading) for reading in readings]


def sent(config: RunConfig) -> JsonObject:
    """What differs from the defaults, for another process; tokens reach it by the environment."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in flatten_sections(changed(config)).items()
    }


def environment_for_check(launch: JsonMapping) -> dict[str, str]:
    """What a process has to know of how the training will be started."""
    paths = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH", "")]))
    known = {**os.environ, **keys.key_environment(), "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    known |= {"ACCELERATE_USE_CPU": "true"} if launch.get("cpu") in (True, "true") else {}
    number = str(launch.get("num_processes") or "1")
    return known | ({"WORLD_SIZE": number} if number.isdecimal() and number != "1" else {})


def finding(text: MessageLike, topic: str, verdict: str, fix: Mapping[str, Any] = {}) -> JsonObject:
    """One finding as JSON: a problem, or a plain sentence, and what the report says of it."""
    problem = next(as_problems([text])) if isinstance(text, Message) else Problem("", text)
    return {**problem.as_json(), "topic": topic, "verdict": verdict, "fix": dict(fix)}


def known(reading: Reading[Any]) -> list[JsonObject]:
    """The findings that a form tells by itself."""
    return [finding(problem, "settings", "bad", working_fix(problem, reading.config)) for problem in reading.problems]


def failed(why: MessageLike, reading: Reading[Any]) -> Report:
    """The report of a check that did not come to an end, with what was known before."""
    return {"findings": [*known(reading), finding(why, "other", "hint")], "fit": None, "failed": True}


def findings_to_fix(report: Report) -> list[JsonObject]:
    """The findings that have to be mended before a start."""
    return [finding for finding in report["findings"] if finding["verdict"] == "bad"]


def uncaptioned(report: Report) -> Problem | None:
    """That no image has a caption, if it is so: legal, and rarely meant, so that it is asked about."""
    return next((problem_from_json(one) for one in report["findings"] if one["code"] == "no_captions"), None)


def without_ineffective(report: Report, typed: Collection[str]) -> Report:
    """The report without remarks on options that have no effect and that nobody typed: a preset has set them, and they
    wait for the switch that is off now. The form says beside each why it has no effect."""
    kept = [one for one in report["findings"] if one["code"] != "ineffective" or one["option"] in typed]
    return {**report, "findings": kept}
