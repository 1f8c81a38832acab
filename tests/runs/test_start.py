"""Starting and stopping real processes: they outlive who started them, get secrets by environment, and end wholly."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from library.config.building import build_config
from library.config.formats import read_toml
from library.config.problems import ConfigError
from library.families import config_class
from library.runs import reader, registry, start, stop

ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import os, subprocess, sys, time
from library.runs.record import Record
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with Record.start({}, "flux_train_network", sys.argv[1], "cat", "FLUX.1 LoRA") as record:
    record.note(helper=helper.pid, seen=[os.environ.get(name) for name in ("WANDB_API_KEY", "HF_TOKEN")])
    for step in range(1, int(sys.argv[2]) + 1):
        if record.stop_requested():
            break
        record.step({"step": step, "loss": 0.1})
        time.sleep(0.05)
    helper.kill()
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def config(tmp_path, **more):
    return build_config(
        config_class("flux_train_network"), {"output_dir": str(tmp_path / "out"), "output_name": "cat", **more}
    )


def launch(tmp_path, monkeypatch, steps=2000, code=CHILD, **more):
    arguments = [sys.executable, "-c", code, str(tmp_path / "out"), str(steps)]
    monkeypatch.setattr(start, "launch_command", lambda path, script, **how: (arguments, {}))
    return start.begin_job(start.job_of_config(config(tmp_path, **more)))


def wait(run_id, condition):
    deadline = time.monotonic() + 120
    while not condition(reader.find_run(run_id)):
        assert time.monotonic() < deadline, reader.find_run(run_id).facts
        time.sleep(0.05)
    return reader.find_run(run_id)


def test_a_run_goes_from_starting_to_finished(tmp_path, monkeypatch):
    run_id = launch(tmp_path, monkeypatch, steps=3)
    assert reader.find_run(run_id).state in ("starting", "running")
    run = wait(run_id, lambda run: run.state == "finished")
    assert run.facts["step"] == 3 and run.folder.parent == tmp_path / "out" / "runs"
    assert read_toml(run.folder / "run.toml") == {"output_dir": str(tmp_path / "out"), "output_name": "cat"}


def test_secrets_go_by_environment_and_into_no_file(tmp_path, monkeypatch):
    run_id = launch(tmp_path, monkeypatch, steps=1, wandb_api_key="canary-1", huggingface_token="canary-2")
    run = wait(run_id, lambda run: run.state == "finished")
    assert run.facts["seen"] == ["canary-1", "canary-2"]
    for file in run.folder.iterdir():
        assert file.name == "run.json" or b"canary" not in file.read_bytes(), file


def test_a_kill_ends_every_process(tmp_path, monkeypatch):
    run_id = launch(tmp_path, monkeypatch)
    run = wait(run_id, lambda run: run.facts.get("step", 0) > 0 and "helper" in run.facts)
    stop.request(run_id, "kill")
    assert reader.find_run(run_id).state == "stopped"
    for pid in (run.facts["pid"], run.facts["helper"]):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_stop_after_this_step_lets_it_finish(tmp_path, monkeypatch):
    run_id = launch(tmp_path, monkeypatch)
    wait(run_id, lambda run: run.facts.get("step", 0) > 0)
    stop.request(run_id, "after_step")
    assert reader.find_run(run_id).state in ("stopping", "stopped")
    assert wait(run_id, lambda run: not run.active).state == "stopped"
    with pytest.raises(ValueError, match="after_step or now, or by kill"):
        stop.request(run_id, "soon")


def test_only_one_run_at_a_time(tmp_path, monkeypatch):
    run_id = launch(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="^cat is still (starting|running): stop it, or wait"):
        launch(tmp_path, monkeypatch)
    stop.request(run_id, "kill")
    stop.request(launch(tmp_path, monkeypatch), "kill")


def test_a_run_outlives_the_process_that_started_it(tmp_path):
    page = (
        "import sys, os\nfrom library.runs import start\nfrom library.config.building import build_config\n"
        "from library.families import config_class\n"
        "start.launch_command = lambda path, _, **how: "
        "([sys.executable, '-c', sys.argv[2], sys.argv[1], '30'], dict())\n"
        "config = build_config(config_class('flux_train_network'), {'output_dir': sys.argv[1], 'output_name': 'cat'})\n"
        "print(start.begin_job(start.job_of_config(config)), flush=True)\nos._exit(9)\n"
    )
    server = subprocess.run(
        [sys.executable, "-c", page, str(tmp_path / "out"), CHILD], capture_output=True, text=True, env=os.environ
    )
    assert server.returncode == 9, server.stderr
    assert wait(server.stdout.strip(), lambda run: not run.active).state == "finished"


def test_a_trainer_that_cannot_even_start_is_a_failure_with_its_words(tmp_path, monkeypatch):
    code = "import sys; sys.exit('error: ae is not set: choose the file\\nerror: clip_l is not set')"
    run = wait(launch(tmp_path, monkeypatch, code=code), lambda run: not run.active)
    assert run.state == "failed" and run.error.splitlines() == ["ae is not set: choose the file", "clip_l is not set"]


def test_what_cannot_be_launched_is_reported_and_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "launch_command", lambda path, script, **how: ([str(tmp_path / "no-such-program")], {}))
    with pytest.raises(ConfigError, match="could not be started"):
        start.begin_job(start.job_of_config(config(tmp_path)))
    assert reader.runs()[0].state == "failed"


def test_what_is_started_on_windows_has_a_console_that_nobody_sees(tmp_path, monkeypatch):
    """Without any, each program that a training starts, such as a compiler, would open a window."""
    flags: list[int] = []

    def popen(arguments, creationflags, **how):
        flags.append(creationflags)
        if creationflags & 4:
            raise PermissionError("a job that its processes may not leave")
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.setattr(start.sys, "platform", "win32")
    monkeypatch.setattr(start.subprocess, "Popen", popen)
    for value, name in enumerate(("CREATE_NEW_PROCESS_GROUP", "CREATE_NO_WINDOW", "CREATE_BREAKAWAY_FROM_JOB")):
        monkeypatch.setattr(start.subprocess, name, 1 << value, raising=False)
    start._in_own_session(["python"])
    assert flags == [7, 3]


def test_an_output_folder_that_is_a_file_is_reported(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="output_dir"):
        start.begin_job(start.job_of_config(config(tmp_path)))
    assert reader.runs() == []


def test_what_could_not_be_remembered_is_no_training_that_starts(tmp_path, monkeypatch):
    def full(folder):
        raise ConfigError("the disk is full")

    monkeypatch.setattr(registry, "add_pointer", full)
    with pytest.raises(ConfigError, match="the disk is full"):
        start.begin_job(start.job_of_config(config(tmp_path)))
    assert not any((tmp_path / "out" / "runs").iterdir())
