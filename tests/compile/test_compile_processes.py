"""Processes that compile graphs: full pipes, ends at any moment, and what becomes of the calls that they had taken."""

import os
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from library import families
from library.config.building import build_config
from library.train.compiling import compile_process, fingerprint
from library.train.compiling.background_graphs import BackgroundGraphs
from library.train.compiling.compile_process import CompileProcess, CompileProcesses

# Answers each number as `compile_worker` does, after `before` has run with the numbers so far.
ANSWERS = """
import json, os, signal, sys
sys.stdin.readline(); sys.stdin.readline()
taken = []
while line := sys.stdin.readline().strip():
    taken.append(int(line))
    {before}
    print(json.dumps({{"compiled": line}}), flush=True)
"""
SIGKILL = "os.kill(os.getpid(), 9)"
A_CALL = SimpleNamespace(path="", as_json=lambda: {})


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Sets the program of processes to come."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def choose(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.setattr(compile_process, "WORKER", name)

    return choose


def job(calls: int, **more: Any) -> dict[str, Any]:
    return {"settings": {}, "calls": [{}] * calls, **more}


def test_a_process_that_says_much_before_it_reads_its_long_job_is_no_deadlock(program):
    program("talks", "print('x' * 300_000, flush=True)" + ANSWERS.format(before="pass"))
    process, ready = CompileProcess(), list[int]()
    process.start(job(1, long="y" * 300_000), deque([0]), ready)
    try:
        assert process.wait(60) and ready == [0] and not process.failure
    finally:
        process.stop()


def test_what_others_write_before_an_answer_does_not_hide_it(program):
    program("half_a_line", ANSWERS.format(before="sys.stderr.write('50%'); sys.stderr.flush()"))
    process, ready = CompileProcess(), list[int]()
    process.start(job(2), deque([0, 1]), ready)
    try:
        assert process.wait(60) and ready == [0, 1] and not process.failure
    finally:
        process.stop()


@pytest.mark.parametrize(
    ("before", "compiled"),
    [(SIGKILL, [0, 1, 2]), (f"sys.exit({compile_process.LACKS_MEMORY})", [0, 1, 2]), ("sys.exit(1)", [1, 2])],
    ids=["killed", "GPU memory", "another error"],
)
def test_what_a_process_had_no_memory_for_is_compiled_by_another_one(before, compiled, program):
    if before == SIGKILL and not hasattr(compile_process.signal, "SIGKILL"):
        pytest.skip("only other systems than Windows tell who was killed")
    processes = CompileProcesses()
    program("lacks_memory", ANSWERS.format(before=before))
    processes.add(1)
    processes.start(job(3))
    assert processes.wait(60) and processes.failures and not processes.ready
    program("answers", ANSWERS.format(before="pass"))
    processes.add(1)
    processes._processes[1].start(job(3), processes.waiting, processes.ready)
    assert processes.wait(60) and sorted(processes.ready) == compiled
    processes.stop()


@pytest.mark.skipif(not hasattr(os, "getpgrp"), reason="Windows has groups of its own")
def test_ctrl_c_in_a_terminal_does_not_reach_it(program):
    program("says_its_group", "import os; raise SystemExit(f'group {os.getpgrp()}')")
    process = CompileProcess()
    process.start(job(0), deque(), [])
    assert process.wait(60) and process.failure.startswith("group ")
    assert process.failure != f"group {os.getpgrp()} (code 1)"


def test_the_process_that_goes_on_is_one_that_takes_further_calls():
    """One that was told to end would leave the others' calls to nobody."""
    processes, stopped = CompileProcesses(), []
    for name, unfinished in (("ending", []), ("compiling", [3])):
        stop = lambda name=name: stopped.append(name)  # noqa: E731
        one = SimpleNamespace(running=True, unfinished=unfinished, failure="", stop=stop, kill=lambda: None)
        processes._processes.append(one)
    assert processes.keep_one() and stopped == ["ending"]


@pytest.mark.parametrize("ready", [[], [0], [1, 0]])
def test_processes_that_have_ended_early_without_a_failure_are_not_waited_for(ready):
    processes = CompileProcesses()
    graphs = BackgroundGraphs([A_CALL] * 2, processes, None, torch.device("cpu"))
    processes.ready, graphs.pauses = ready, [0.1] * len(ready)
    assert bool(graphs.why_ended) is (len(ready) < 2)


def names_of(kinds, **values):
    config = build_config(families.config_class("sdxl_train_network"), {"compile": True, **values}, notes=[])
    world = SimpleNamespace(device=torch.device("cpu"), ranks=1)
    return fingerprint.fingerprint_settings(config, world, kinds)


def test_blocks_that_families_share_are_part_of_the_code(monkeypatch, tmp_path):
    monkeypatch.setattr(fingerprint, "PROJECT_ROOT", tmp_path)
    (tmp_path / "families/shared").mkdir(parents=True)
    names = []
    for text in ("x = 1", "x = 2"):
        (tmp_path / "families/shared/unet.py").write_text(text, encoding="utf-8")
        names.append(names_of([(1, 128, 128)]))
    assert names[0] != names[1]


def test_a_full_cache_for_one_size_is_none_for_another(monkeypatch):
    monkeypatch.setattr(fingerprint, "_code", lambda family: "")
    squares, smaller, other = [(1, 128, 128)], [(1, 96, 96)], [(2, 96, 96)]
    assert names_of(squares) != names_of(smaller)
    assert names_of(squares, compile_dynamic="true") == names_of(smaller, compile_dynamic="true")
    several = squares + smaller
    assert names_of(several) == names_of([*several, (1, 112, 80)]) != names_of(squares)
    assert names_of(several) != names_of([*several, *other])
