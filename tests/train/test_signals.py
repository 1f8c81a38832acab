"""Ctrl+C and polite kills, of the training alone and through its launchers."""

import contextlib
import os
import signal
import sys
import time
import types

import psutil
import pytest

from library.config import environment
from library.config.formats import to_toml
from library.distributed.world import World
from library.runs import reader
from library.train import stop_requests
from library.train.journal import Journal
from library.train.saving import resume_check, state_files
from library.train.stop_requests import ControlRequests, Stopped
from tests import fork_server
from tests.source import ROOT
from tests.training import config_of, runs_in, wait_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
SCRIPT = "flux_train_network"
TWO = ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]

# Runs a script that waits after each phase until there is a file.
HELD = """
import pathlib, runpy, sys, time
from library.train.journal import Journal

go, phase, sys.argv = pathlib.Path(sys.argv[1]), Journal.phase, sys.argv[2:]

def held(*given):
    phase(*given)
    while not go.exists():
        time.sleep(0.01)

Journal.phase = held
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Training:
    """One that would continue for hours, started as `arguments` say; its files lie in `output`."""

    def __init__(self, process, output):
        self.process, self.output = process, output

    def until(self, kind):
        """Wait for an event of the run, and return it."""
        return wait_for(lambda: next((e for e in self.events() if e["kind"] == kind), None))

    def events(self):
        assert self.process.poll() is None, self.process.communicate()[0]
        return [event for folder in runs_in(self.output) for event in reader.read_events(folder)]

    @property
    def run(self):
        return reader.run_at(next(iter(runs_in(self.output))))

    def ended(self):
        """Exit code and words."""
        words = self.process.communicate(timeout=120)[0]
        return self.process.returncode, words


@pytest.fixture
def training(demo, squares, tmp_path):
    started = []

    def start(*before):
        config = config_of(demo, SCRIPT, train_data_dir=squares, output_dir=tmp_path / "out", max_train_steps=100000)
        (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
        script = [str(ROOT / "sd-scripts" / f"{SCRIPT}.py"), "--config_file", str(tmp_path / "run.toml")]
        # A process group of its own, as a shell gives it: a terminal's Ctrl+C reaches all that is in it.
        started.append(Training(fork_server.start([*before, *script]), tmp_path / "out"))
        return started[-1]

    yield start
    for process in started:
        if process.process.poll() is None:
            os.killpg(process.process.pid, signal.SIGKILL)


def is_saved(training):
    """There is a file, and a state that fits it."""
    folder = training.output / "flux-lora-state"
    assert (training.output / "flux-lora.safetensors").is_file() and resume_check.problems(folder) == []
    step = state_files.read_progress(folder)["current_step"]
    assert 0 < step == training.run.facts["step"]
    return True


def test_ctrl_c_finishes_the_step_and_saves(training):
    process = training()
    process.until("step")
    process.process.send_signal(signal.SIGINT)
    code, words = process.ended()
    assert code == 0, words
    assert "Stopping after this step" in words and "Traceback" not in words
    assert process.run.state == "stopped" and is_saved(process)


def test_before_the_first_step_it_ends_with_nothing_saved(training, tmp_path):
    process = training("-c", HELD, str(tmp_path / "go"))
    process.until("phase")
    process.process.terminate()
    (tmp_path / "go").touch()
    code, words = process.ended()
    assert code == 130 and "Stopped before the first step" in words and "Traceback" not in words, words
    assert process.run.state == "stopped" and process.run.error is None
    assert [path.name for path in process.output.iterdir()] == ["runs"]


def test_through_accelerate_launch(training):
    """A kill reaches only the launcher, which dies of it; the training notices, and saves."""
    process = training("-m", "accelerate.commands.launch", "--num_processes", "1", *TWO[2:])
    process.until("step")
    trainer = psutil.Process(process.run.facts["pid"])
    assert trainer.ppid() == process.process.pid
    process.process.terminate()
    assert process.ended()[0] == -signal.SIGTERM
    psutil.wait_procs([trainer], timeout=300)
    assert process.run.state == "stopped" and is_saved(process)


def test_ctrl_c_reaches_two_processes_from_terminal_and_launcher(training):
    process = training("-m", "accelerate.commands.launch", "--multi_gpu", *TWO)
    process.until("step")
    os.killpg(process.process.pid, signal.SIGINT)
    words = process.ended()[1]
    assert process.run.state == "stopped" and is_saved(process), words
    assert "Stopping after this step" in words


def test_kohya_train_ends_well_when_its_training_does(training, monkeypatch):
    launched = (
        "import sys; from library.runs import foreground, launcher; "
        f"arguments, variables = launcher.launch_command(sys.argv[-1], {SCRIPT!r}); "
        "sys.exit(foreground.run_in_foreground(arguments, variables))"
    )
    process = training("-c", launched)
    process.until("step")
    process.process.terminate()
    code, words = process.ended()
    assert code == 0, words
    assert process.run.state == "stopped" and is_saved(process)


# ---- the listener alone

LOOP = """
import sys, time
from library.train import stop_requests
from library.train.stop_requests import ControlRequests
stop_requests.REPEAT_SECONDS = {}
class Record:
    def say(self, text): print(text + "\\n", end="", flush=True)
    def finish(self, state): print(state, flush=True)
    def stopping(self, how): pass
    def stop_requested(self): return ""
    def requests(self): return ()
