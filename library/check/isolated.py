"""The preflight check from the page, in a separate process, since it needs torch, which the page never loads."""

import json
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from library.check import check_process
from library.config.building import Reading, working_fix
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import Message, MessageLike, Problem, as_problems, problem_from_json
from library.config.run_config import RunConfig
from library.config.schema import changed, flatten_sections
from library.config.sections.captions import NO_CAPTIONS, UNREAD_CAPTIONS
from library.runs import queue

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
    try:
        code, output, errors = check_process.run_checks(requests, launch)
    except subprocess.TimeoutExpired:
        limit = f"{check_process.CHECK_TIMEOUT:.0f}"
        why = Message("the check was stopped, because it took more than {seconds} s", seconds=limit)
        return [failed(why, reading) for reading in readings]
    except OSError as error:  # no process can start
        failure = Message("the check itself failed: {reason}", reason=error)
        return [failed(failure, reading) for reading in readings]
    try:
        # Packages may print while they are imported; the reports are the last line.
        return [dict(report) for report in json.loads(output.strip().splitlines()[-1])]
    except (ValueError, IndexError):
        error_lines = errors.strip().splitlines()
        why = error_lines[-1] if error_lines else Message("it ended with code {code}", code=code)
        failure = Message("the check itself failed: {reason}", reason=why)
        return [failed(failure, reading) for reading in readings]


def sent(config: RunConfig) -> JsonObject:
    """Return the changed options as another process reads them, paths as text."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in flatten_sections(changed(config)).items()
    }


def finding(text: MessageLike, topic: str, verdict: str, fix: Mapping[str, Any] = {}) -> JsonObject:
    problem = next(as_problems([text])) if isinstance(text, Message) else Problem("", text)
    return {**problem.as_json(), "topic": topic, "verdict": verdict, "fix": dict(fix)}


def findings_of_reading(reading: Reading[Any]) -> list[JsonObject]:
    return [finding(problem, "settings", "bad", working_fix(problem, reading.config)) for problem in reading.problems]


def failed(why: MessageLike, reading: Reading[Any]) -> Report:
    return {"findings": [*findings_of_reading(reading), finding(why, "other", "hint")], "fit": None, "failed": True}


def findings_to_fix(report: Report) -> list[JsonObject]:
    return [finding for finding in report["findings"] if finding["verdict"] == "bad"]


def estimate_of(report: Report) -> queue.Estimate:
    """Return what the queue shows of a report."""
    fit = report.get("fit") or {}
    return queue.Estimate(report.get("steps") or 0, fit.get("step") or 0.0, fit.get("peak") or 0.0)


def find_caption_warning(report: Report) -> Problem | None:
    """Return the remark that no image has a caption, or that the captions of a folder are not read."""
    # Legal but rarely intended, so the page asks for confirmation.
    codes = (NO_CAPTIONS, UNREAD_CAPTIONS)
    return next((problem_from_json(entry) for entry in report["findings"] if entry["code"] in codes), None)


def has_unread_captions(warning: Problem) -> bool:
    """Whether there are captions, which another extension would read."""
    return warning.code == UNREAD_CAPTIONS


def without_ineffective(report: Report, typed: Collection[str]) -> Report:
    # A preset sets options whose switch is off; the form already shows beside each why it has no effect.
    shown = [entry for entry in report["findings"] if entry["code"] != "ineffective" or entry["option"] in typed]
    return {**report, "findings": shown}
