"""How the page looks in a real browser: where the first field is, colours by a switch, the header, and axe."""

import re

import pytest
from PIL import Image

from tests import source
from tests.page.test_addresses import ROOMS, seen
from tests.page.test_runs_room import recorded
from tests.page.test_sampling import run_with_samples, with_seeds

pytestmark = pytest.mark.browser

AXE = source.ROOT / "node_modules" / "axe-core" / "axe.min.js"
VIOLATIONS = """async () => (await axe.run()).violations.map(
  ({ id, nodes }) => [id, ...nodes.map(({ target }) => target.join(" "))])"""
# Elements inside the window that are scrolled by themselves.
SCROLLED = """() => [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility()
  && /auto|scroll/.test(getComputedStyle(e).overflowY) && e.scrollHeight > e.clientHeight + 1)
  .map((e) => e.className)"""


def test_the_first_field_is_near_the_top(visit):
    page = visit().page
    field = page.locator("form.settings:visible .basics .field").first
    # The last size is the first one at 200 %.
    for (width, height), highest in (((1440, 900), 160), ((390, 844), 480), ((720, 450), 340)):
        page.set_viewport_size({"width": width, "height": height})
        page.evaluate("scrollTo(0, 0)")
        entry = field.locator("input").bounding_box()
        assert field.bounding_box()["y"] <= highest and entry["y"] + entry["height"] <= height
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(SCROLLED) == []


# Controls of the header and of a training that are cut off by the window, by their card, or by what lies over them.
CUT = """() => {
  const outside = (e, box) => e.getBoundingClientRect().right > box.getBoundingClientRect().right + 1;
  const cut = (list, box) => [...document.querySelectorAll(list)].filter((e) => e.checkVisibility())
    .filter((e) => outside(e, e.closest(box))).map((e) => e.textContent);
  const [lab, link] = ["#rooms > .tab-wrapper .tab-container", "#top .switches"].map((e) => document.querySelector(e));
  const [rooms, switches] = [lab, link].map((e) => e.getBoundingClientRect());
  const covers = switches.bottom > rooms.top && rooms.right > switches.left ? ["rooms cover the header"] : [];
  return [...cut(".choose .family span", ".choose"), ...cut(".bar .row > button", ".training"),
    ...cut("#top .switches > *", "body"), ...covers];
}"""


@pytest.mark.parametrize("language", ["en", "ja"])
def test_nothing_is_cut_off_between_a_small_phone_and_a_desk(visit, language):
    visitor = visit(locale=language)
    page = visitor.page
    for width in (1440, 1280, 1024, 900, 320):
        page.set_viewport_size({"width": width, "height": 768})
        visitor.has_none(CUT)
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_an_empty_folder_has_one_sentence_and_a_long_file_name_stays_in_its_card(visit, served):
    folder = served[1] / "long"
    folder.mkdir()
    visitor = visit()
    visitor.room("Data")
    visitor.page.locator("#images-folder").fill(str(folder))
    with visitor.page.expect_response(lambda response: "images_page" in response.url):
        visitor.click("Open folder")
    visitor.until("A training would find no images here.", ".images .overview")
    visitor.page.wait_for_timeout(100)
    visitor.page.locator(".images .cards:empty").wait_for(state="attached")  # nothing was searched for
    Image.new("RGB", (64, 64)).save(folder / f"{'a_long_name_' * 15}.png")
    visitor.click("Open folder")
    card = visitor.page.locator(".images article")
    outer, caption = card.bounding_box(), card.locator("textarea").bounding_box()
    assert caption["x"] + caption["width"] < outer["x"] + outer["width"]
    assert card.locator(".name").get_attribute("title").startswith("a_long_name_")


@pytest.mark.parametrize("language", ["en", "zh", "ja"])
def test_every_room_has_its_tab_on_a_phone(visit, language):
    page = visit(locale=language).page
    page.set_viewport_size({"width": 390, "height": 844})
    boxes = [tab.bounding_box() for tab in page.locator("#rooms > .tab-wrapper").get_by_role("tab").all()]
    assert len(boxes) == 6 and boxes[0]["x"] >= 0 and boxes[-1]["x"] + boxes[-1]["width"] <= 390


def test_colours_follow_the_system_or_the_switch_and_stay(visit):
    page = visit(color_scheme="dark").page
    ground, switch = "getComputedStyle(document.body).backgroundColor", page.get_by_label("Colours")
    dark = page.evaluate(ground)
    switch.select_option("light")
    light = page.evaluate(ground)
    assert dark != light
    page.add_init_script(
        "addEventListener('DOMContentLoaded', () => { window.first = document.documentElement.className; })"
    )
    page.reload()
    page.wait_for_selector("form.settings")
    assert page.evaluate(ground) == light and "dark" not in page.evaluate("first")  # no flash of the system's colours
    assert switch.input_value() == "light"
    switch.select_option("")
    assert page.evaluate(ground) == dark
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"light => {ground} === light", arg=light)


