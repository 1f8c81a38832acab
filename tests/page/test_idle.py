"""The cost of the page while nobody uses it, which is mostly during a training."""

import re
import time

import pytest

from kohya_gui.gradio_host import assets
from kohya_gui.panel import monitor
from kohya_gui.server import scripts
from kohya_gui.server.json_api import ApiRequest
from library.runs import layout, reader
from library.runs.record import Record
from tests.training import wait_for


def test_an_idle_page_hardly_wakes_up(served):
    """Counts wake-ups of the whole process: a server that polls a thousand times a second would show."""
    resource = pytest.importorskip("resource", reason="POSIX counts how often a process wakes up")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    time.sleep(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before < 300


def test_the_stopwatch_of_the_installed_gradio_is_taken_out():
    (tracker,) = assets.ASSETS_FOLDER.glob("statustracker-*.js")
    sent = assets.contents(tracker, False)
    assert len(tracker.read_bytes()) - len(sent) in range(30, 200) and sent.count(b"performance.now()") > 0


def test_what_moves_lays_nothing_out():
    """An animated margin would make the browser lay out the page for every frame while a training starts."""
    styles = "".join(path.read_text(encoding="utf-8") for path in scripts.PAGE_FOLDER.rglob("*.css"))
    moving = re.findall(r"@keyframes \w+ \{((?:[^{}]*\{[^{}]*\})*) *\}", styles)
    moved = {name for frames in moving for name in re.findall(r"([\w-]+):", frames)}
    assert len(moving) >= 2 and moved <= {"transform", "opacity", "background", "box-shadow"}


@pytest.mark.browser
def test_an_idle_page_asks_for_news_only_and_draws_nothing(visit):
    visitor = visit()
    page = visitor.page
    page.evaluate("""() => { const next = requestAnimationFrame;
        window.requestAnimationFrame = (act) => { drawn++; return next(act); }; window.drawn = 0; }""")

    def activity():
        """The frames drawn and Gradio's events between two requests of the panel."""
        with page.expect_request("**/own/panel"):
            pass
        page.evaluate("drawn = 0")
        visitor.requests.clear()
        with page.expect_request("**/own/panel"):
            pass
        return page.evaluate("drawn"), [url for url in visitor.requests if "gradio_api" in url]

    wait_for(lambda: activity() == (0, []), 60)  # Gradio's loading animation runs for some seconds


@pytest.mark.browser
def test_a_panel_whose_server_does_not_answer_says_so_until_it_does(visit):
    visitor = visit()
    visitor.page.route("**/own/panel", lambda route: route.abort())
    notice = visitor.page.locator("#top .notices .message", has_text="does not answer")
    notice.wait_for()
    visitor.page.unroute("**/own/panel")
    notice.wait_for(state="detached")
    visitor.complaints.clear()  # the failed requests


@pytest.mark.browser
def test_windows_show_their_own_runs_also_after_the_server_was_gone(visit, tmp_path):
    for name in ("ant", "bee"):
        with Record.start({}, "sdxl_train_network", tmp_path, name) as record:
            record.plan(1)
    first, second = visit(), visit()
    ids = {run.facts["output_name"]: run.id for run in reader.runs()}
    second.page.get_by_label("Run", exact=True).select_option(ids["ant"])
    for visitor in (first, second):
        visitor.page.route("**/own/panel", lambda route: route.abort())
        visitor.page.locator("#top .notices .message").wait_for()
    with Record.start({}, "sdxl_train_network", tmp_path, "cat") as record:
        record.plan(1)
    for visitor in (first, second):
        visitor.page.unroute("**/own/panel")
    first.page.locator(f".run[data-run='{record.id}'][data-state=finished]").wait_for()
    second.page.locator(f".runs option[value='{record.id}']").wait_for(state="attached")
    assert second.page.locator(".run").get_attribute("data-run") == ids["ant"]
    for visitor in (first, second):
        visitor.page.locator("#top .notices .message").wait_for(state="detached")
        visitor.complaints.clear()  # the failed requests


def changes(run="", shown="", log=False):
    return monitor.RunPanel.changes(None, ApiRequest({"run": run, "shown": shown, "log": log}))


def test_a_panel_is_sent_what_has_changed_and_nothing_else(tmp_path):
    with Record.start({}, "sdxl_train_network", tmp_path, "cat") as record:
        record.plan(9)
        record.step({"step": 1, "loss": 0.5, "lr": 1e-4})
        record.event("sample", file="a.png", step=1, prompt="a cat", number=0)
    first = changes()
    assert first["parts"].keys() == set(monitor.PARTS)
    assert changes(shown=first["shown"]) == {"parts": {}}  # also after a restart of the server, which remembers nothing
    opened = changes(shown=first["shown"], log=True)
    assert list(opened["parts"]) == ["log"]
    assert list(changes(shown=opened["shown"])["parts"]) == ["log"]  # the fold was closed again
    for odd in ("x", "x " * 99, "a b c"):
        assert changes(shown=odd)["parts"].keys() == first["parts"].keys()


def test_a_step_changes_neither_the_buttons_nor_the_samples(tmp_path):
    with Record.start({}, "sdxl_train_network", tmp_path, "cat") as record:
        record.plan(9)
        for step in (1, 2):
            record.step({"step": step, "loss": 0.5, "lr": 1e-4})
        record.event("sample", file="a.png", step=2, prompt="a cat", number=0)
        before = changes()
        record.step({"step": 3, "loss": 0.4, "lr": 1e-4})
        sent = changes(shown=before["shown"])["parts"]
        assert {"head", "chart", "numbers"} <= sent.keys() <= {"head", "chart", "rates", "numbers", "usage"}
        assert "Step 3" in sent["head"] and "0.4000" in sent["numbers"]


def test_a_record_is_read_when_it_was_written_and_not_with_each_request(tmp_path, monkeypatch):
    with Record.start({}, "sdxl_train_network", tmp_path, "cat") as record, monkeypatch.context() as patched:
        changes(record.id)
        opened = []
        for module, name in ((reader, "new_events"), (layout, "load_facts")):
            real = getattr(module, name)
            patched.setattr(
                module, name, lambda *arguments, real=real: (opened.append(arguments[0]), real(*arguments))[1]
            )
        patched.setattr(record, "_write", lambda: None)  # heartbeats would count as changes
        before = changes(record.id)
        assert not opened
        record.step({"step": 1, "loss": 0.5})
        for _ in range(3):
            after = changes(record.id)
        assert opened == [record.folder] and after["parts"]["head"] != before["parts"]["head"]


@pytest.mark.browser
def test_what_a_request_without_an_answer_has_said_is_corrected_when_the_server_is_back(visit):
    visitor = visit()
    visitor.page.route("**/own/**", lambda route: route.abort())
    visitor.click("Check")
    visitor.until("does not answer: is it still running?", ".bar .message.bad")
    visitor.page.unroute("**/own/**")
    visitor.until("The page's server did not answer, but does now: try again.", ".bar .message.plain")
    visitor.page.get_by_text("is it still running?").first.wait_for(state="detached")
    visitor.complaints.clear()  # the failed requests


@pytest.mark.browser
def test_a_form_that_could_not_be_loaded_comes_when_the_server_is_back(visit):
    visitor = visit()
    for path in ("form*", "panel"):
        visitor.page.route(f"**/own/{path}", lambda route: route.abort())
    visitor.page.reload()
    visitor.until("does not answer: is it still running?", ".training .message")
    visitor.page.unroute("**/own/form*")
    visitor.page.unroute("**/own/panel")
    visitor.page.locator("form.settings:visible").wait_for()
    visitor.complaints.clear()


@pytest.mark.browser
def test_the_queue_says_no_more_that_the_server_does_not_answer_when_it_is_back(visit):
    visitor = visit()
    visitor.room("Runs")
    visitor.page.route("**/api/v1/queue", lambda route: route.abort())
    visitor.until("is it still running?", ".queue .answer.bad")
    visitor.page.unroute("**/api/v1/queue")
    visitor.page.wait_for_function("document.querySelector('.queue .answer').textContent === ''")
    visitor.complaints.clear()
