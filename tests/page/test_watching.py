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
