"""Trainings are compared by what their files of prompts and data sets say, not by what these are called."""

import json
import os
import shutil

import pytest

from kohya_gui.form import compare
from kohya_gui.runs import differences
from library.config.building import build_config
from library.config.formats import toml_value
from library.config.problems import ConfigError
from library.families import config_class
from library.runs import file_contents, job_files, layout, queue, queue_rows, reader, start
from library.runs.record import Record
from library.trainings.comparing import compare_runs
from tests.page.test_helping import helper, question  # noqa: F401


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))


def recorded(tmp_path, name, **settings):
    """Record a training as the shell does, with settings by section."""
    with Record.start(settings, "flux_train_network", tmp_path / "out", name) as record:
        record.plan(1)
    return reader.run_at(record.folder)


def with_prompts(tmp_path, name, text, file="prompts.txt"):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return recorded(tmp_path, name, sample={"sample_prompts": str(path)})


def found(*runs):
    return [(row.option, row.words, [*map(str, row.values)]) for row in compare_runs(runs).options]


def test_prompts_that_were_edited_between_two_runs_differ_by_their_lines(tmp_path):
    one = with_prompts(tmp_path, "one", "a cat --w 512\na fox\n")
    two = with_prompts(tmp_path, "two", "# mine\na cat --w 512\na dog\n\n")
    assert found(one, two) == [("sample_prompts", "prompts differ", ["a fox", "a dog"])]
    three = with_prompts(tmp_path, "three", "a cat --w 512\n")
    assert found(one, two, three)[0][2] == ["a fox", "a dog", "none of these"]
    turned = with_prompts(tmp_path, "turned", "a fox\na cat --w 512\n")
    assert found(one, turned)[0][2] == ["in this order", "in another order"]
    many = with_prompts(tmp_path, "many", "".join(f"cat {number}\n" for number in range(9)))
    assert found(three, many)[0][2] == ["a cat --w 512", "cat 0; cat 1; cat 2; and 6 more"]


def test_lines_that_are_there_more_often_and_the_ends_of_long_lines_are_told_apart(tmp_path):
    one, two = with_prompts(tmp_path, "one", "a cat\na fox\n"), with_prompts(tmp_path, "two", "a cat\na fox\na cat\n")
    assert found(one, two)[0][2] == ["none of these", "a cat"]
    one, two = (with_prompts(tmp_path, name, json.dumps(["a very long prompt " * 20, name])) for name in ("x", "y"))
    assert found(one, two)[0][2] == ['… ery long prompt ", "x"]', '… ery long prompt ", "y"]']


def test_a_run_without_copies_is_compared_by_its_paths_as_its_files_may_say_something_else_by_now(tmp_path):
    old, new, same = (with_prompts(tmp_path, name, "a cat\n") for name in ("old", "new", "same"))
    (old.folder / "sample_prompts.txt").unlink()
    (tmp_path / "prompts.txt").write_text("a dog\n", encoding="utf-8")
    assert found(old, new) == found(old, new, same) == []
    other = with_prompts(tmp_path, "other", "a fox\n", "other.txt")
    assert found(old, other) == [("sample_prompts", "", ["prompts.txt", "other.txt"])]
    assert found(old, new, other)[0][1:] == ("prompts differ", ["prompts.txt", "a cat", "a fox"])


def test_a_link_in_the_folder_of_a_run_is_not_followed(tmp_path):
    run, other = (with_prompts(tmp_path, name, f"a {name}\n") for name in ("cat", "dog"))
    (tmp_path / "secret").write_text("a secret\n", encoding="utf-8")
    copy = run.folder / "sample_prompts.txt"
    copy.unlink()
    copy.symlink_to(tmp_path / "secret")
    assert found(run, other) == []


def test_the_same_prompts_in_other_files_are_no_difference(tmp_path):
    one = with_prompts(tmp_path, "one", "a cat\n")
    two = with_prompts(tmp_path, "two", "\ufeffa cat\r\n", "other/mine.txt")
    assert found(one, two) == []
    keys = [f"run:{run.id}" for run in (one, two)]
    assert differences.differences(keys, [tmp_path])["rows"] == []


def test_data_sets_differ_by_their_lines_and_files_that_are_gone_by_their_paths(tmp_path):
    path = tmp_path / "data.toml"
    runs = []
    for repeats in (1, 2):
        path.write_text(f"[[datasets]]\n[[datasets.subsets]]\nnum_repeats = {repeats}\n", encoding="utf-8")
        runs.append(recorded(tmp_path, f"run-{repeats}", data={"dataset_config": str(path)}))
    assert found(*runs) == [("dataset_config", "data sets differ", ["num_repeats = 1", "num_repeats = 2"])]
    gone = [recorded(tmp_path, name, data={"dataset_config": f"/{name}/data.toml"}) for name in ("a", "b")]
    assert found(*gone) == [("dataset_config", "", ["/a/data.toml", "/b/data.toml"])]


