"""The Compile Lab: refused requests, and the tab in a real browser with stand-ins for measurements."""

import json
import sys
from pathlib import Path

import pytest

from kohya_gui.form.form import SettingsForm
from kohya_gui.form.tabs import FAMILY_TITLES, TABS
from kohya_gui.lab.lab import JOB_TITLES, LabTab, advised_options
from kohya_gui.server.json_api import ApiRequest
from library.config.formats import read_toml
from library.config.problems import ConfigError
from library.jobs import jobs
from library.jobs.work import begin_work
from library.measuring import candidates

STAND_IN = Path(__file__).with_name("lab_stand_in.py")


@pytest.fixture
def pretending(monkeypatch, tmp_path):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(jobs, "job_command", lambda arguments: [sys.executable, str(STAND_IN), *arguments])
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN.parents[2]))
    yield
    for job in jobs.jobs_of_kinds(*JOB_TITLES):
        jobs.stop_job(job, at_once=True)


@pytest.fixture
def lab(pretending, tmp_path):
    import gradio as gr

    with gr.Blocks():
        forms = {tab.id: SettingsForm(tab.id, FAMILY_TITLES, tab.configs, tab.basics) for tab in TABS}
        return LabTab(forms, {tab.id: tab.title for tab in TABS}, [tmp_path])


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"kind": "rm"}, "no such choice"),
        ({"kind": "bench", "model": "--out"}, "no such choice"),
        ({"kind": "bench", "model": "flux-tiny", "ways": "--fresh"}, "no such choice"),
        ({"kind": "bench", "model": "flux-tiny", "sizes": "512; rm -rf"}, "Image sizes"),
        ({"kind": "bench", "model": "flux-tiny", "sizes": "--out=/x"}, "Image sizes"),
        ({"kind": "bench", "model": "flux-tiny", "sizes": "512, 1000"}, "multiples of 64 from 64 to 8192"),
        ({"kind": "bench", "model": "flux-tiny", "batch": 0}, "Batch size"),
        ({"kind": "bench", "model": "lora", "form": "nonsense", "batch": 1}, "not what the form sends"),
        ({"kind": "bench", "model": ["flux-tiny"]}, "a text"),
    ],
)
def test_what_the_browser_may_not_ask(lab, sent, words):
    with pytest.raises(ConfigError, match=words):
        lab.start(ApiRequest(sent))
    assert not jobs.jobs_of_kinds(*JOB_TITLES)