def test_the_keyboard_skips_the_header_and_walks_both_rows(visit):
    page = visit().page
    focused = "document.activeElement.textContent.trim()"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.matches('#kinds [role=tabpanel]')")
    assert page.evaluate("location.hash") == ""
    page.locator("#rooms > .tab-wrapper").get_by_role("tab", name="Train", exact=True).focus()
    page.keyboard.press("ArrowRight")
    seen(page, ".queue")
    assert page.evaluate(focused) == "Runs"
    page.keyboard.press("ArrowLeft")
    page.locator("#kinds").get_by_role("tab", name="LoRA", exact=True).focus()
    page.keyboard.press("ArrowRight")
    seen(page, "#textual-inversion-form")
    assert page.evaluate("document.fonts.check('16px Inter')")


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("with_run", [False, True])
def test_axe_finds_nothing_in_any_room(visit, tmp_path, mode, with_run):
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: ./setup.sh test installs it")
    if with_run:
        recorded(tmp_path, "one", 1e-4)  # it has samples of the base model, too
    visitor = visit(color_scheme=mode, bypass_csp=True)
    page = visitor.page
    page.evaluate(AXE.read_text(encoding="utf-8"))
    for address in ("train/lora", "data", "runs", "try", "tools", "lab"):
        page.evaluate("address => { location.hash = address; }", address)
        seen(page, ROOMS[address])
        if with_run and address not in ("data", "runs"):
            page.locator(".live .sample").first.wait_for()
        visitor.has_none(VIOLATIONS)
    page.evaluate("location.hash = 'train/lora'")
    page.get_by_role("button", name="Presets", exact=True).locator("visible=true").click()
    presets = page.get_by_role("dialog", name="Presets")
    presets.get_by_role("heading", name="Presets").wait_for()
    visitor.has_none(VIOLATIONS)
    presets.get_by_role("button", name="Close").click()
    presets.wait_for(state="hidden")


def test_a_long_name_does_not_squeeze_the_state_beside_it(visit, tmp_path):
    recorded(tmp_path, "a-long-name-of-a-training-run", 1e-4)
    page = visit(locale="zh", has_touch=True).page
    page.set_viewport_size({"width": 390, "height": 844})
    state = page.locator(".live .state", has_text="已完成")
    state.wait_for()
    assert state.bounding_box()["height"] < 32
    page.touchscreen.tap(150, page.locator(".live").bounding_box()["y"] + 20)  # the line opens where it is touched
    page.locator(".live .acts button").first.wait_for()


# What a finger can press that is lower than 40 px. A checkbox is as high as its label.
LOW = """() => [...document.querySelectorAll("button, a[href], input, select, textarea, summary")]
  .filter((e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true, contentVisibilityAuto: true })
    && !e.matches(".skip, .family input"))
  .map((e) => [e, (/checkbox|radio/.test(e.type) && e.closest("label")) || e])
  .filter(([, { offsetHeight }]) => offsetHeight > 0 && offsetHeight < 40)
  .map(([e]) => e.ariaLabel || e.textContent || e.id)"""
OVERFLOWING = """() => [...document.querySelectorAll(".bar > .row > button")]
  .filter((e) => e.checkVisibility() && e.scrollWidth > e.clientWidth).map((e) => e.textContent)"""


def test_no_rule_makes_controls_lower_for_fingers():
    """Also of those that appear only with certain data, such as settings taken from a tab."""
    for path in (source.ROOT / "kohya_gui").rglob("*.css"):
        rules = re.sub(r"@media \(pointer: fine\) \{(?:[^{}]*\{[^{}]*\})*\s*\}", "", path.read_text(encoding="utf-8"))
        heights = [int(height) for height in re.findall(r"min-height: (\d+)px !important", rules)]
        assert min(heights, default=40) >= 40, path.name


@pytest.mark.parametrize("language", ["en", "ja"])
def test_on_a_phone_all_that_is_pressed_is_large_enough_for_a_finger(visit, language):
    visitor = visit(locale=language, has_touch=True)
    page = visitor.page
    page.set_viewport_size({"width": 390, "height": 844})
    for address in ("data", "runs", "try", "tools", "lab", "train/lora"):
        page.evaluate("address => { location.hash = address; }", address)
        seen(page, ROOMS[address])
        visitor.has_none(LOW)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    visitor.has_none(OVERFLOWING)


OVER = """() => [...document.querySelectorAll('dialog.viewer[open] :is(select, input, button)')]
  .filter((e) => e.getBoundingClientRect().right > e.closest('dialog').getBoundingClientRect().right)
  .map((e) => e.outerHTML)"""


def test_all_of_a_run_and_of_its_comparison_is_seen_on_small_phones(visit, served):
    """The lists of the comparison and its slider ended outside of its window; name and progress cut each other."""
    with_seeds(run_with_samples(served[1], "small-1"), (1, 2, 3, 4))
    visitor = visit(has_touch=True)
    page = visitor.page
    for width in (390, 320):
        page.set_viewport_size({"width": width, "height": 640})
        page.locator(".live .who").wait_for()
        who, line = (page.locator(f".live {part}").first.bounding_box() for part in (".who", ".line"))
        assert (line["y"] >= who["y"] + who["height"]) == (width == 320)
        assert page.locator("#top .switches a").first.evaluate("e => e.scrollWidth <= e.clientWidth")
    page.locator(".live > .unfold").click()
    page.locator(".live .sample:visible").first.click()
    page.locator("dialog.viewer[open]").wait_for()
    for width in (880, 481, 390, 320):
        page.set_viewport_size({"width": width, "height": 640})
        visitor.has_none(OVER)


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_a_picture_is_described_in_the_readers_language(visit, language):
    page = visit(locale=language).page
    page.evaluate(
        "text => document.querySelector('#top').append(Object.assign(new Image(), { alt: text, id: 'told' }))",
        "The samples at the start, halfway and at the end of the training",
    )
    page.wait_for_function("/^[^a-z]+$/.test(document.querySelector('#told').alt)")
