"""What the first process does when another one of its training is gone, and when it must not mind."""

import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from library.config.formats import to_toml
from library.distributed import process_watch
from library.distributed.process_watch import ProcessWatch
from library.runs import process, reader
from library.runs.record import Record
from library.train.errors import process_gone
from library.train.stop_requests import ControlRequests
from tests.training import config_of, ranks, runs_in

# A process whose group cannot be destroyed, as NCCL's with collectives that no other process answers.
PENDING = """
import sys, threading, torch.distributed as distributed
from library.cli.train_script import main
from library.families import config_class
from library.distributed import messages, world

def silent(self, own):
    raise distributed.DistStoreError("wait timeout after 1 s")

distributed.destroy_process_group = lambda: threading.Event().wait()
world.CLOSING, messages.Messages.first_problem = 5, silent
sys.exit(main(config_class("flux_train_network"), ["--config_file", sys.argv[1]]))
"""


@pytest.fixture
def first(tmp_path, monkeypatch):
    """The first of two processes, whose main thread hangs from now on, the other one, and how the first has ended."""
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(process_watch, "GRACE", 0.0)
    monkeypatch.setattr(process_watch, "PERIOD", 0.01)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended = threading.Event()
    world: Any = SimpleNamespace(rank=0, gather=lambda own: [own, process.identity(other.pid)])
    record = Record.start({}, "flux_train_network", tmp_path / "out", "m")
    watch = ProcessWatch(world, record)
    monkeypatch.setattr(process_watch.os, "_exit", lambda code: (watch.leave(), ended.set()))
    yield SimpleNamespace(process_watch=watch, other=other, ended=ended, record=record)
    other.kill()
    watch.leave()
    record.finish("finished")


def watch(first, stopped=False):
    first.process_watch.watch(lambda: process_gone("step 7", {}), lambda: stopped)


def test_a_process_ends_with_one_sentence_though_its_main_thread_hangs(first, capsys):
    watch(first)
    assert not first.process_watch.gone
    first.other.kill()
    assert first.ended.wait(60)
    run = reader.run_at(first.record.folder)
    assert run.state == "failed" and str(run.error).startswith("another process of this training has ended")
    assert capsys.readouterr().err.splitlines() == [f"error: {run.error}"]


def test_what_it_does_alone_comes_to_its_end(first):
    with first.process_watch.not_needed():
        watch(first)
        first.other.kill()
        first.other.wait()
        assert first.process_watch.gone and not first.ended.wait(0.2)
    assert first.ended.wait(60)


def test_where_nothing_more_is_done_together_the_other_may_end(first):
    watch(first)
    first.process_watch.leave()
    first.other.kill()
    first.other.wait()
    assert not first.process_watch.gone and not first.ended.wait(0.2)


def test_a_stop_before_the_first_step_is_no_failure(first, capsys):
    watch(first, stopped=True)
    first.other.kill()
    assert first.ended.wait(60)
    assert reader.run_at(first.record.folder).state == "stopped" and not capsys.readouterr().err


def test_the_signal_of_a_launcher_that_has_lost_a_process_is_no_wish_to_stop(first):
    requests = ControlRequests(first.record, process_watch=first.process_watch)
    first.other.kill()
    first.other.wait()
    requests._interrupt(signal.SIGTERM, None)
    requests._handle_signal(signal.SIGTERM)
    assert not requests.stop_requested()
    requests._handle_signal(signal.SIGINT)  # somebody's own
    assert requests.stop_requested()


def test_the_error_is_printed_where_the_processes_cannot_be_parted(demo, squares, tmp_path):
    config = config_of(demo, "flux_train_network", train_data_dir=squares, output_dir=tmp_path / "out")
    (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
    both = ranks(["-c", PENDING, tmp_path / "run.toml"])
    said = [process.communicate(timeout=600)[0] for process in both]
    print(*said)
    assert [process.returncode for process in both] == [1, 1]
    (line,) = [line for line in said[0].splitlines() if line.startswith("error: ")]
    assert "has not answered in time" in line and "Thread 0x" not in said[0] and "Traceback" not in said[0]
    (run,) = map(reader.run_at, runs_in(tmp_path / "out"))
    assert (run.state, f"error: {run.error}") == ("failed", line)
