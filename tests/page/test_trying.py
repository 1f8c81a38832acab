"""The tab Try it fills in what a chosen run has, and follows a job that it finds running."""

from functools import partial

import pytest

from tests.training import wait_for

pytestmark = pytest.mark.browser
FORM, RUN = ["tab:lora", "Form"], ["run:a", "Run a"]


@pytest.fixture
def tab(visit):
    """Return what opens the tab with these answers of the server, which may change later; it returns the page."""
    pages = []

    def opened(answers):
        page = visit().page
        for name in answers:
            page.route(f"**/own/{name}", partial(lambda name, route: route.fulfill(json=answers[name]), name))
        page.get_by_role("tab", name="Try it", exact=True).click()
        page.locator("#sampling-model option").nth(1).wait_for(state="attached")
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.unroute_all(behavior="wait")


def test_a_run_that_is_chosen_as_model_brings_its_newest_file_and_its_prompts(tab):
    of_run = {"files": ["/zorb-10.pt", "/zorb-20.pt"], "prompts": ["a cat"], "fields": {}}
    page = tab({"sampling_choices": {"models": [FORM, RUN], "sheets": []}, "sampling_run": of_run})
    chosen, first = page.locator("#sampling-model"), page.locator("#sampling-lora-first")
    paths = "[...document.querySelectorAll('.sampling .file > input:first-of-type')].map((field) => field.value)"
    expect = lambda *values: page.wait_for_function(f"values => `${{{paths}}}` === `${{values}}`", arg=values)  # noqa: E731
    chosen.select_option(RUN[0])
    expect("/zorb-20.pt", "")
    assert page.locator("#sampling-prompts").input_value() == "a cat"
    chosen.select_option(FORM[0])  # takes back what was proposed
    expect("")
    first.fill("/own.pt")
    chosen.select_option(RUN[0])  # leaves what somebody wrote
    page.wait_for_function("document.querySelector('#sampling-prompts').value")
    expect("/own.pt", "")


def test_a_late_answer_about_a_model_that_is_no_longer_chosen_changes_nothing(tab):
    other, of_run = ["run:b", "Run b"], {"files": [], "prompts": ["a dog"], "fields": {}}
    page = tab({"sampling_choices": {"models": [FORM, RUN, other], "sheets": []}, "sampling_run": of_run})
    held, prompts = [], page.locator("#sampling-prompts")
    page.route("**/own/sampling_run", lambda route: held.append(route), times=1)
    for chosen in (RUN, other):
        page.locator("#sampling-model").select_option(chosen[0])
    page.wait_for_function("document.querySelector('#sampling-prompts').value === 'a dog'")
    with page.expect_response("**/own/sampling_run"):
        held[0].fulfill(json=of_run | {"prompts": ["a cat"]})
    page.wait_for_timeout(100)
    assert prompts.input_value() == "a dog"


def test_files_of_a_run_that_is_no_longer_chosen_are_not_filled_in(tab):
    of_run = {"files": ["/a-10.pt", "/a-20.pt"], "prompts": [], "fields": {}}
    page = tab({"sampling_choices": {"models": [FORM, RUN], "sheets": []}, "sampling_run": of_run})
    held, first = [], page.locator("#sampling-lora-first")
    page.locator("#sampling-model").select_option(RUN[0])
    page.wait_for_function("document.querySelector('#sampling-lora-first').value === '/a-20.pt'")
    page.route("**/own/sampling_run", lambda route: held.append(route), times=1)
    page.get_by_role("button", name="All files of this run").click()
    wait_for(lambda: page.wait_for_timeout(20) or held, 30)
    page.locator("#sampling-model").select_option(FORM[0])
    page.wait_for_function("document.querySelector('#sampling-lora-first').value === ''")
    with page.expect_response("**/own/sampling_run"):
        held[0].fulfill(json=of_run)
    page.wait_for_timeout(100)
    assert first.input_value() == "" and page.locator(".sampling .file").count() == 1


