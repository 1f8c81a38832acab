"""A slow server answers an older request after a newer one: what the newer one has shown stays."""

import json
import re
import time

import pytest

from library.runs import layout, queue, start
from tests.page.test_runs import config, queue_tab
from tests.page.test_runs_room import at_work
from tests.page.test_sets_browser import images  # noqa: F401
from tests.training import wait_for

pytestmark = pytest.mark.browser


class SlowServer:
    """Holds back the first answer for a path; later ones are not delayed. Both are the server's own, or a test's."""

    def __init__(self, page, path, answers=None):
        self.page, self.path, self.answers, self.held = page, path, answers, None
        page.route(path, self.respond)

    def respond(self, route):
        is_first = self.held is None
        if self.answers:
            how = {"json": self.answers[0 if is_first else 1]}
        elif not is_first:
            return route.continue_()
        else:
            how = {"response": route.fetch()}
        if is_first:
            self.held = (route, how)
        else:
            route.fulfill(**how)
        return None

    def wait(self):
        wait_for(lambda: self.page.wait_for_timeout(20) or self.held, 30)

    def release(self):
        """Let the held answer arrive, and its reader finish: another request comes and goes behind it."""
        route, how = self.held
        with self.page.expect_response(self.path):
            route.fulfill(**how)
        self.page.evaluate("fetch('api/v1/queue').then((answer) => answer.text()).then(() => null)")


def stays(visitor, path, older, newer, shown, words, answers=None):
    """Do two things whose answers come in the wrong order, and assert that the words of the second stay."""
    server = SlowServer(visitor.page, path, answers)
    older()
    server.wait()
    newer()
    wait_for(lambda: words in shown(), 30)
    before = shown()
    server.release()
    assert shown() == before
    visitor.page.unroute_all()


def adapter_sizes(visitor):
    page = visitor.page
    page.get_by_role("button", name="Adapter", exact=True).locator("visible=true").click()
    shown = page.locator("#lora-form .adapter .size")
    answers = [{"said": "older"}, {"said": "newer"}]
    for number, answer in enumerate(answers):
        yield answer, lambda rank=str(3 + number): visitor.fill(network_dim=rank)
    yield "**/own/adapter_size", shown.inner_text


def comparisons(visitor):
    page = visitor.page
    visitor.click("More")
    page.locator(".compare:visible").click()
    go = page.locator(".sides .go")
    go.wait_for()
    for name in ("older", "newer"):
        yield {"first": name, "second": "b", "rows": [["rank", "Rank", "1", "2"]]}, go.click
    yield "**/own/compare", page.locator(".differences").inner_text


def findings_of_texts(visitor):
    page = visitor.page
    visitor.click("More")
    page.locator(".as-text:visible").click()
    text = page.locator("dialog.text-editor textarea")
    text.wait_for()
    page.locator("dialog.text-editor .state", has_text=re.compile(".")).wait_for()
    for name in ("older", "newer"):
        answer = {"findings": [{"verdict": "hint", "text": name, "line": 0}]}
        yield answer, lambda seed=name: text.fill(f"# {seed}")
    yield "**/own/text_look", page.locator("dialog.text-editor .findings").inner_text


def captions(visitor):
    page = visitor.page
    page.get_by_role("button", name="Sample images", exact=True).locator("visible=true").click()
    propose = page.get_by_role("button", name="From captions").locator("visible=true")
    for name in ("older", "newer"):
        yield {"captions": [{"prompt": name, "width": "64", "height": "64"}]}, propose.click
    yield "**/own/prompts_captions", page.locator("#lora-form .prompts .captions").inner_text


def prompt_files(visitor):
    page = visitor.page
    page.get_by_role("button", name="Sample images", exact=True).locator("visible=true").click()
    for name in ("older", "newer"):
        rows = {"rows": [{"prompt": "a"}] * (2 if name == "older" else 1), "known": name}
        yield rows, lambda file=name: visitor.put(sample_prompts=f"/{file}.txt")
    yield "**/own/prompts", lambda: str(page.locator("#lora-form .prompts ol > li").count())


def lists_of_models(visitor):
    page, dialog = visitor.page, visitor.page.locator("dialog.models")
    listing = {"bases": [], "offers": [], "folder": "", "repository": "", "labels": {}, "found": {}, "parts": {}}

    def look(family):
        if dialog.is_visible():
            page.keyboard.press("Escape")
            dialog.wait_for(state="hidden")
        visitor.family(family)
        page.locator(".find-models:visible").click()

    for name, family in (("older", "FLUX.1"), ("newer", "Krea 2")):
        yield {**listing, "title": name}, lambda family=family: look(family)
    yield "**/own/models", dialog.locator("h2").inner_text


