"""The page with the keyboard alone: every field accepts typing, dialogs release the focus, and focus is visible."""

import re
from pathlib import Path

import pytest

import kohya_gui
from tests.page.test_sampling import run_with_samples, with_seeds
from tests.training import wait_for

pytestmark = pytest.mark.browser
FOCUS = "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent.trim()"


def test_handlers_answer_nothing():
    """A handler such as `element.onkeydown = (event) => a === b && c()` may return false, which cancels the key."""
    answering = re.compile(
        r"\.on(?:key|click|pointer|mouse|input|paste|drop)\w* = [^{\n]*=> [^{\n]*(?:===|!==|<|>) ?[^{\n]*&&"
    )
    for path in Path(kohya_gui.__file__).parent.rglob("*.js"):
        assert not answering.findall(path.read_text(encoding="utf-8")), path.name


def test_every_field_of_a_dialog_takes_keys_and_lets_go(visit, served):
    page = visit().page
    page.get_by_label("Browse for Image folder").locator("visible=true").focus()
    page.keyboard.press("Enter")
    page.locator("dialog.picker li").first.or_(page.locator("dialog.picker .note:has-text('folders')")).wait_for()
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUS) == "Folder":
            break
    page.keyboard.press("Control+a")
    page.keyboard.type(str(served[1]))
    page.keyboard.press("Enter")
    page.wait_for_function("path => document.querySelector('dialog.picker .where').value === path", arg=str(served[1]))
    focused = []
    for _ in range(12):  # more than one round
        page.keyboard.press("Tab")
        focused.append(page.evaluate(FOCUS))
    assert {"Filter", "Choose this folder", "Cancel", "Folder"} <= set(focused)
    page.keyboard.press("Escape")
    page.locator("dialog.picker:not([open])").wait_for(state="attached")
    page.wait_for_function("document.activeElement.id === 'lora-train_data_dir'")  # the focus follows the closing event


def test_the_folder_of_a_data_set_is_typed(visit):
    visitor = visit()
    visitor.page.get_by_role("tab", name="Data", exact=True).click()
    visitor.page.locator("#images-folder").click()
    visitor.page.keyboard.type("~/cats")
    assert visitor.page.locator("#images-folder").input_value() == "~/cats"


def test_what_is_chosen_is_seen_where_the_system_chooses_the_colours(visit):
    page = visit().page
    page.emulate_media(forced_colors="active")
    painted = "e => getComputedStyle(e).backgroundColor"
    families = page.locator("form.settings:visible .family span").evaluate_all(f"all => all.map({painted})")
    assert len(set(families)) == 2
    icon = page.locator("button.pick:visible").first
    below = icon.evaluate(painted)
    assert icon.evaluate("e => getComputedStyle(e, '::before').backgroundColor") != below
    page.emulate_media(forced_colors="none")


HIDDEN = """() => {
  const e = document.activeElement, r = e.getBoundingClientRect();
  const top = document.elementFromPoint(r.x + r.width / 2, r.y + r.height / 2);
  return e.contains(top) || top?.contains(e) ? '' : e.id || e.textContent;
}"""


def test_what_has_the_focus_is_never_below_the_buttons_at_the_bottom(visit):
    page = visit().page
    page.locator("#lora-learning_rate").focus()
    hidden = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        hidden.add(page.evaluate(HIDDEN))
    assert hidden == {""}


def test_the_search_of_settings_gives_the_focus_back(visit):
    page = visit().page
    is_focused, field = "document.activeElement.id === 'lora-learning_rate'", page.locator("#lora-learning_rate")
    box, rows = page.locator(".search input:visible"), page.locator(".search [role=listbox]:visible [role=option]")
    fold = page.locator("button.train:visible").first
    fold.focus()
    page.keyboard.press("/")
    page.keyboard.type("alpha")
    assert rows.count() > 1 and box.get_attribute("aria-expanded") == "true"
    for key, at in (("ArrowDown", 1), ("ArrowUp", 0), ("ArrowUp", rows.count() - 1), ("ArrowDown", 0)):
        page.keyboard.press(key)
        assert rows.nth(at).get_attribute("aria-selected") == "true"
        assert box.get_attribute("aria-activedescendant") == rows.nth(at).get_attribute("id")
    page.keyboard.press("Escape")
    assert not rows.count() and box.evaluate("e => e === document.activeElement") and box.input_value() == "alpha"
    page.keyboard.press("Escape")
    assert fold.evaluate("e => e === document.activeElement")
    page.keyboard.press("/")
    page.keyboard.press("Control+a")
    page.keyboard.type("qqqqqq")
    page.keyboard.press("Enter")
    assert box.input_value() == "qqqqqq" and box.evaluate("e => e === document.activeElement")
    page.keyboard.press("Control+a")
    page.keyboard.type("learning rate")
    page.keyboard.press("Enter")
    assert page.evaluate(is_focused) and field.is_visible() and not rows.count()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    assert page.evaluate(is_focused)