@pytest.mark.parametrize(
    ("one", "two"), [("/a/cats", "/b/cats"), ("/a/cats", "cats"), (f"{'x' * 200}1", f"{'x' * 200}2")]
)
def test_values_whose_short_forms_are_the_same_are_shown_whole(tmp_path, one, two):
    runs = [recorded(tmp_path, name, data={"train_data_dir": value}) for name, value in (("a", one), ("b", two))]
    assert found(*runs) == [("train_data_dir", "", [one, two])]


def test_the_page_of_runs_says_which_prompts_differ(tmp_path):
    runs = [with_prompts(tmp_path, name, f"a {name}\nboth\n") for name in ("cat", "dog")]
    (row,) = [
        [*map(str, row)]
        for row in differences.differences([f"run:{run.id}" for run in runs], [tmp_path])["rows"]
        if row[0] == "sample_prompts"
    ]
    assert row == ["sample_prompts", "Prompts differ", "a cat", "a dog"]


def test_a_form_is_compared_by_its_prompts_unless_the_page_may_not_read_them(helper, tmp_path):  # noqa: F811
    run = with_prompts(tmp_path, "cat", "a cat\n")
    (tmp_path / "mine.txt").write_text("a dog\n", encoding="utf-8")
    sides = {"first": "form", "second": f"run:{run.id}"}

    def rows(path):
        answer = helper.compare(question(family="flux", more=sides, sample_prompts=str(path)))
        return [[*map(str, row)] for row in answer["rows"] if row[0] == "sample_prompts"]

    assert rows(tmp_path / "mine.txt") == [["sample_prompts", "Prompts differ", "a dog", "a cat"]]
    secret = tmp_path.parent / f"{tmp_path.name}-secret.txt"
    secret.write_text("a secret\n", encoding="utf-8")
    assert "a secret" not in json.dumps(rows(secret)) and str(secret) in rows(secret)[0]


def test_entries_of_the_queue_differ_by_the_copies_of_their_files(tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "work", lambda: None)
    path = tmp_path / "prompts.txt"
    for name in ("one", "two", "three"):
        path.write_text("a cat" if name == "one" else "a dog", encoding="utf-8")
        toml = f'output_name = "{name}"\nsample_prompts = {json.dumps(str(path))}\n'
        how = ("flux_train_network", "FLUX.1 LoRA", name, str(tmp_path / "out"), toml)
        queue.add_to_queue(start.TrainingJob(*how))
    rows = {row.name: row.differences for row in queue_rows.queue_rows(queue.read_queue())}
    assert rows["two"] == (queue_rows.Difference("sample_prompts", "a cat", "a dog", "prompts differ"),)
    assert rows["three"] == ()


def test_a_training_that_starts_at_once_keeps_what_its_prompts_said(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "detached", lambda *how: pytest.fail("not reached"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\n", encoding="utf-8")
    values = {"output_dir": str(tmp_path / "out"), "output_name": "cat", "sample_prompts": str(prompts)}
    job = start.job_of_config(build_config(config_class("flux_train_network"), values))
    folder = start._prepare(job, ["0"])
    prompts.write_text("a dog\n", encoding="utf-8")
    assert toml_value(str(prompts)) in (folder / layout.TOML).read_text(encoding="utf-8")  # which it trains with
    contents = queue_rows.run_contents(reader.run_at(folder))
    assert contents["sample_prompts"] == file_contents.FileContent("", ("a cat",))
    key = f"run:{folder.name}"
    assert compare.contents_of_key(key, None, []) == {"sample_prompts": contents["sample_prompts"]}


def test_prompts_that_cannot_be_copied_do_not_keep_a_training_from_starting(tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("a cat\n", encoding="utf-8")
    values = {"output_dir": str(tmp_path / "out"), "sample_prompts": str(tmp_path / "prompts.txt")}
    job = start.job_of_config(build_config(config_class("flux_train_network"), values))

    def refuse(path, max_bytes):
        raise ConfigError("{path} cannot be read: closed", path=path)

    monkeypatch.setattr(job_files, "read_bytes", refuse)
    assert start._prepare(job, ["0"]).is_dir()


@pytest.mark.skipif(os.name == "nt", reason="Windows deletes no open file")
def test_copies_come_back_with_the_record_if_the_folder_of_a_run_is_deleted_while_it_trains(tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\n", encoding="utf-8")
    settings = {"sample": {"sample_prompts": str(tmp_path / "prompts.txt")}}
    with Record.start(settings, "flux_train_network", tmp_path / "out", "cat") as record:
        shutil.rmtree(record.folder)
    assert queue_rows.run_contents(reader.run_at(record.folder))["sample_prompts"].lines == ("a cat",)


def test_a_folder_that_cannot_be_listed_leaves_the_paths(tmp_path, monkeypatch):
    run = with_prompts(tmp_path, "cat", "a cat\n")

    def refuse(path):
        raise PermissionError(13, "closed", str(path))

    monkeypatch.setattr(type(tmp_path), "iterdir", refuse)
    assert queue_rows.run_contents(run)["sample_prompts"] == str(tmp_path / "prompts.txt")