def purposes(visitor):
    visitor.family("FLUX.2")
    for name in ("Style", "Edit"):
        yield None, visitor.page.locator("#lora-form .recipe").get_by_text(name, exact=True).click
    yield "**/own/purpose", visitor.page.locator("#lora-form .recipe-about").inner_text


def languages(visitor):
    page = visitor.page
    for name in ("zh", "ja"):
        yield None, lambda name=name: page.locator("select.language").select_option(name)
    yield "**/own/words", lambda: page.locator("html").get_attribute("lang") + page.locator("#top").inner_text()


def sheets(visitor):
    """A job's images, which come one after the other."""
    page = visitor.page
    dot = dict.fromkeys(("small", "large"), "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAAC")
    sheet = lambda *rows: {"columns": ["x"], "rows": rows, "cells": [[dot]] * len(rows), "folder": ""}  # noqa: E731
    choices = {"models": [["tab:lora", "LoRA"]], "sheets": [["job:1", "Images"]]}
    page.route("**/own/sampling_choices", lambda route: route.fulfill(json=choices))
    page.route("**/own/sampling_sheet", lambda route: route.fulfill(json=sheet("first")))
    visitor.room("Try it")
    shown = page.locator(".sampling .pictures")
    shown.get_by_text("first").wait_for()
    page.unroute("**/own/sampling_sheet")
    for answer in (sheet("older"), sheet("older", "newer")):
        yield answer, lambda: page.locator("#sampling-sheet").dispatch_event("change")
    yield "**/own/sampling_sheet", shown.inner_text


SCENARIOS = (
    (adapter_sizes, "newer"),
    (captions, "newer"),
    (comparisons, "newer"),
    (findings_of_texts, "newer"),
    (languages, "ja"),
    (lists_of_models, "newer"),
    (prompt_files, "1"),
    (purposes, "A change to an image"),
    (sheets, "newer"),
)


@pytest.mark.parametrize(("scenario", "words"), SCENARIOS)
def test_what_a_newer_request_has_shown_stays(visit, scenario, words):
    visitor = visit()
    *steps, (path, shown) = scenario(visitor)
    (first, older), (second, newer) = steps
    stays(visitor, path, older, newer, shown, words, None if first is None else [first, second])


def test_presets_are_applied_in_the_order_in_which_they_were_chosen(visit):
    visitor = visit()
    visitor.family("FLUX.1")
    server = SlowServer(visitor.page, "**/own/preset")
    for memory in (12, 24):
        visitor.click("Presets")
        visitor.page.locator(f"[data-preset='flux/lora-{memory}gb']:visible").click()
    server.wait()
    server.release()
    visitor.until("24 GB", ".message")
    assert "24 GB" in visitor.page.locator("#lora-form .start").inner_text()
    visitor.page.unroute_all()


def open_folder(visitor, folder):
    visitor.room("Data")
    visitor.page.locator("#images-folder").fill(str(folder))
    visitor.page.get_by_role("button", name="Open folder").click()
    visitor.page.locator(".images article").first.wait_for()


def test_prompts_typed_while_their_file_is_loading_stay_and_are_saved(visit, tmp_path, served):
    file = served[1] / "late-prompts.txt"
    file.write_text("a fox\na hen\n", "utf-8")
    visitor = visit()
    page = visitor.page
    page.get_by_role("button", name="Sample images", exact=True).locator("visible=true").click()
    server = SlowServer(page, "**/own/prompts")
    visitor.put(sample_prompts=str(file))
    server.wait()
    add, rows = (
        page.locator("#lora-form .prompts [data-row=add]"),
        page.locator("#lora-form .prompts ol [data-prompt=prompt]"),
    )
    add.click()  # a row that is taken back does not make the form forget the file
    page.locator("#lora-form .prompts ol [data-row=remove]").click()
    add.click()
    page.keyboard.type("a zorb")
    server.release()
    wait_for(lambda: rows.count() == 3, 30)
    page.keyboard.type(" at sea")
    assert rows.evaluate_all("list => list.map((row) => row.value)") == ["a fox", "a hen", "a zorb at sea"]
    wait_for(lambda: page.wait_for_timeout(20) or "a zorb at sea" in file.read_text("utf-8"), 30)
    assert file.read_text("utf-8").splitlines()[:2] == ["a fox", "a hen"]
    page.unroute_all()


