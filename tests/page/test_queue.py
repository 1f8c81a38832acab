"""The Queue tab in a real browser: what its rows say, and moving, copying, removing and stopping with a way back."""

import pytest

from library.runs import queue, reader, start
from tests.page.test_runs import config, queue_tab, shows
from tests.training import wait_for

pytestmark = pytest.mark.browser


def put(folder, name, **more):
    return queue.add_to_queue(
        start.job_of_config(config(folder, name, **more)), estimate=queue.Estimate(2000, 3.0, 17.3)
    )


def test_entries_are_moved_copied_removed_and_stopped_with_a_way_back(visit, tmp_path):
    put(tmp_path / "out", "zero", seed=1)
    wait_for(lambda: any(run.state == "running" for run in reader.runs()), 30)
    for seed, name in enumerate(("one", "two", "three"), 2):
        put(tmp_path / "out", name, seed=seed)
    visitor = queue_tab(visit())
    page, answer = visitor.page, visitor.page.locator(".queue .answer")
    row = page.locator(".entry", has_text="two").first
    visitor.until("2,000 steps · about 1 h 40 min", ".entry small")  # no GPU memory, as there is no GPU
    visitor.until("Starts about", ".entry .when")
    row.get_by_text("Unlike the defaults:").wait_for()  # no form of its kind was opened
    differing = row.locator(".unlike").inner_text()  # files, which all entries name, come last
    assert "Seed 3" in differing and "instead of" not in differing and "Base model" not in differing

    page.locator(".queue").evaluate("queue => queue.scrollIntoView()")
    handle = row.locator(".handle").bounding_box()  # by the mouse, to the top
    first = page.locator(".entry[data-state=waiting]").first.bounding_box()
    page.mouse.move(handle["x"] + 5, handle["y"] + 5)
    page.mouse.down()
    page.mouse.move(handle["x"] + 5, first["y"] + 5, steps=5)
    page.mouse.up()
    visitor.until("two is number 1 of 3 waiting.", ".queue .answer")
    shows(visitor, ("zero", "running"), ("two", "waiting"), ("one", "waiting"), ("three", "waiting"))
    page.get_by_label("Duplicate: two").focus()  # by keys, which say what they did
    page.keyboard.press("Alt+ArrowDown")
    visitor.until("two is number 2 of 3 waiting.", ".queue .answer")
    assert page.evaluate("document.activeElement.ariaLabel") == "Duplicate: two"

    page.keyboard.press("Enter")
    visitor.until("two-2 is in the queue", ".queue .answer")
    page.get_by_label("Remove: two-2").wait_for()  # the list comes by itself, after the answer
    answer.get_by_role("button", name="Undo").click()
    visitor.until("two-2 is removed", ".queue .answer")
    page.get_by_label("Remove: one").click()
    shows(visitor, ("zero", "running"), ("two", "waiting"), ("three", "waiting"))
    answer.get_by_role("button", name="Undo").click()
    shows(visitor, ("zero", "running"), ("one", "waiting"), ("two", "waiting"), ("three", "waiting"))

    page.get_by_label("Stop: zero").click()
    visitor.until("the queue starts one.", ".queue .answer")
    answer.get_by_role("button", name="Stop and pause the queue").click()
    shows(visitor, ("one", "waiting"), ("two", "waiting"), ("three", "waiting"), ("zero", "stopped"))
    visitor.until("Paused: no new training starts.", ".queue .how")
    page.get_by_role("tab", name="Train", exact=True).click()
    visitor.until("took", ".live .line")
    page.locator(".live .acts").hover()  # the next run may not put its buttons under the mouse
    page.request.post(f"{visitor.address}api/v1/queue/resume", data={})
    visitor.until("Running now: one", ".live .next")
    assert visitor.state("stopped")


def test_a_pause_is_said_once(visit, tmp_path):
    put(tmp_path / "out", "zero")
    visitor = queue_tab(visit())
    visitor.click("Pause")
    visitor.until("Paused: no new training starts.", ".queue .how")
    assert visitor.page.locator(".queue").inner_text().count("no new training starts") == 1
    visitor.page.set_viewport_size({"width": 390, "height": 844})
    # The name has all of a phone's width. Both are measured at once, as reports make entries anew.
    visitor.page.wait_for_function("""() => {
      const [state, name] = [".state", "b"].map((part) => document.querySelector(`.queue .entry ${part}`));
      return state && name && name.getBoundingClientRect().top >= state.getBoundingClientRect().bottom;
    }""")


def test_a_listing_from_before_a_change_does_not_come_back_after_it(visit, tmp_path):
    queue.pause()
    for name in ("one", "two"):
        put(tmp_path / "out", name)
    visitor, held = queue_tab(visit()), []
    page = visitor.page
    shows(visitor, ("one", "waiting"), ("two", "waiting"))
    page.route("**/api/v1/queue", lambda route: held.append((route, route.fetch())), times=1)
    wait_for(lambda: page.wait_for_timeout(20) or held, 30)
    page.get_by_label("Sooner: two").click()
    shows(visitor, ("two", "waiting"), ("one", "waiting"))
    page.evaluate("""() => { window.orders = []; new MutationObserver(() => orders.push(
      document.querySelector('.queue .entry b').textContent)).observe(
      document.querySelector('.queue .entries'), { childList: true }); }""")
    ((route, answer),) = held
    route.fulfill(response=answer)
    for _ in range(2):
        with page.expect_response("**/api/v1/queue"):
            pass
    assert page.evaluate("orders") == []
