"""The benchmark of daily tasks: every task is done, and the table says what is measured."""

import json

from benchmarks import tasks, tasks_ours
from benchmarks.tasks_hands import Ground, Hands


def test_every_task_is_done():
    assert len(tasks.TASK_TITLES) == 10
    assert list(tasks_ours.TASKS) == list(tasks.TASK_TITLES)


def test_the_table_has_clicks_fields_and_the_spread_of_seconds():
    results = [tasks.TaskResult("find", 0, 1, [2.0, 1.0, 4.0]), tasks.TaskResult("queue", 2, 1, [3.0])]
    lines = tasks.result_table(results)
    assert lines[2].endswith("| 0 | 1 | 2.0 (1.0-4.0) |") and lines[3].endswith("| 2 | 1 | 3.0 |")
    assert {line.count("|") for line in lines} == {5}


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
