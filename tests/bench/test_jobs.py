"""Measurements as files: begun, watched, stopped, and what is told of one that died."""

import json
import sys
import time

import pytest

from library.bench import jobs
from library.config.schema import ConfigError

PYTHON = (
    "import sys, time; from library.bench import jobs\n"
    "with jobs.begin('bench') as work:\n"
    "    work.phase('first', 1, 3); work.store({'results': [1]}); print('up', flush=True); time.sleep(60)\n"
)


@pytest.fixture
def stand_in(home, monkeypatch):
    """Commands are a process that begins to measure, and sleeps."""
    monkeypatch.setattr(jobs, "command", lambda arguments: [sys.executable, "-c", PYTHON])
    yield
    for job in jobs.all_jobs():
        jobs.stop(job)


def until(job, wanted, seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if wanted(found := jobs.at(job.folder)):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{jobs.at(job.folder).facts}, {jobs.tail(job)}")


def test_a_measurement_is_started_watched_and_stopped(stand_in):
    job = until(jobs.start("bench", ["bench", "--family", "flux"]), lambda j: j.facts.get("doing"))
    assert job.active and job.facts["doing"] == {"text": "first", "done": 1, "total": 3}
    assert jobs.find(job.id).id == job.id == jobs.newest("bench").id
    with pytest.raises(ConfigError, match="bench is still running"):
        jobs.start("doctor", ["doctor"])
    until(job, lambda j: "up" in jobs.tail(j))
    stopped = jobs.stop(job)
    assert stopped.state == "stopped" and stopped.result == {"results": [1]}
    assert jobs.stop(stopped).state == "stopped"


def test_one_whose_process_is_gone_is_told_so(home):
    with jobs.begin("bench") as work:
        pass
    facts = json.loads((work.folder / jobs.JOB).read_text()) | {"state": "running", "process_start": 1.0}
    (work.folder / jobs.JOB).write_text(json.dumps(facts))
    job = jobs.at(work.folder)
    assert job.state == "failed" and "ended without a word" in job.facts["error"]


def test_the_end_is_written_down(home):
    with pytest.raises(ConfigError), jobs.begin("bench") as wrong:
        raise ConfigError("there is no such model")
    assert jobs.at(wrong.folder).facts["error"] == "there is no such model"
    with pytest.raises(KeyboardInterrupt), jobs.begin("bench") as stopped:
        raise KeyboardInterrupt
    assert jobs.at(stopped.folder).state == "stopped"


def test_old_ones_go_and_strange_names_lead_nowhere(home):
    for number in range(jobs.KEPT + 2):
        with jobs.begin("bench") as work:
            work.store({"number": number})
    assert len(jobs.all_jobs()) == jobs.KEPT
    for name in ("../x", "/etc", "", "a" * 300, "no-such"):
        with pytest.raises(KeyError):
            jobs.find(name)