def test_the_command_of_each_button(lab, monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(
        jobs, "start_job", lambda kind, arguments: commands.append(arguments) or jobs.BackgroundJob(Path("x"), {})
    )
    fields = {"model": "sdxl-tiny", "sizes": "512, 1024", "batch": 4, "extent": "step", "ways": "every"}
    lab.start(ApiRequest({"kind": "bench", **fields}))
    lab.start(ApiRequest({"kind": "profile", **fields}))
    lab.start(ApiRequest({"kind": "cache", "clean": True}))
    model = tmp_path / "m.safetensors"
    form = {"family": "flux", "values": {"pretrained_model_name_or_path": str(model)}, "launch": {}}
    lab.start(ApiRequest({"kind": "bench", "model": "lora", "form": json.dumps(form), "batch": 0}))
    of_model = ["bench", "--family", "sdxl", "--size", "tiny", "--resolution", "512,1024", "--batch", "4"]
    assert commands[0] == [*of_model, "--part", "step", "--candidate", "all"]
    of_one = [text.replace("512,1024", "512") for text in of_model]
    assert commands[1] == [*of_one, "--profile"] and commands[2] == ["cache", "--clean"]
    assert commands[3][1:4] == [str(jobs.jobs_folder() / "form.toml"), "--script", "flux_train_network"]
    assert read_toml(Path(commands[3][1])) == {"pretrained_model_name_or_path": str(model)}
    form["values"]["pretrained_model_name_or_path"] = "/etc/m.safetensors"
    with pytest.raises(ConfigError, match="outside"):
        lab.start(ApiRequest({"kind": "bench", "model": "lora", "form": json.dumps(form), "batch": 1}))


def test_form_accepts_only_known_choices(lab, tmp_path):
    with begin_work("bench") as work:
        work.store({"kind": "bench", "best": {"candidate": "compiled", "options": {"output_dir": "/etc"}}})
    assert advised_options(jobs.job_at(work.folder), 0) == candidates.NAMED["compiled"].chosen()
    applied = lab.apply(ApiRequest({"job": work.folder.name, "tab": "lora"}))
    assert applied["values"]["compile"] is True and applied["values"]["gradient_checkpointing"] is False
    for wrong in ({"job": "../x", "tab": "lora"}, {"job": work.folder.name, "tab": "nowhere"}):
        with pytest.raises(ConfigError):
            lab.apply(ApiRequest(wrong))


@pytest.mark.browser
def test_the_lab_in_a_browser(visit, pretending):
    visitor = visit()
    page = visitor.page

    def enter():
        page.get_by_role("tab", name="Lab", exact=True).click()
        page.locator(".lab .setup").wait_for()

    def shown(state, words):
        page.locator(".lab .state", has_text=state).wait_for()
        page.locator(".lab .body", has_text=words).wait_for()

    enter()
    assert not page.locator(".lab .found").is_visible()
    visitor.click("Check this machine")
    shown("Finished", "This machine can train.")
    assert page.locator(".lab dd", has_text="<script>").is_visible()

    # A bench is watched, survives a reload, and is stopped with what it has.
    page.locator("#lab-sizes").fill("128")
    visitor.click("Measure speed")
    shown("Running", "Training step at 512")
    assert page.get_by_role("button", name="Profile a step", exact=True).is_disabled() and page.locator(
        ".lab [role=progressbar]"
    ).get_attribute("aria-valuetext")
    visitor.open()
    enter()
    shown("Running", "eager")
    visitor.click("Stop")
    shown("Stopped", "eager")

    page.locator("#lab-sizes").fill("abc")
    visitor.click("Measure speed")
    visitor.until("Image sizes: write multiples of 64", where=".lab .message")
    page.locator("#lab-sizes").fill("512")
    visitor.click("Measure speed")
    shown("Finished", "Fastest: compiled, compared with eager")
    assert page.locator(".lab tr.best th code").inner_text() == "compiled"  # the page does not translate code

    # The best goes into the form, and nothing else of it changes.
    visitor.tab("LoRA")
    visitor.fill(output_name="cat")
    page.locator("#lora-gradient_checkpointing").evaluate("e => e.checked = true")
    enter()
    visitor.click("Apply the best to my config")
    page.locator("#lora-compile").wait_for()
    assert page.locator("#lora-compile").is_checked()
    assert not page.locator("#lora-gradient_checkpointing").is_checked()
    assert page.locator("#lora-output_name").input_value() == "cat"

    enter()
    visitor.click("Profile a step")
    shown("Finished", "Compiling fuses most.")
    assert page.locator(".lab td", has_text="aten::<b>mm</b>").is_visible()
    visitor.click("Delete compiled code")
    shown("Finished", "0.50 GB removed")
    assert page.evaluate("document.documentElement.scrollWidth") == 1440


@pytest.mark.browser
def test_a_measurement_at_work_has_no_verdict_yet_and_follows_the_language(visit, pretending):
    visitor = visit()
    page = visitor.page
    visitor.room("Lab")
    page.locator("#lab-sizes").fill("128")
    visitor.click("Measure speed")
    page.locator(".lab .body", has_text="eager").wait_for()
    assert not page.locator(".lab .which").is_visible()  # there is nothing else to choose
    assert not page.locator(".lab .advice").count()  # what is not measured yet may be faster
    page.get_by_label("Language").select_option("ja")
    page.locator(".lab .who strong", has_text="速度測定").wait_for()
    page.locator(".lab .files", has_text="ファイル：").wait_for()
    page.get_by_label("言語").select_option("en")
    page.locator(".lab .who strong", has_text="Speed test").wait_for()
    page.locator(".lab .files", has_text="Files: ").wait_for()
    visitor.click("Stop")
    page.locator(".lab .advice").wait_for()


@pytest.mark.browser
def test_a_late_answer_about_stopping_leaves_what_was_said_since(visit, pretending):
    visitor, held = visit(), []
    page = visitor.page
    visitor.room("Lab")
    page.locator("#lab-sizes").fill("128")
    visitor.click("Measure speed")
    page.locator(".lab .body", has_text="eager").wait_for()
    page.route("**/own/lab-stop", lambda route: held.append((route, route.fetch())))
    visitor.click("Stop")
    page.locator(".lab .state", has_text="Stopped").wait_for()
    page.locator("#lab-sizes").fill("abc")
    visitor.click("Measure speed")
    visitor.until("Image sizes: write multiples of 64", ".lab .message")
    ((route, answer),) = held
    with page.expect_response("**/own/lab-stop"), page.expect_response("**/own/lab"):  # the second follows the first
        route.fulfill(response=answer)
    visitor.until("Image sizes: write multiples of 64", ".lab .message")
    page.unroute_all()
