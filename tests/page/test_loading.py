"""Loading configs in the browser: with mistakes, with prompts, and during another request."""

import json
import re
import threading

import pytest

from library.check import isolated
from library.config.ineffective import remarks
from library.runs import queue, reader
from tests.page.test_browser import filled

pytestmark = pytest.mark.browser


def test_response_for_another_form_is_dropped_or_requested_again(visit, served, tmp_path, monkeypatch):
    done, dims = threading.Event(), []

    def slow(reading, launch):
        assert done.wait(60)
        dims.append(reading.config.network.network_dim)
        return {"findings": isolated.findings_of_reading(reading), "fit": None}

    monkeypatch.setattr(isolated, "check_reading", slow)
    (served[1] / "late.toml").write_text("network_dim = 24\n", encoding="utf-8")
    visitor = filled(visit(), tmp_path / "out", network_dim="8")
    busy = lambda: visitor.page.wait_for_selector(".training:visible .bar[data-busy]")  # noqa: E731
    idle = lambda: visitor.page.wait_for_selector(".bar:not([data-busy])")  # noqa: E731

    def begin(button):
        done.clear()
        visitor.click(button)
        busy()

    begin("Check")
    visitor.page.get_by_placeholder("Config file").locator("visible=true").fill(str(served[1] / "late.toml"))
    visitor.click("Load config")
    visitor.until("Loaded late.toml")
    done.set()
    idle()
    assert "Loaded late.toml" in visitor.said() and visitor.page.locator(".message .undo").is_visible()
    visitor.page.locator(".message .undo").click()
    visitor.until("as it was before")
    begin("Check")
    visitor.fill(network_dim="9")
    done.set()
    visitor.until("No problems found")
    assert dims == [8, 8, 9]  # the edit during the check has started another check
    begin("Train")
    visitor.fill(train_batch_size="0")
    done.set()
    visitor.until("Started cat")  # it starts what was on screen when the button was pressed
    begin("Train")  # it cannot start beside the first training
    visitor.fill(train_batch_size="-1")
    done.set()
    visitor.until("so nothing has started")
    assert len(reader.runs()) == 1


@pytest.fixture
def checked(monkeypatch):
    """An event for which the checks of forms wait; the queue is paused."""
    done = threading.Event()

    def slow(reading, launch):
        assert done.wait(60)
        return {"findings": isolated.findings_of_reading(reading), "fit": None}

    monkeypatch.setattr(isolated, "check_reading", slow)
    with queue.changing() as data:
        data.paused = queue.BY_USER
    return done


def asks_before_leaving(visitor):
    return visitor.page.evaluate("() => !dispatchEvent(new Event('beforeunload', { cancelable: true }))")


def test_every_form_that_is_queued_during_a_check_gets_into_the_queue(visit, tmp_path, checked):
    visitor = filled(visit(), tmp_path / "out")
    for dim in (4, 8, 8, 32):  # pressed twice for the same form, it is one training
        visitor.fill(network_dim=dim, output_name=f"cat-{dim}")
        visitor.click("Add to queue")
    assert not queue.read_queue().waiting and asks_before_leaving(visitor)
    checked.set()
    visitor.until("cat-32 is in the queue")
    visitor.page.wait_for_selector(".bar:not([data-busy])")
    assert not asks_before_leaving(visitor)
    assert [entry.name for entry in queue.read_queue().waiting] == ["cat-4", "cat-8", "cat-32"]


def test_a_queued_form_with_problems_is_named_though_the_form_has_changed(visit, tmp_path, checked):
    visitor = filled(visit(), tmp_path / "out")
    for name, batch in (("cat-1", 1), ("cat-0", 0), ("cat-x", -1), ("cat-2", 2)):
        visitor.fill(train_batch_size=batch, output_name=name)
        visitor.click("Add to queue")
    checked.set()
    visitor.page.wait_for_selector(".bar:not([data-busy])")
    assert [entry.name for entry in queue.read_queue().waiting] == ["cat-1", "cat-2"]
    notes = visitor.page.locator(".unqueued")
    for note, name in zip(notes.all(), ("cat-0", "cat-x"), strict=True):
        assert f"{name} is not in the queue" in note.inner_text() and note.inner_text().count("Batch size") == 1
        assert note.locator("button:not(.jump)").count() == 1  # no fix, as the form is another now
    visitor.fill(train_batch_size=3, output_name="cat-0")  # what another button says does not put the notes away
    visitor.click("Check")
    visitor.until("No problems found")
    assert notes.count() == 2
    visitor.click("Add to queue")
    visitor.until("cat-0 is in the queue")
    assert notes.count() == 1 and "cat-x" in notes.inner_text()
    notes.get_by_role("button", name="Close").click()
    assert notes.count() == 0 and visitor.page.get_by_text("cat-0 is in the queue").is_visible()


