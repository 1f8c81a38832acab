"""Runs and the queue in a real browser: nothing is lost when browsers, the page or the queue's worker end."""

import io
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile

import pytest
from PIL import Image

from kohya_gui.panel import actions
from library.config.building import build_config
from library.config.problems import FAILS_AGAIN, ConfigError, Problem
from library.families import config_class
from library.runs import explain, queue, queue_rows, reader, resume, start
from library.runs.record import Record
from library.trainings import reopening
from tests import fork_server
from tests.page.conftest import STAND_IN, WORKER
from tests.page.test_browser import FAINT, SMALL
from tests.training import config_of, demo, squares, wait_for  # noqa: F401 - fixtures

pytestmark = pytest.mark.browser
SCRIPT = "flux_train_network"


def config(folder, name, steps=2000, **more):
    values = {"output_dir": str(folder), "output_name": name, "max_train_steps": steps, **more}
    return build_config(config_class(SCRIPT), values)


def add(folder, name, steps=2000, **more):
    return queue.add_to_queue(start.job_of_config(config(folder, name, steps, **more)))


def rows(visitor):
    """Names and states in the Queue tab, from top to bottom."""
    entries = visitor.page.locator(".entry")
    return entries.evaluate_all("all => all.map(e => [e.querySelector('b').textContent, e.dataset.state])")


def queue_tab(visitor):
    visitor.page.get_by_role("tab", name="Runs", exact=True).click()
    visitor.page.locator(".queue").wait_for()
    return visitor


def press(visitor, name, entry):
    visitor.page.get_by_label(f"{name}: {entry}", exact=True).click()


def shows(visitor, *expected):
    wait_for(lambda: rows(visitor) == [list(row) for row in expected], 60)


def test_a_queue_of_three_with_a_failing_second_from_the_form(visit, tmp_path):
    visitor = visit()
    ready = {
        "pretrained_model_name_or_path": "/m/base.safetensors",
        "train_data_dir": "/images",
        "resolution": "1024",
        "output_dir": tmp_path / "out",
    }
    for name, rate in (("one", "1e-4"), ("two", "0.5"), ("three", "1e-4")):
        visitor.fill(**ready, output_name=name, max_train_steps=6, learning_rate=rate)
        visitor.click("Add to queue")
        visitor.until(f"{name} is in the queue")
    queue_tab(visitor)
    shows(visitor, ("three", "finished"), ("two", "failed"), ("one", "finished"))
    visitor.until("The GPU ran out of memory", ".entry .why")
    press(visitor, "Open in form", "two")  # its settings are corrected, and it is queued again
    visitor.page.locator("#lora-learning_rate").wait_for()
    wait_for(lambda: visitor.page.locator("#lora-learning_rate").input_value() == "0.5", 60)
    visitor.fill(learning_rate="1e-4")
    visitor.click("Add to queue")
    visitor.until("two is in the queue")
    queue_tab(visitor)
    shows(visitor, ("two", "finished"), ("three", "finished"), ("two", "failed"), ("one", "finished"))
    visitor.click("Clear what has ended")
    shows(visitor)


def test_two_browsers_change_one_queue(visit, tmp_path):
    first = queue_tab(visit())
    second = queue_tab(visit())
    queue.pause()
    for name in ("one", "two", "three"):
        add(tmp_path / "out", name)
    shows(second, ("one", "waiting"), ("two", "waiting"), ("three", "waiting"))
    first.page.get_by_label("Sooner: three").click()
    shows(second, ("one", "waiting"), ("three", "waiting"), ("two", "waiting"))
    gone = queue.read_queue().entries[1].id
    press(first, "Remove", "three")
    wait_for(lambda: len(queue.read_queue().entries) == 2, 60)
    answer = second.page.request.post(f"{second.address}api/v1/queue/{gone}/move", data={"by": -1})
    assert answer.status == 404 and "not in the queue any more" in answer.json()["error"]
    shows(second, ("one", "waiting"), ("two", "waiting"))
    # By the keyboard: what is gone or at its end gives the focus to what is next to it.
    focused = "document.activeElement.ariaLabel"
    wait_for(lambda: first.page.evaluate(focused) == "Remove: two", 60)
    first.page.get_by_label("Sooner: two").press("Enter")
    wait_for(lambda: first.page.evaluate(focused) == "Later: two", 60)
    first.page.keyboard.press("Enter")
    shows(second, ("one", "waiting"), ("two", "waiting"))
    for visitor in (first, second):
        visitor.until("Paused", ".how")
    second.page.locator(".queue").get_by_role("button", name="Continue").click()
    shows(first, ("one", "running"), ("two", "waiting"))
    for visitor in (first, second):
        visitor.room("Train")
        visitor.state("running")
        visitor.until("Next in the queue: two", ".next")