def test_a_job_from_before_the_page_was_loaded_shows_its_images_as_they_come(tab):
    old, new = ["job:old", "Old"], ["job:new", "New"]
    job = {"id": "new", "state": "running", "title": "Generate", "about": "", "when": "", "text": "", "log": ""}
    job |= {"problems": [], "warnings": [], "error": "", "done": 0, "total": 2, "bytes": False}
    sheet = {"columns": ["a"], "rows": ["a cat"], "cells": [[None]], "folder": ""}
    answers = {"sampling_choices": {"models": [FORM, RUN], "sheets": [old]}, "command_list": {"jobs": [job]}}
    answers["sampling_sheet"] = {**sheet, "cells": []}
    page = tab(answers)
    page.wait_for_function("document.querySelector('#sampling-sheet').value === 'job:old'")
    answers |= {"sampling_choices": {"models": [FORM, RUN], "sheets": [new, old]}, "sampling_sheet": sheet}
    page.wait_for_function("document.querySelector('#sampling-sheet').value === 'job:new'")
    page.locator("#sampling-sheet").select_option(old[0])  # which stays, as somebody chose it
    with page.expect_response("**/own/command_list"):
        pass
    assert page.locator("#sampling-sheet").input_value() == old[0]


def test_prompts_are_there_again_with_their_model_when_the_page_is(tab):
    of_run = {"files": [], "prompts": ["a cat"], "fields": {"width": "64"}}
    answers = {"sampling_choices": {"models": [FORM, RUN], "sheets": []}, "sampling_run": of_run}
    answers["sampling_form"] = {"files": [], "prompts": [], "fields": {}}
    page = tab(answers)
    chosen, prompts, width = (page.locator(f"#sampling-{name}") for name in ("model", "prompts", "width"))

    def reload():
        page.evaluate("history.replaceState(null, '', location.pathname)")  # to the form, which these answers need
        page.reload()
        page.wait_for_selector("form.settings")
        page.get_by_role("tab", name="Try it", exact=True).click()
        page.locator("#sampling-model option").nth(1).wait_for(state="attached")

    def expect(*values):
        page.wait_for_function(
            "values => ['prompts', 'width'].every((name, at) => "
            "document.querySelector(`#sampling-${name}`).value === values[at])",
            arg=values,
        )

    prompts.fill("a zorb\n一只猫")
    width.fill("128")
    reload()
    expect("a zorb\n一只猫", "128")
    chosen.select_option(RUN[0])  # for which nothing was written
    expect("a cat", "64")
    prompts.fill("a dog")
    reload()
    chosen.select_option(RUN[0])
    expect("a dog", "64")
    chosen.select_option(FORM[0])
    page.wait_for_function("document.querySelector('#sampling-width').value === '128'")
    prompts.fill("")
    reload()
    expect("", "128")
    page.evaluate("localStorage.setItem('sampling-written', '[null]')")  # of something else
    reload()
    expect("", "")


def test_what_is_pressed_among_ended_jobs_stays_while_another_one_reports(tab):
    """Each report made all cards anew: a click between two was lost, and so was the focus."""
    job = {"state": "finished", "title": "Generate", "about": "", "when": "", "text": "", "log": "/grid.png"}
    job |= {"problems": [], "warnings": [], "error": "", "done": 0, "total": 9, "bytes": False}
    jobs = [job | {"id": f"job-{n}"} for n in range(3)]
    jobs[0]["state"] = "running"
    answers = {"sampling_choices": {"models": [FORM, RUN], "sheets": []}, "command_list": {"jobs": jobs}}
    page = tab(answers)
    cards = page.locator(".sampling .jobs").first
    earlier = cards.get_by_text("Earlier", exact=True)
    earlier.click()
    earlier.focus()
    output = cards.locator(".job").nth(2).locator("details")
    output.locator("summary").click()
    earlier.focus()
    for done in (1, 2):
        jobs[0]["done"] = done
        cards.locator(".quiet").get_by_text(f"{done} / 9").wait_for()
        assert page.evaluate("document.activeElement.textContent") == "Earlier"
        assert output.get_attribute("open") is not None


