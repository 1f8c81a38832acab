"""The benchmark of daily tasks: every task has both sides, and the table says what is measured and what is not."""

import json

import pytest

from benchmarks import tasks, tasks_ours, tasks_rival
from benchmarks.tasks_hands import Ground, Hands


def test_every_task_has_both_sides():
    assert len(tasks.TASK_TITLES) == 10
    assert list(tasks_ours.TASKS) == list(tasks_rival.TASKS) == list(tasks.TASK_TITLES)
    assert set(tasks_rival.REMARKS) <= {name for name, task in tasks_rival.TASKS.items() if callable(task)}
    assert all(task.strip() and not task.endswith(".") for task in tasks_rival.TASKS.values() if isinstance(task, str))


def test_the_table_says_what_is_measured_and_what_is_not_fewer():
    rows = [
        tasks.TaskResult("find", tasks.Side(0, 1, [2.0, 1.0, 4.0]), tasks.Side(3, 0, [0.5])),
        tasks.TaskResult("queue", tasks.Side(2, 1, [3.0]), tasks.Side(instead="one waits")),
        tasks.TaskResult("print"),
    ]
    lines = tasks.result_table(rows)
    assert lines[2].endswith("| 0 | 1 | 2.0 (1.0-4.0) | 3 | 0 | 0.5 |")
    assert "| 2 | 1 | 3.0 | not possible |  |  |" in lines[3] and "not measured" in lines[4]
    assert f"- {tasks.TASK_TITLES['queue']}: one waits." in lines
    assert tasks.not_fewer(rows) == ["find: fields (1 and 0)", "find: seconds (2 and 0.5)"]
    assert {line.count("|") for line in lines[:5]} == {8}


def test_the_config_is_one_that_this_page_reads(tmp_path):
    from library import importers
    from library.families import RUNS, config_class

    (tmp_path / "a.png").write_bytes(b"x")
    ground = Ground(tmp_path, tmp_path / "model.safetensors", [tmp_path / "a.png"])
    path = ground.config("cat", network_dim=16)
    assert json.loads(path.read_text())["network_dim"] == 16
    assert len(list((tmp_path / "cat-images" / "10_zorb toy").iterdir())) == 24
    imported = importers.import_file(path, {script: config_class(script) for script in RUNS})
    assert imported.config.script == "sdxl_train_network"


def test_counting_begins_again_where_a_task_does():
    hands = Hands(None, clicks=3, fields=2)
    began = hands.began
    hands.start()
    assert (hands.clicks, hands.fields) == (0, 0) and hands.began >= began


def test_a_log_is_read_from_where_a_task_began(tmp_path):
    log = tmp_path / "log"
    log.write_text("one\n")
    rival = tasks_rival.Rival("", log)
    rival.forget()
    log.write_text("one\na line that is\n   broken\n")
    rival.until("line that is broken")
    with pytest.raises(TimeoutError, match="had none"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks_rival, "WAIT_SECONDS", 0.0)
        rival.until("one a line")
