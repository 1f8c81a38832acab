"""The run in the panel stays when another one starts, and a resumed run is shown."""

import pytest

from library.runs import reader
from tests.page.test_runs import add
from tests.training import wait_for

pytestmark = pytest.mark.browser


def test_a_stop_says_what_starts_next_the_run_stays_and_a_resumed_one_is_shown(visit, tmp_path):
    add(tmp_path / "out", "one", 4000)
    add(tmp_path / "out", "two", 4000)
    visitor = visit()
    first_run = visitor.state("running")
    visitor.until("Step", ".line")
    visitor.click("Stop after this step")
    visitor.until("the queue starts two.", ".acts .answer")
    visitor.page.locator(".acts .answer").get_by_role("button", name="Stop after this step").click()
    assert visitor.state("stopped") == first_run
    wait_for(lambda: any(run.active and run.id != first_run for run in reader.runs()), 60)
    visitor.until("Running now: two", ".next")
    assert visitor.state("stopped") == first_run  # its buttons stay in place
    visitor.click("Look at it")
    second_run = visitor.state("running")
    assert second_run != first_run
    visitor.click("Stop now")
    assert visitor.state("stopped") == second_run
    visitor.page.get_by_role("button", name="Resume from step").click()
    resumed = visitor.state("running")
    assert resumed not in (first_run, second_run) and reader.find_run(resumed).facts["resumes"] == second_run


@pytest.mark.parametrize("types", [False, True])
def test_on_a_phone_a_training_that_begins_comes_into_view_unless_its_user_types(visit, tmp_path, types):
    visitor = visit()
    page = visitor.page
    page.set_viewport_size({"width": 390, "height": 844})
    ready = {"pretrained_model_name_or_path": "/m/base.safetensors", "train_data_dir": "/images", "resolution": "1024"}
    visitor.fill(**ready, output_dir=tmp_path, output_name="cat", max_train_steps="4000")
    held = []
    page.route("**/own/press", lambda route: route.continue_() if held else held.append(route))
    visitor.click("Train")
    wait_for(lambda: page.wait_for_timeout(20) or held, 30)
    if types:
        visitor.fill(output_name="hen")
    held[0].continue_()
    visitor.state("running")
    visitor.until("Started cat")
    fold, stop = page.locator(".live > .unfold"), page.get_by_role("button", name="Stop after this step")
    assert fold.get_attribute("aria-expanded") == str(not types).lower()
    if not types:
        stop.wait_for()
        inside = "e => { const { top, bottom } = e.getBoundingClientRect(); return top >= 0 && bottom <= innerHeight; }"
        for part in (stop, page.locator(".live .track").first):
            page.wait_for_function(inside, arg=part.element_handle())
    page.unroute_all()


def test_the_message_of_a_started_training_goes_when_the_training_ends(visit, tmp_path):
    visitor = visit()
    ready = {"pretrained_model_name_or_path": "/m/base.safetensors", "train_data_dir": "/images", "resolution": "1024"}
    visitor.fill(**ready, output_dir=tmp_path, output_name="cat", max_train_steps="10")
    (tmp_path / "held").touch()
    visitor.click("Train")
    visitor.until("Started cat")
    visitor.state("running")
    (tmp_path / "held").unlink()
    visitor.state("finished")
    visitor.page.wait_for_function("!document.querySelector('.bar > .said .message')")