requests = ControlRequests(Record())
requests.listen()
requests.defer_signals()
requests.step_done()
print("up", flush=True)
while not requests.stop_requested(): time.sleep(0.01)
print("saving", flush=True)
{}
"""


def listener(code, together=0.2):
    """A process that listens, and then does this; signals within so many seconds are one."""
    process = fork_server.start(["-c", LOOP.format(together, code)])
    heard(process, "up\n")
    return process


def heard(process, words):
    wait_for(lambda: words in process.said() or process.poll() is not None)
    assert words in process.said()


def test_a_third_signal_ends_it_even_if_it_hangs_and_the_second_says_so():
    process = listener("import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()")
    process.terminate()
    heard(process, "Stopping")
    heard(process, "saving\n")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    heard(process, "once more kills the training: what is not saved by then is lost")
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.communicate(120)[0].endswith("\nstopped\n") and process.returncode == 128 + signal.SIGINT


def test_a_second_signal_before_the_first_step_promises_no_save(monkeypatch):
    said = []
    record = types.SimpleNamespace(say=said.append)
    requests = stop_requests.ControlRequests(record)
    monkeypatch.setattr(requests, "check", lambda: None)
    monkeypatch.setattr(requests, "_break_off", lambda: None)
    monkeypatch.setattr(stop_requests, "REPEAT_SECONDS", -1.0)
    requests.defer_signals()
    for _ in range(2):
        requests._handle_signal(signal.SIGINT)
    assert said[0].startswith("Stopping after this step") and "nothing to save" in said[1]


def test_a_second_signal_waits_for_a_save():
    process = listener("time.sleep(1); print('saved', flush=True)")
    process.terminate()
    heard(process, "Stopping")
    heard(process, "saving\n")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.communicate(120)[0].splitlines()[-1] == "saved" and process.returncode == 0


def test_signals_that_come_together_are_one_wish():
    process = listener("time.sleep(0.5)", together=10)
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    process.communicate(120)
    assert process.returncode == 0


def test_handlers_are_given_back(request):
    # A process that was started in the background ignores Ctrl+C, and so would this test.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    requests = ControlRequests()
    requests.listen()
    with pytest.raises(Stopped):
        signal.raise_signal(signal.SIGTERM)
    requests.forget()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interruption_that_code_in_c_answers_with_an_error_is_a_stop_all_the_same(demo, tmp_path):
    """PyTorch has been seen to make a ValueError of a signal that came while it read a tensor."""
    config = config_of(demo, SCRIPT, output_dir=tmp_path)
    world = World(config)
    with pytest.raises(Stopped), world, Journal(config, world, 0) as journal:
        with contextlib.suppress(Stopped):
            signal.raise_signal(signal.SIGINT)
        raise ValueError("could not determine the shape of object type 'torch.storage.UntypedStorage'")
    assert journal.requests.interrupted
    assert reader.run_at(next(iter(runs_in(tmp_path)))).state == "stopped"


@pytest.mark.parametrize("is_redirector", [True, False])
def test_the_python_of_a_windows_environment_that_only_starts_another_one_is_no_launcher(monkeypatch, is_redirector):
    parents = {7: (sys.executable.upper() if is_redirector else "accelerate.exe", 5)}
    monkeypatch.setattr(os.path, "normcase", str.lower)
    monkeypatch.setattr(os, "getppid", lambda: 7)
    monkeypatch.setattr(
        psutil,
        "Process",
        lambda pid: types.SimpleNamespace(exe=lambda: parents[pid][0], ppid=lambda: parents[pid][1]),
    )
    assert environment.starting_process(is_redirected=True) == (5 if is_redirector else 7)
    assert environment.starting_process(is_redirected=False) == 7


def test_a_launcher_that_was_killed_while_the_trainer_was_still_importing_is_a_stop(monkeypatch):
    assert not ControlRequests().stop_requested()
    gone = psutil.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr(environment, "PARENT", gone.pid)
    assert not ControlRequests().stop_requested()  # a shell that was closed, of a run that nohup has started
    monkeypatch.setattr(environment, "LAUNCHED", True)
    requests = ControlRequests()
    with pytest.raises(Stopped):
        requests.check()
