"""Questions of the page in a real browser: before a stop or kill that loses work, about captions and folders; and its
message when an optimizer's package is missing."""

import pytest

from kohya_gui.form import presets
from library import packages
from library.check import isolated
from library.config.formats import read_toml
from library.config.problems import Problem
from library.config.sections.captions import NO_CAPTIONS, UNREAD_CAPTIONS
from library.recipes import preset_files
from library.runs import layout, queue, reader, start, stop
from tests.data import make
from tests.page.test_runs import config
from tests.training import wait_for

pytestmark = pytest.mark.browser


def test_stop_now_and_kill_say_what_is_lost_and_do_nothing_until_it_is_meant(visit, tmp_path, monkeypatch):
    monkeypatch.setattr(stop, "lost_now", lambda run: ("step", 600.0))
    monkeypatch.setattr(stop, "lost_by_kill", lambda run: (4, 120.0))
    run = reader.find_run(start.begin_job(start.job_of_config(config(tmp_path / "out", "fox"))))
    visitor = visit()
    page = visitor.page
    visitor.until("Step", ".line")
    answer = page.locator(".acts .answer")
    visitor.click("Stop now")
    visitor.until("10 min of work on this step are lost", ".answer")
    for _ in range(2):
        with page.expect_response("**/own/panel"):
            pass
    assert "10 min of work" in answer.inner_text()  # a refresh of the panel must not remove the question
    answer.get_by_role("button", name="Cancel").click()
    page.wait_for_function("!document.querySelector('.answer').textContent")
    assert not layout.stop_asked(run.folder) and reader.find_run(run.id).state == "running"

    monkeypatch.setattr(stop, "hangs", lambda run: run.active)
    page.locator(".acts > [data-act=kill]").click()
    visitor.until("What was learned after step 4 is lost, 2 min of work. Kill it?", ".answer")
    answer.get_by_role("button", name="Cancel").click()
    assert reader.find_run(run.id).state == "running"
    page.locator(".acts > [data-act=kill]").click()
    answer.get_by_role("button", name="Kill", exact=True).click()
    assert visitor.state("stopped") == run.id and layout.stop_asked(run.folder) == "kill"

    run = reader.find_run(start.begin_job(start.job_of_config(config(tmp_path / "out", "cat"))))
    page.locator(f'[data-look="{run.id}"]').click()  # selects the new run in the panel
    page.wait_for_selector(f'.run[data-run="{run.id}"][data-state="running"]')  # until then it replaces its buttons
    page.locator(f'.acts[data-run="{run.id}"] > [data-act=now]').click()
    answer.get_by_role("button", name="Stop now", exact=True).click()
    wait_for(lambda: layout.stop_asked(run.folder) == "now", 60)
    wait_for(lambda: not reader.find_run(run.id).active, 60)


def test_training_without_captions_needs_one_confirmation(visit, served, monkeypatch):
    text = Problem("", "no image has a caption: write some", code=NO_CAPTIONS)
    bare = {"findings": [isolated.finding(text, "images", "hint")], "fit": None}
    monkeypatch.setattr(isolated, "check_reading", lambda reading, launch: bare)
    images = make.folder(served[1] / "bare", "cats")
    queue.pause()
    visitor = visit()
    page = visitor.page
    visitor.fill(
        pretrained_model_name_or_path="/models/base.safetensors",
        train_data_dir=images,
        resolution="1024",
        output_name="cat",
        output_dir=served[1] / "out",
    )
    visitor.click("Train")
    visitor.until("It has not started: no image has a caption")
    assert reader.runs() == []
    visitor.click("Write captions")
    page.locator(".images article img").first.wait_for()
    assert page.locator("#images-folder").input_value() == str(images)
    visitor.tab("LoRA")
    visitor.click("Add to queue")
    visitor.until("It is not in the queue: no image has a caption")
    assert queue.read_queue().waiting == []
    visitor.click("Add it without captions")
    visitor.until("cat is in the queue")
    visitor.fill(output_name="dog")
    visitor.click("Add to queue")
    visitor.until("dog is in the queue")
    wait_for(lambda: len(queue.read_queue().waiting) == 2, 10)  # these images were confirmed already


def test_captions_with_another_extension_are_offered_first(visit, tmp_path, monkeypatch):
    unread = Problem("", "all .txt files are not used", code=UNREAD_CAPTIONS, fix={"caption_extension": ".txt"})
    report = lambda reading, launch: {  # noqa: E731
        "findings": [isolated.finding(unread, "captions", "hint", unread.fix)]
        if reading.config.captions.caption_extension == ".caption"
        else [],
        "fit": None,
    }
    monkeypatch.setattr(isolated, "check_reading", report)
    visitor = visit()
    visitor.put(
        pretrained_model_name_or_path="/models/base.safetensors",
        train_data_dir=str(make.folder(tmp_path, "cats")),
        resolution="1024",
        output_name="cat",
        output_dir=str(tmp_path / "out"),
        caption_extension=".caption",
    )
    visitor.click("Train")
    visitor.until("It has not started: caption files are not read")
    assert reader.runs() == [] and not visitor.page.get_by_role("button", name="Write captions").is_visible()
    visitor.page.locator(".message .fix").click()
    assert visitor.held()["values"]["caption_extension"] == ".txt"
    visitor.click("Train")
    visitor.until("Started cat")


def test_where_an_optimizer_is_missing_the_start_says_which_one_stands_in(visit, monkeypatch):
    chosen = max(preset_files.of_kind("lora", ["flux"]), key=lambda preset: preset.gigabytes)
    there = packages.is_installed
    monkeypatch.setattr(presets, "read_toml", lambda path: {**read_toml(path), "optimizer_type": "AdamW8bit"})
    monkeypatch.setattr(packages, "is_installed", lambda name: name != "bitsandbytes" and there(name))
    visitor = visit()
    visitor.click("Presets")
    visitor.page.locator(f'.preset:visible[data-preset="{chosen.id}"]').click()
    for where in (".start small", ".message p"):
        visitor.until("Optimizer is AdamW here, as AdamW8bit needs a package that is not installed", where)
    assert visitor.page.locator("#lora-optimizer_type").input_value() == "AdamW"
