"""The page with the keyboard alone: every field accepts typing, dialogs release the focus, and focus is visible."""

import re
from pathlib import Path

import pytest

import kohya_gui
from tests.page.test_sampling import run_with_samples, with_seeds

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


def test_the_comparison_of_samples_gives_the_focus_back_to_the_sample(visit, served):
    with_seeds(run_with_samples(served[1], "focus-1"), (1, 2, 3, 4))
    page = visit().page
    sample = page.locator(".sample:visible").first
    sample.focus()
    page.keyboard.press("Enter")
    page.locator("dialog.compare[open]").wait_for()
    titles = page.locator("dialog.compare select").first.locator("option").all_inner_texts()
    assert titles == ["Step 20, Seed 3", "Step 10, Seed 1"]
    for _ in range(10):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
    page.keyboard.press("Escape")
    page.wait_for_function("document.activeElement.classList.contains('sample')")
    assert sample.evaluate("e => e === document.activeElement")