def test_stop_resume_sample_save_and_the_bundle(visit, tmp_path, monkeypatch):
    monkeypatch.setattr(actions, "DOCTOR", [sys.executable, "-c", "print('{\"healthy\": true}')"])
    run_id = start.begin_job(start.job_of_config(config(tmp_path / "out", "fox", 1200, sample_prompts="/prompts.txt")))
    visitor = visit()
    visitor.until("Step", ".line")
    visitor.until("waiting for data", ".split")
    for _ in range(2):
        before = visitor.page.locator(".sample").count()
        visitor.click("Sample now")
        wait_for(lambda n=before: visitor.page.locator(".sample").count() == n + 2, 60)
    visitor.click("Save now")
    visitor.until("-state", ".saved")
    compared = visitor.page.locator("dialog.viewer")
    visitor.page.locator(".sample").first.click()
    sizes = "all => all.every(image => image.complete && image.naturalWidth === 256)"
    wait_for(lambda: compared.locator("img").evaluate_all(sizes), 60)
    sources = compared.locator("img").evaluate_all("all => all.map(image => image.getAttribute('src'))")
    assert len(set(sources)) == 2
    compared.locator("input").press("End")
    assert "inset(0px 0% 0px 0px)" in compared.locator("img.over").evaluate("e => getComputedStyle(e).clipPath")
    visitor.page.keyboard.press("Escape")
    visitor.click("Stop after this step")
    assert visitor.state("stopped") == run_id
    stopped = reader.find_run(run_id).facts["step"]
    visitor.until("✓ loads", ".saved")
    with visitor.page.expect_download() as download:
        visitor.click("Support bundle")
    with zipfile.ZipFile(download.value.path()) as packed:
        assert json.loads(packed.read("doctor.json")) == {"healthy": True} and b"fox" not in packed.read("log.txt")
    visitor.click(f"Resume from step {stopped}")
    wait_for(lambda: visitor.state("running") != run_id, 60)
    second = wait_for(reader.active, 60)
    wait_for(lambda: any(event["kind"] == "step" for event in reader.read_events(second.folder)), 60)
    assert second.facts["resumes"] == run_id
    assert next(e for e in reader.read_events(second.folder) if e["kind"] == "step")["step"] == stopped + 1
    visitor.until(f"resumed after {stopped}", ".chart .x")
    assert "step 1" in visitor.page.locator(".chart .x").first.inner_text().splitlines()  # of the first run
    visitor.page.get_by_label("Run", exact=True).select_option(
        visitor.page.locator(".runs option", has_text=re.compile("stopped$")).get_attribute("value")
    )
    assert visitor.state("stopped") == run_id
    assert not visitor.page.get_by_role("button", name=re.compile("^Resume")).is_visible()  # it was resumed


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_the_queue_and_a_run_can_be_read_and_touched(visit, tmp_path, mode):
    queue.pause()
    for name in ("one", "a-very-long-name-of-a-training-that-has-to-be-broken-somewhere-" * 2):
        add(tmp_path / "out", name)
    with Record.start({}, "sdxl_train", tmp_path / "out", "older", "SDXL fine-tune"):
        pass
    start.begin_job(start.job_of_config(config(tmp_path / "out", "fox", 1200, sample_prompts="/prompts.txt")))
    visitor = visit(color_scheme=mode, has_touch=True)
    visitor.until("waiting for data", ".split")
    visitor.click("Sample now")
    visitor.page.locator(".sample").nth(1).wait_for()
    for selector in (".runs", ".run", ".acts"):  # state and actions are visible without scrolling
        box = visitor.page.locator(selector).bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= 900
    for room, words in (("Train", "waiting for data"), ("Runs", "Paused")):
        visitor.room(room)
        visitor.page.locator("body", has_text=words).wait_for()
        for width, height in ((1440, 900), (390, 844)):
            visitor.page.set_viewport_size({"width": width, "height": height})
            visitor.has_none(FAINT)
            visitor.has_none(SMALL)
            assert visitor.page.evaluate("document.documentElement.scrollWidth") == width


PAGE = """
import sys
from kohya_gui import app
from library.runs import queue, start
start.launch_command = lambda path, script, **how: ([sys.executable, {stand_in!r}, "--config_file", str(path)], dict())
queue.RUNNER = [sys.executable, "-c", {worker!r}]
sys.exit(app.main(["--no-browser", "--port", sys.argv[1]]))
"""