def test_jobs_that_have_ended_do_not_push_their_images_down(tab):
    job = {"state": "finished", "title": "Generate", "about": "", "when": "", "text": "", "log": "/grid.png"}
    job |= {"problems": [], "warnings": [], "error": "", "done": 0, "total": 2, "bytes": False}
    jobs = [job | {"id": f"job-{n}"} for n in range(4)]
    page = tab({"sampling_choices": {"models": [FORM, RUN], "sheets": []}, "command_list": {"jobs": jobs}})
    cards = page.locator(".sampling .jobs").first
    cards.locator(".job").first.wait_for()
    assert [card.is_visible() for card in cards.locator(".job").all()] == [True, False, False, False]
    assert not cards.locator("pre").first.is_visible()
    cards.get_by_text("Earlier", exact=True).click()
    assert cards.locator(".job").nth(3).is_visible()


JOB = {
    "id": "job-1",
    "title": "Generate",
    "about": "",
    "when": "",
    "text": "",
    "log": "",
    "problems": [],
    "warnings": [],
}
JOB |= {"state": "running", "error": "", "done": 0, "total": 9, "bytes": False}


def test_stop_is_reached_and_pressed_by_keys_while_the_job_reports(tab):
    """Each report put a new button in place of the one that had the focus."""
    answers = {"sampling_choices": {"models": [FORM, RUN], "sheets": []}, "command_list": {"jobs": [JOB]}}
    answers["command_stop"] = {}
    page = tab(answers)
    card = page.locator(".sampling .jobs").first.locator(".job")
    focused = "document.activeElement.dataset.stop ?? document.activeElement.dataset.state"
    stop = card.get_by_role("button", name="Stop")
    stop.focus()
    for done, log in ((1, ""), (2, "a line"), (3, "a line\nand another")):
        answers["command_list"] = {"jobs": [JOB | {"done": done, "log": log}]}
        card.get_by_text(f"{done} / 9").wait_for()
        assert page.evaluate(focused) == "job-1" and card.locator("pre").count() == bool(log)
        assert card.locator(".quiet").count() == card.locator("[role=progressbar]").count() == 1
    assert card.locator("pre").text_content() == "a line\nand another"
    answers["command_list"] = {"jobs": [JOB | {"state": "stopping"}]}
    page.keyboard.press("Enter")
    card.get_by_role("button", name="End now").wait_for()
    assert page.evaluate(focused) == "stopping"  # a second press of the key may not end the process at once
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "End now"
    answers["command_list"] = {"jobs": [JOB | {"state": "stopped"}]}
    page.wait_for_function(f"({focused}) === 'stopped'")


def test_what_becomes_of_a_job_is_said_to_screen_readers(tab):
    answers = {"sampling_choices": {"models": [FORM, RUN], "sheets": []}, "command_list": {"jobs": [JOB]}}
    page = tab(answers)
    said = page.locator(".sampling [role=status]", has_text="Generate:").first
    said.get_by_text("Running").wait_for(state="attached")
    answers["command_list"] = {"jobs": [JOB | {"state": "failed", "error": "There is no such file."}]}
    said.get_by_text("Failed").wait_for(state="attached")
    assert said.text_content().strip() == "Generate: Failed There is no such file."


def test_a_button_that_waits_for_its_answer_has_the_focus_again_after_it(tab):
    """A browser takes the focus from a button that is disabled; it began at the top of the page again."""
    answers = {"sampling_choices": {"models": [FORM, RUN], "sheets": []}, "command_list": {"jobs": []}}
    page = tab(answers)
    held, button = [], page.get_by_role("button", name="Generate", exact=True)
    page.route("**/own/sampling_begin", lambda route: held.append(route))
    for elsewhere in (False, True):
        held.clear()
        button.focus()
        page.keyboard.press("Enter")
        wait_for(lambda: page.wait_for_timeout(20) or held, 30)
        page.wait_for_function("document.activeElement === document.body")
        if elsewhere:
            page.locator("#sampling-width").focus()
        held[0].fulfill(json={"job": JOB})
        page.wait_for_function(
            "text => [...document.querySelectorAll('.go')].some((e) => e.textContent === text && !e.disabled)",
            arg="Generate",
        )
        page.wait_for_function(f"document.activeElement.textContent === '{'' if elsewhere else 'Generate'}'")
