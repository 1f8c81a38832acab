"""The processes of checks: one waits ahead, and answers as a new one would."""

import io
import json
import os
import subprocess
import sys

import pytest

from library.check import answering, check_process, isolated
from library.config.building import Layer, read_layers
from library.families import config_class
from tests.training import wait_for


@pytest.fixture
def spare(monkeypatch):
    monkeypatch.setattr(check_process, "SPARE_DELAY", 0.0)
    process = check_process.SpareProcess()
    monkeypatch.setattr(check_process, "spare", process)
    yield process
    with process.taken() as left:
        if left is not None:
            left.kill()
            left.communicate()


@pytest.fixture
def echoes(monkeypatch):
    """Processes that repeat what they read, in place of those that import torch."""
    code = "import sys; print(sys.stdin.read(), end='')"
    pipe = subprocess.PIPE
    start = lambda: subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)  # noqa: E731
    monkeypatch.setattr(check_process, "_start", start)


def started(spare):
    spare.prepare()
    return wait_for(lambda: spare._process)


def report(launch, **values):
    reading = read_layers(config_class("sdxl_train_network"), [Layer(values)])
    return isolated.check_reading(reading, launch)


def test_one_process_waits_however_often_somebody_edits(spare, echoes):
    first = started(spare)
    spare.prepare()
    assert started(spare) is first
    with spare.taken() as taken, spare.taken() as second:
        assert taken is first and second is None
        spare.prepare()  # not beside a check
        assert spare._timer is None
        first.kill()
        first.communicate()


def test_the_waiting_process_takes_the_environment_of_the_moment_and_ends(spare, monkeypatch, tmp_path):
    waiting = started(spare)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    monkeypatch.setenv("WORLD_SIZE", "3")
    found = report({"cpu": True}, train_data_dir="images", network_dim=8, seed="x")
    texts = " ".join(str(finding["text"]) for finding in found["findings"])
    assert not found.get("failed") and "seed must be" in texts and "images" in texts
    assert waiting.returncode == 0
    with spare.taken() as left:
        assert left is None


@pytest.mark.parametrize("seen", [True, False])
def test_a_waiting_process_that_has_died_is_replaced(spare, echoes, monkeypatch, seen):
    waiting = started(spare)
    waiting.kill()
    waiting.wait()
    if not seen:  # it dies between the look at it and the question
        monkeypatch.setattr(waiting, "poll", lambda: None)
    code, output, _ = check_process.run_checks([{"script": "sdxl_train"}], {})
    assert code == 0 and json.loads(output)["requests"] == [{"script": "sdxl_train"}]


def test_a_process_that_is_not_asked_ends_quietly(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    answering.answer_requests()
    assert capsys.readouterr() == ("", "")


def test_a_request_names_what_only_the_launch_knows():
    environment = check_process.environment_for_check({"cpu": "true", "num_processes": 2})
    assert (environment["ACCELERATE_USE_CPU"], environment["WORLD_SIZE"]) == ("true", "2")
    assert {**os.environ}.items() - environment.items() <= {("PYTHONPATH", os.environ.get("PYTHONPATH"))}


def test_a_machine_that_starts_no_process_is_reported(spare, monkeypatch):
    def start():
        raise OSError("no memory")

    monkeypatch.setattr(check_process, "_start", start)
    spare._timer = object()  # as when its time has come
    spare._start()
    found = report({}, network_dim=8)
    assert found["failed"] and "no memory" in str(found["findings"][-1]["text"])