def test_prompts_typed_while_a_file_is_loading_wait_for_it_if_another_is_chosen(visit, served):
    files = [served[1] / f"waiting-{name}.txt" for name in ("one", "two")]
    for file in files:
        file.write_text(f"a fox of {file.stem}\n", "utf-8")
    visitor = visit()
    page = visitor.page
    page.get_by_role("button", name="Sample images", exact=True).locator("visible=true").click()
    rows = page.locator("#lora-form .prompts ol [data-prompt=prompt]")
    server = SlowServer(page, "**/own/prompts")
    visitor.put(sample_prompts=str(files[0]))
    server.wait()
    page.locator("#lora-form .prompts [data-row=add]").click()
    page.keyboard.type("a zorb")
    visitor.put(sample_prompts=str(files[1]))
    values = "list => list.map((row) => row.value)"
    wait_for(lambda: rows.evaluate_all(values) == ["a fox of waiting-two"], 30)
    server.release()
    assert rows.evaluate_all(values) == ["a fox of waiting-two"]
    visitor.put(sample_prompts=str(files[0]))
    wait_for(lambda: rows.evaluate_all(values) == ["a fox of waiting-one", "a zorb"], 30)
    wait_for(lambda: page.wait_for_timeout(20) or "a zorb" in files[0].read_text("utf-8"), 30)
    assert files[1].read_text("utf-8") == "a fox of waiting-two\n"
    page.unroute_all()


def test_what_differs_in_a_queued_training_is_what_was_asked_last(visit, tmp_path):
    queue.pause()
    entry = queue.add_to_queue(start.job_of_config(config(tmp_path, "one")))
    differences = [[{"option": "seed", "before": None, "value": name, "words": ""}] for name in ("older", "newer")]
    answers = [{"entries": {entry.id: {"form": False, "differences": listed}}} for listed in differences]
    visitor = visit()
    page = visitor.page
    server = SlowServer(page, "**/own/queue-differences", answers)
    queue_tab(visitor)
    page.locator(".entry .unlike", has_text="newer").wait_for()
    server.release()
    with page.expect_response("**/api/v1/queue"), page.expect_request("**/api/v1/queue"):
        pass  # the next listing is shown with what is known then
    page.evaluate("fetch('api/v1/queue').then((answer) => answer.text()).then(() => null)")
    assert "newer" in page.locator(".entry .unlike").inner_text()
    page.unroute_all()


def test_filters_tags_and_comparisons_of_the_room_data_stay(visit, images):  # noqa: F811
    visitor = visit()
    page = visitor.page
    open_folder(visitor, images)
    words, cards = page.locator(".sieve .words"), page.locator(".images article")
    stays(
        visitor,
        "**/own/images_page",
        lambda: words.fill("number"),
        lambda: words.fill("number 7"),
        lambda: f"{cards.count()} shown",
        "1 shown",
    )


def test_a_preview_of_another_edit_is_not_applied(visit, images):  # noqa: F811
    visitor = visit()
    page = visitor.page
    open_folder(visitor, images)
    page.locator("[data-panel=tags] summary").click()
    page.locator("#tags-find").fill("red hat")
    server = SlowServer(page, "**/own/images_edit")
    visitor.click("Preview")
    server.wait()
    page.locator("#tags-find").fill("zorb")
    server.release()
    assert page.locator("[data-do=edit]").is_disabled() and page.locator(".preview").inner_text() == ""
    page.unroute_all()


def test_a_change_that_ends_after_another_folder_was_opened_does_not_bring_the_first_one_back(visit, images):  # noqa: F811
    other = images.with_name(f"{images.name}-other")
    (other / "10_zorb").mkdir(parents=True)
    (images / "10_zorb" / "00.png").rename(other / "10_zorb" / "00.png")
    visitor = visit()
    page = visitor.page
    open_folder(visitor, images)
    page.get_by_label("Choose 10_zorb/05.png").check()
    server = SlowServer(page, "**/own/images_remove")
    page.locator("[data-do=remove]").click()
    server.wait()
    open_folder(visitor, other)
    page.wait_for_function("document.querySelectorAll('.images article').length === 1")
    server.release()
    visitor.until("1 image moved to the trash")
    assert page.locator("#images-folder").input_value() == str(other) and page.locator(".images article").count() == 1
    page.unroute_all()


def test_an_older_list_of_samples_does_not_replace_a_newer_one(visit, tmp_path):
    at_work(tmp_path)
    (record,) = tmp_path.glob(f"one/runs/*/{layout.PROGRESS}")
    sample = json.loads(record.read_text("utf-8").splitlines()[-1])

    def add(step):
        with record.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**sample, "step": step, "t": time.time()}) + "\n")

    visitor = visit()
    page = visitor.page
    page.goto(f"{page.url.split('#')[0]}#runs/{record.parent.name}")
    columns = page.locator(".gallery thead th")
    columns.nth(3).wait_for()
    stays(
        visitor,
        "**/samples?resumed=true",
        lambda: add(90),
        lambda: add(120),
        lambda: f"{columns.count() - 1} steps",
        "5 steps",
    )
