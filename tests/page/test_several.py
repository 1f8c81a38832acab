"""Queueing one training for each of several values of an option."""

import json
import threading

import pytest

from kohya_gui.form.several import SeveralValues
from kohya_gui.form.tab import TrainingTab
from kohya_gui.form.tabs import TABS
from kohya_gui.server.json_api import ApiRequest
from library.check import isolated
from library.config.formats import read_toml
from library.config.problems import ConfigError, Problem
from library.runs import queue
from tests.page.test_browser import FAINT, SMALL

READY = {"pretrained_model_name_or_path": "/m/base.safetensors", "resolution": "1024", "max_train_steps": 3}


@pytest.mark.browser
def test_each_value_is_a_training_of_its_own_in_the_queue(visit, tmp_path):
    queue.pause()
    visitor = visit()
    visitor.fill(**{**READY, "output_dir": tmp_path / "out", "train_data_dir": tmp_path}, output_name="cat")
    visitor.page.locator("#lora-form .field:has([data-option=learning_rate]) .several").click()
    values = visitor.page.get_by_label("Values of Learning rate")
    assert values.get_attribute("placeholder").count(" ") == 2
    values.fill("1e-4")
    visitor.click("Add them to the queue")
    visitor.until("give 2 to 12 values")
    visitor.has_none(SMALL)
    visitor.has_none(FAINT)
    values.fill("5e-5, 1e-4 2e-4")
    values.press("Enter")
    visitor.until("3 trainings are in the queue, which is paused")
    waiting = queue.read_queue().waiting
    assert [entry.name for entry in waiting] == [f"cat-learning_rate-{value}" for value in ("5e-5", "1e-4", "2e-4")]
    tomls = [read_toml(queue.queue_folder() / f"{entry.id}.toml") for entry in waiting]
    assert [toml["learning_rate"] for toml in tomls] == [5e-5, 1e-4, 2e-4]
    assert {toml["max_train_steps"] for toml in tomls} == {3}
    assert visitor.page.locator("#lora-output_name").input_value() == "cat"  # the form stays as it was
    visitor.page.get_by_role("tab", name="Runs", exact=True).click()
    differing = "Unlike the form: Learning rate 5e-05 instead of"
    for entry, words in ((waiting[0], differing), (waiting[2], "Same settings as the form")):
        visitor.page.locator(f'[data-id="{entry.id}"] small', has_text=words).wait_for()


@pytest.fixture(scope="module")
def tabs(tmp_path_factory):
    return {"lora": TrainingTab(TABS[0], [tmp_path_factory.getbasetemp()])}


def test_every_value_is_checked_and_the_wrong_one_is_named(tabs, monkeypatch, tmp_path):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    wrong = isolated.finding(Problem("network_dim", "is too large for it"), "network", "bad")
    shared = isolated.finding(Problem("train_data_dir", "has no images"), "images", "bad")
    reports = [{"findings": [shared]}, {"findings": [wrong, shared]}]
    monkeypatch.setattr(isolated, "check_all", lambda readings, launch: reports)
    paths = dict.fromkeys(("pretrained_model_name_or_path", "train_data_dir", "output_dir"), str(tmp_path))
    sent = json.dumps({"family": "sdxl", "values": READY | paths, "launch": {}})
    request = ApiRequest({"tab": "lora", "sent": sent, "option": "network_dim", "values": "8 9000"})
    with pytest.raises(ConfigError) as error:
        SeveralValues(tabs).several(request)
    lines = ["train_data_dir has no images", "With network_dim = 9000: network_dim is too large for it"]
    assert str(error.value).splitlines() == lines and queue.read_queue().waiting == []


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"option": "learning_rate", "values": "1 1.0"}, "are the same"),
        ({"option": "learning_rate", "values": "1"}, "2 to 12 values"),
        ({"option": "learning_rate", "values": "1 two"}, "must be a number"),
        ({"option": "no_option", "values": "1 2"}, "not a setting of this form"),
        ({"option": "huber_c", "values": "0.1 0.2"}, "no effect here"),
        ({"option": "output_dir", "values": "/etc /out"}, "outside"),
        ({"sent": "[]", "values": "1 2"}, "not what the form sends"),
        ({"tab": "../x"}, "no such choice"),
        ({"tab": 3}, "tab.*text"),
    ],
)
def test_nothing_is_added_where_one_of_them_is_wrong(tabs, monkeypatch, tmp_path, fields, why):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    paths = dict.fromkeys(("pretrained_model_name_or_path", "train_data_dir", "output_dir"), str(tmp_path))
    sent = json.dumps({"family": "sdxl", "values": READY | paths, "launch": {}})
    with pytest.raises(ConfigError, match=why):
        SeveralValues(tabs).several(ApiRequest({"tab": "lora", "sent": sent, **fields}))
    assert queue.read_queue().waiting == []


@pytest.mark.browser
def test_a_name_that_waits_in_the_queue_is_refused_before_the_check_has_ended(visit, tmp_path, monkeypatch):
    """The full check takes seconds, and longer while a training runs."""
    queue.pause()
    visitor, real_check, done = visit(), isolated.check_reading, threading.Event()
    visitor.fill(**{**READY, "output_dir": tmp_path / "out", "train_data_dir": tmp_path}, output_name="cat")
    visitor.click("Add to queue")
    visitor.until("cat is in the queue")
    monkeypatch.setattr(isolated, "check_reading", lambda *arguments: (done.wait(60), real_check(*arguments))[1])
    try:
        visitor.click("Add to queue")
        visitor.until("cat waits in the queue for the same folder")
    finally:
        done.set()
    visitor.page.locator(".bar[data-busy]").wait_for(state="detached")
    assert "cat waits in the queue" in visitor.said() and len(queue.read_queue().waiting) == 1