def test_a_config_with_mistakes_is_loaded_and_its_fixes_mend_what_was_loaded(visit, served, tmp_path):
    path = served[1] / "wrong.toml"
    path.write_text(
        f'output_dir = "{(tmp_path / "out").as_posix()}"\nnetwork_dims = 24\nfull_bf16 = true\nmixed_precision = "no"\n'
        'max_train_steps = "many"\nseed = 7\nlr_restart_cycles = 3\n',
        encoding="utf-8",
    )
    visitor = filled(visit(), "/elsewhere", network_dim="8", train_batch_size="3")
    visitor.page.get_by_placeholder("Config file").locator("visible=true").fill(str(path))
    visitor.click("Load config")
    visitor.until("Loaded wrong.toml for SDXL").until("5 problems to fix")
    held = visitor.held()["values"]
    assert (held["seed"], held["full_bf16"], held["train_batch_size"]) == ("7", True, "1")
    assert "Steps: must be a whole number, got 'many'" in visitor.said()
    visitor.page.get_by_role("button", name="Fix Rank = 24").click()
    visitor.until("4 problems to fix")
    assert visitor.held()["values"]["network_dim"] == "24"
    visitor.page.get_by_role("button", name=re.compile("^Fix Mixed precision")).click()
    visitor.until("3 problems to fix")
    visitor.click("Check")
    visitor.until("Full bf16" if visitor.held()["values"]["mixed_precision"] == "no" else "Image folder")
    visitor.page.get_by_placeholder("Config file").locator("visible=true").fill(str(path))
    path.write_text("seed = = 7", encoding="utf-8")
    visitor.click("Load config")
    visitor.until("wrong.toml is not valid TOML")  # the file is refused, and the form stays
    assert visitor.held()["values"]["network_dim"] == "24"


def test_prompts_of_a_kohya_ss_json_come_into_the_prompt_form(visit, served):
    out = served[1] / "foxes"
    contents = {
        "LoRA_type": "Standard",
        "sdxl": True,
        "network_dim": 24,
        "output_dir": str(out),
        "output_name": "fox",
        "sample_prompts": "a red fox --w 640 --h 512\nthe sea --d 3",
    }
    (served[1] / "fox.json").write_text(json.dumps(contents), encoding="utf-8")
    visitor = visit()
    visitor.page.get_by_placeholder("Config file").locator("visible=true").fill(str(served[1] / "fox.json"))
    visitor.click("Load config")
    visitor.until("Loaded fox.json for SDXL")
    assert "kohya import" not in visitor.page.locator(".message").inner_html()
    file = out / "fox-prompts.txt"
    visitor.page.wait_for_function(
        "path => document.querySelector('#lora-sample_prompts').value === path", arg=str(file)
    )
    assert file.read_text(encoding="utf-8").splitlines() == ["a red fox --w 640 --h 512", "the sea --d 3"]
    visitor.click("Sample images")
    rows = visitor.page.locator(".prompts:visible ol > li textarea[data-prompt=prompt]")
    assert [row.input_value() for row in rows.all()] == ["a red fox", "the sea"]


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ('mixed_precision = "bf17"', "Mixed precision = bf16"),
        ('learning_rate = "1,5"', "Learning rate = 1.5"),
        ('loss_type = "hubber"', "Loss = Huber"),
    ],
)
def test_a_value_of_a_file_that_resembles_another_becomes_that_one(visit, served, text, fix):
    (served[1] / "near.toml").write_text(text + "\n", encoding="utf-8")
    visitor = visit()
    visitor.page.get_by_placeholder("Config file").locator("visible=true").fill(str(served[1] / "near.toml"))
    visitor.click("Load config")
    visitor.page.get_by_role("button", name=f"Fix {fix}", exact=True).click()
    visitor.until("Everything here is fixed")


def test_fixes_are_those_that_one_would_press(visit, monkeypatch):
    """A rate below zero becomes the preset's, and an option without effect is left out."""

    def idle(reading, launch):
        findings = [isolated.finding(remark, "settings", "hint", remark.fix) for remark in remarks(reading.config, [])]
        return {"findings": findings, "fit": None}

    monkeypatch.setattr(isolated, "check_reading", idle)
    visitor = filled(visit(), "/results", train_batch_size="1", learning_rate="0.0002")
    page = visitor.page
    begun = visitor.held()["values"]
    visitor.fill(learning_rate="-1", train_batch_size="-2")
    visitor.click("Print command")
    visitor.until("2 problems to fix")
    page.get_by_role("button", name=f"Fix Learning rate = {begun['learning_rate']}").click()
    visitor.until("1 problem to fix")
    page.get_by_role("button", name="Fix Batch size = 1").click()
    visitor.until("Everything here is fixed")
    assert visitor.held()["values"] == begun
    visitor.put(keep_tokens="3")
    visitor.click("Check")
    page.locator(".message .jump", has_text="Keep tokens").wait_for()
    page.get_by_role("button", name="Leave it out").click()
    assert visitor.held()["values"] == begun


def test_wrong_paths_and_names_are_reported_while_typing_and_old_counts_vanish(visit, served):
    from tests.curation.conftest import picture

    images = served[1] / "told" / "10_zorb"
    images.mkdir(parents=True)
    picture(1).save(images / "1.png")
    visitor = visit()
    page, invalid = visitor.page, "[data-option][aria-invalid]:visible"
    visitor.fill(train_data_dir=images.parent)
    page.locator(".datasets:visible .sum:not(:empty)").wait_for()
    wrong = {
        "pretrained_model_name_or_path": "/nowhere/base.safetensors",
        "train_data_dir": "/nowhere",
        "output_dir": "/nowhere/out",
        "output_name": "../../x",
    }
    visitor.fill(**wrong)
    for name in wrong:
        page.locator(f"#lora-{name}[aria-invalid]").wait_for()
    assert "outside" in page.locator("#lora-output_dir-help").inner_text()
    page.locator(".datasets:visible .sum:empty").wait_for(state="attached")
    right = {
        "output_name": "cat",
        "output_dir": served[1] / "new" / "out",
        "train_data_dir": images.parent,
        "pretrained_model_name_or_path": "org/model",
    }
    visitor.fill(**right)
    page.wait_for_function("selector => !document.querySelector(selector)", arg=invalid.replace(":visible", ""))
