"""What the page costs while nobody uses it, which is mostly beside a training."""

import re
import time

import pytest

from kohya_gui.panel import monitor
from kohya_gui.server import assets, scripts
from kohya_gui.server.json_api import ApiRequest
from library.runs import layout, reader
from library.runs.record import Record
from tests.training import wait_for


def test_an_idle_page_hardly_wakes_up(served):
    """Of whatever waits in this process: a server that polls a thousand times a second would be seen."""
    resource = pytest.importorskip("resource", reason="POSIX counts how often a process wakes up")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    time.sleep(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before < 300


def test_the_stopwatch_of_the_installed_gradio_is_taken_out():
    (tracker,) = assets.ASSETS_FOLDER.glob("statustracker-*.js")
    sent = assets.contents(tracker, False)
    assert len(tracker.read_bytes()) - len(sent) in range(30, 200) and sent.count(b"performance.now()") > 0


def test_what_moves_lays_nothing_out():
    """A margin that moves has the browser lay out the page for every frame, for as long as a training begins."""
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

    def done():
        """How many frames and events there were between two looks."""
        with page.expect_request("**/own/panel"):
            pass
        page.evaluate("drawn = 0")
        visitor.requests.clear()
        with page.expect_request("**/own/panel"):
            pass
        return page.evaluate("drawn"), [url for url in visitor.requests if "gradio_api" in url]

    wait_for(lambda: done() == (0, []), 60)  # the loader's picture takes some seconds to come to rest


@pytest.mark.browser
def test_a_panel_whose_server_does_not_answer_says_so_until_it_does(visit):
    visitor = visit()
    visitor.page.route("**/own/panel", lambda route: route.abort())
    said = visitor.page.locator(".live .lost", has_text="does not answer")
    said.wait_for()
    visitor.page.unroute("**/own/panel")
    said.wait_for(state="detached")
    visitor.complaints.clear()  # of requests that failed


@pytest.mark.browser
def test_what_gradio_could_not_fetch_is_fetched_at_a_later_look(visit, tmp_path):
    visitor = visit()
    page = visitor.page
    page.route("**/own/panel", lambda route: route.abort())  # nothing is known of the run before it has ended
    page.route("**/run/predict", lambda route: route.fulfill(status=500, json={"error": None}), times=1)
    with Record.start({}, "sdxl_train_network", tmp_path, "cat") as record:
        record.plan(1)
    with page.expect_response("**/run/predict"):
        page.unroute("**/own/panel")
    page.locator(f".run[data-run='{record.id}'][data-state=finished]").wait_for()  # and nothing is new of it
    visitor.complaints.clear()  # of requests that failed


def test_a_record_is_read_when_it_was_written_and_not_with_each_look(tmp_path, monkeypatch):
    with Record.start({}, "sdxl_train_network", tmp_path, "cat") as record, monkeypatch.context() as patched:
        monitor.RunPanel.mark(None, ApiRequest({"run": record.id}))
        opened = []
        for module, name in ((reader, "events"), (layout, "load")):
            real = getattr(module, name)
            patched.setattr(module, name, lambda *given, real=real: (opened.append(given[0]), real(*given))[1])
        patched.setattr(record, "_write", lambda: None)  # its signs of life are news, too
        _, fresh = monitor._read_shown_run(record.id)
        monitor.RunPanel.mark(None, ApiRequest({"run": record.id}))
        assert not opened
        record.step({"step": 1, "loss": 0.5})
        for _ in range(3):
            now = monitor._read_shown_run(record.id)[1]
        assert opened == [record.folder] and now["head"] != fresh["head"]