OPENERS = {"models": ".find-models:visible", "text editor": ".as-text:visible"}


@pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS)
def test_a_dialog_holds_the_focus_and_gives_it_back(visit, opener):
    page = visit().page
    page.locator("button.extra:visible").first.click()  # beside which the text editor is
    button = page.locator(opener).first
    button.focus()
    page.keyboard.press("Enter")
    page.locator("dialog[open]").wait_for()
    inside = "document.activeElement === document.body || !!document.activeElement.closest('dialog[open]')"
    for key in ("Tab", "Shift+Tab"):
        for _ in range(15):
            page.keyboard.press(key)
            assert page.evaluate(inside)
    page.keyboard.press("Escape")
    page.locator("dialog[open]").wait_for(state="detached")
    assert button.evaluate("e => e === document.activeElement")


def test_lists_of_dialogs_have_the_arrow_of_those_in_forms(visit):
    page = visit().page
    page.locator(OPENERS["models"]).first.click()
    page.locator("dialog.models[open]").wait_for()
    look = "e => [getComputedStyle(e).appearance, getComputedStyle(e).backgroundImage.startsWith('url')].join()"
    lists = page.locator("dialog[open] select").evaluate_all(f"all => all.map({look})")
    assert {*lists} == {"none,true"} == {page.locator("form.settings select").first.evaluate(look)}


def wait_for_text(part, words):
    wait_for(lambda: part.text_content() == words, 30)


@pytest.mark.parametrize("room", ["the panel", "the page of a run"])
def test_a_sample_opens_large_is_compared_by_keys_and_gives_the_focus_back(visit, served, room):
    run = with_seeds(run_with_samples(served[1], f"focus-{room.replace(' ', '-')}"), (1, 2, 3, 4))
    page = visit().page
    if room != "the panel":
        page.goto(f"{page.url.split('#')[0]}#runs/{run.name}")
    viewer, row = page.locator("dialog.viewer[open]"), page.locator(".strip:visible, .gallery:visible tbody tr").first
    samples = row.locator("button")
    samples.nth(1).wait_for()
    sample = samples.first if room == "the panel" else samples.last  # the newest one
    sample.focus()
    page.keyboard.press("Enter")
    seeds = (", Seed 1", ", Seed 3") if room == "the panel" else ("", "")
    earlier, later = (f"Step {step}{seed}" for step, seed in zip((10, 20), seeds, strict=True))
    shown, other = (viewer.locator(f"select.{part} option:checked") for part in ("at", "other"))
    wait_for_text(shown, f"{later} · 2 of 2")
    wait_for_text(other, earlier if room == "the panel" else "Compare with …")
    viewer.get_by_label("Compare with").select_option(label=earlier)
    wait_for_text(viewer.locator(".left"), earlier)
    page.set_viewport_size({"width": 390, "height": 844})
    assert viewer.evaluate("e => e.scrollWidth <= e.clientWidth")
    page.set_viewport_size({"width": 1440, "height": 900})
    viewer.locator(".stage").focus()
    for key, prompt in (("ArrowDown", "a dog"), ("ArrowUp", "a cat")):
        page.keyboard.press(key)
        wait_for_text(viewer.locator("header span"), prompt)
        assert viewer.locator(".left").inner_text().startswith("Step 10")  # the same comparison
    page.keyboard.press("Home")
    wait_for_text(shown, f"{earlier} · 1 of 2")
    assert viewer.locator("img.over").is_hidden()  # nothing is compared with itself
    for _ in range(12):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
    if room == "the panel":  # which is rendered anew while the dialog is open
        page.locator(".samples").first.evaluate("e => { e.innerHTML = e.innerHTML; }")
    page.keyboard.press("Escape")
    wait_for(lambda: sample.evaluate("e => e === document.activeElement"), 30)
    assert viewer.count() == 0
