"""The run that is looked at stays when another begins, and the one that was resumed is shown."""

import pytest

from library.runs import reader
from tests.page.test_runs import add
from tests.training import wait_for

pytestmark = pytest.mark.browser


def test_a_stop_says_what_starts_next_the_run_stays_and_a_resumed_one_is_shown(visit, tmp_path):
    add(tmp_path / "out", "one", 4000)
    add(tmp_path / "out", "two", 4000)
    visitor = visit()
    one = visitor.state("running")
    visitor.until("Step", ".line")
    visitor.click("Stop after this step")
    visitor.until("Then the queue starts two.", ".acts .answer")
    assert visitor.state("stopped") == one
    wait_for(lambda: any(run.active and run.id != one for run in reader.runs()), 20)
    visitor.until("Running now: two", ".next")
    assert visitor.state("stopped") == one  # its buttons are where they were
    visitor.click("Look at it")
    two = visitor.state("running")
    assert two != one
    visitor.click("Stop now")
    assert visitor.state("stopped") == two
    visitor.page.get_by_role("button", name="Resume from step").click()
    resumed = visitor.state("running")
    assert resumed not in (one, two) and reader.find_run(resumed).facts["resumes"] == two