@pytest.fixture
def page(visit, tmp_path):
    """The page in a separate process, and its address."""
    port = str(free_port())
    code = PAGE.format(stand_in=str(STAND_IN), worker=WORKER.format(stand_in=str(STAND_IN)))
    server = subprocess.Popen([sys.executable, "-c", code, port], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    wait_for(lambda: answers(f"http://127.0.0.1:{port}/"), 180)
    yield server, f"http://127.0.0.1:{port}/"
    server.kill()
    server.wait()


def free_port():
    import socket

    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        return free_socket.getsockname()[1]


def answers(address):
    try:
        return urllib.request.urlopen(address, timeout=60).status == 200
    except (urllib.error.URLError, OSError):
        return False


def test_closed_browsers_a_killed_page_and_a_power_cut(chromium, visit, page, tmp_path):
    from tests.page.conftest import Visit

    server, address = page
    visitor = Visit(chromium, address)
    add(tmp_path / "out", "one", 4000)
    run_id = visitor.state("running")
    visitor.context.close()  # closes the browser
    add(tmp_path / "out", "two", 4000)
    server.kill()  # kills the page's process
    server.wait()
    steps = reader.find_run(run_id).facts["step"]
    wait_for(lambda: reader.find_run(run_id).facts["step"] > steps, 60)
    visitor = visit()  # a visit to this process's page, which knows the runs from their files alone
    assert visitor.state("running") == run_id
    visitor.until("Next in the queue: two", ".next")
    for pid in (
        queue.read_queue().worker["pid"],
        reader.find_run(run_id).facts["pid"],
    ):  # as in a power cut
        os.kill(pid, 9)
    assert visitor.state("interrupted") == run_id
    visitor.until("The queue is halted, as", ".next")
    assert queue.state_of(queue.read_queue().waiting[0])[0] == "waiting"
    visitor.page.locator(".next").get_by_role("button", name="Continue").click()
    assert visitor.state("running") != run_id
    queue_tab(visitor)
    shows(visitor, ("two", "running"), ("one", "interrupted"))
    press(
        visitor, "Start again", "one"
    )  # nothing was saved, so it starts from the beginning once the other one has ended
    visitor.until("this one resumes when that has ended", ".queue .answer")
    shows(visitor, ("two", "running"), ("one", "waiting"), ("one", "interrupted"))


def test_a_real_training_of_the_demo_from_the_queue(visit, demo, squares, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(queue, "RUNNER", [sys.executable, "-m", "library.runs.worker"])
    monkeypatch.setattr(start, "subprocess", fork_server.DETACHED)  # forks the worker, which forks the training
    (tmp_path / "prompts.txt").write_text("zorb toy --w 64 --h 64 --s 1 --d 1\n", encoding="utf-8")
    values = {
        "train_data_dir": squares,
        "output_dir": tmp_path / "out",
        "max_train_steps": 6,
        "sample_prompts": tmp_path / "prompts.txt",
        "sample_every_n_steps": 3,
    }
    queue.add_to_queue(start.job_of_config(config_of(demo, SCRIPT, **values)))
    visitor = visit()
    visitor.page.set_default_timeout(90_000)
    visitor.state("finished")
    visitor.until("✓ loads", ".saved")
    visitor.until("computing", ".split")
    assert visitor.page.locator(".sample").count() == 2
    run = reader.runs()[0]
    assert run.facts["devices"] and run.facts["queued"] == queue.read_queue().entries[0].id
    assert (tmp_path / "out" / "flux-lora.safetensors").is_file()


@pytest.fixture
def sampled(served, tmp_path, monkeypatch):
    """A run with a sample, and a way to ask for its pictures."""
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    folder = tmp_path / "out" / "sample"
    folder.mkdir(parents=True)
    Image.new("RGB", (300, 200), "red").save(folder / "a.png")
    Image.new("RGB", (300, 200), "red").save(tmp_path / "secret.png")
    (folder / "b.png").write_text("no image")
    (folder / "c.png").symlink_to(tmp_path / "secret.png")
    (folder / "d.txt").write_text("text")
    places = [
        folder / "a.png",
        tmp_path / "secret.png",
        folder / "b.png",
        folder / "c.png",
        folder / "d.txt",
        "/etc/passwd",
        folder / ".." / ".." / "secret.png",
        "",
        folder,
    ]
    with Record.start({}, "sdxl_train", tmp_path / "out", "dog", "") as record:
        for number, place in enumerate(places):
            record.event("sample", file=str(place), step=1, number=number, prompt="<img src=x>")

    def ask(path):
        try:
            with urllib.request.urlopen(f"{served[0]}api/v1/runs/{path}", timeout=20) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read()

    return record.id, ask, len(places)


def test_images_are_those_of_a_run_and_no_others(sampled):
    run_id, ask, count = sampled
    status, headers, body = ask(f"{run_id}/samples/0?small=true")
    assert status == 200 and headers["content-type"] == "image/jpeg"
    assert max(Image.open(io.BytesIO(body)).size) == 192
    for place in ("0", "newest"):  # the first prompt's
        assert Image.open(io.BytesIO(ask(f"{run_id}/samples/{place}")[2])).size == (300, 200)
    wrong = [f"{run_id}/samples/{place}" for place in (*range(1, count), -1, 99, "x", "..%2f0")]
    wrong += ["..%2fx/samples/0", f"{run_id}%2f../samples/0", f"{run_id}x/samples/0?file=/etc/passwd"]
    for path in wrong:
        status, _, body = ask(path)
        assert status == (422 if path.endswith("/x") else 404), path
        assert b"root:" not in body and b"PNG" not in body, path


def test_options_that_this_version_does_not_have_are_named_where_a_run_is_opened(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    config = {"save": {"output_dir": "out", "old_way": 3}, "data": {"train_data_dir": "images", "seed": 5}}
    with pytest.raises(SystemExit), Record.start(config, SCRIPT, tmp_path / "out", "cat", "FLUX.1 LoRA") as record:
        raise SystemExit(3)
    run, words = reader.find_run(record.id), "have old_way, which this version does not have"
    (note,) = reopening.started_config(run).notes
    assert words in str(note)
    monkeypatch.setattr(start, "begin_job", lambda job: "the-new-run")
    assert words in str(reopening.resume_run(run).said)


@pytest.mark.parametrize(("code", "first"), [(FAILS_AGAIN, "open"), ("", "resume")])
def test_settings_come_first_where_the_same_ones_would_fail_again(tmp_path, monkeypatch, code, first):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    error = ConfigError(Problem("ae", ": {path} is too large", path="a", place="--", code=code))
    with pytest.raises(ConfigError), Record.start({}, SCRIPT, tmp_path / "out", "cat", "FLUX.1 LoRA") as record:
        raise error
    run = reader.find_run(record.id)
    acts = re.findall(r'class="(\w*)" data-act="(\w+)"', actions.buttons(run, [run]))
    assert acts[0] == ("primary", first) and [kind for kind, _ in acts].count("primary") == 1
    assert {"open", "resume", "bundle"} == {act for _, act in acts}
    (row,) = queue_rows.queue_rows(queue.Queue([queue.QueueEntry("e", SCRIPT, "", "cat", "out", run=run.id)]))
    words, hint = resume.describe_resume(run)
    assert (str(words), row.resume_words, row.resume_hint) == ("Start again", words, hint)  # as in the queue
    title = re.search(r'data-act="resume"([^>]*)>', actions.buttons(run, [run]))[1]
    assert bool(hint) == ("likely to fail again" in title) == bool(code)
    assert str(explain.advice(run.error)) == "ae: a is too large"  # no flag, which nobody types in a page


def test_a_run_from_a_shell_is_gone_on_with_once_and_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    shell = tmp_path / "shell"
    shell.mkdir()
    monkeypatch.chdir(shell)
    config = {"save": {"output_dir": "out", "output_name": "cat"}, "data": {"train_data_dir": "images"}}
    with pytest.raises(SystemExit), Record.start(config, SCRIPT, "out", "cat", "FLUX.1 LoRA") as record:
        state = shell / "out" / "cat-step00000003-state"
        state.mkdir()
        (state / "train_state.json").write_text('{"current_step": 3}')
        record.event("saved", file="out/cat-step00000003-state", step=3)
        raise SystemExit(3)
    monkeypatch.chdir(tmp_path)
    jobs = []
    monkeypatch.setattr(start, "begin_job", lambda job: jobs.append(job) or "the-new-run")
    run = reader.find_run(record.id)
    assert run.state == "failed" and "Resume from step 3" in actions.buttons(run, [run])
    resumed = reopening.resume_run(run)
    assert (str(resumed.said), resumed.run) == ("It resumes after step 3: this is the new run.", "the-new-run")
    (job,) = jobs
    assert job.resumes == run.id and job.folder == str(shell) and job.output == str(shell / "out")
    assert f'resume = "{state}"' in job.toml and 'train_data_dir = "images"' in job.toml
    monkeypatch.setattr(queue, "work", lambda: None)
    queue.add_to_queue(job)  # as if another browser had queued it first
    assert "Resume" not in actions.buttons(run, [run])
    with pytest.raises(ConfigError, match="resumed already"):
        reopening.resume_run(run)
