"""The data set tab, the tools tab and the file picker in a real browser."""

import pytest

from library.config.problems import ConfigError
from library.curation import changes
from tests.curation.conftest import picture
from tests.curation.test_trash import tree
from tests.jobs.test_jobs import lora, product

pytestmark = pytest.mark.browser


@pytest.fixture
def images(served, tmp_path):
    """A folder of images below a root of the page."""
    data = served[1] / f"set-{tmp_path.name}"
    (data / "10_zorb").mkdir(parents=True)
    for i in range(60):
        picture(i).save(data / "10_zorb" / f"{i:02}.png")
        if i:
            (data / "10_zorb" / f"{i:02}.txt").write_text("zorb, red hat" if i < 4 else f"zorb, number {i}")
    return data


def go(visitor, tab):
    page = visitor.page
    page.get_by_role("tab", name=tab, exact=True).click()
    return page


def refused(*_):
    raise ConfigError("the disk is full")


def test_look_edit_replace_and_undo(visit, images, monkeypatch):
    start = tree(images)
    visitor = visit()
    page = go(visitor, "Data")
    page.locator("#images-folder").fill(str(images))
    opener = page.get_by_role("button", name="Open folder")
    assert opener.evaluate("button => getComputedStyle(button).fontWeight") == "600"  # primary
    opener.click()
    cards = page.locator(".images article")
    cards.first.wait_for()
    assert cards.count() == 48 and "60 of 60" in page.locator(".images .numbers").inner_text()
    assert "60 images with repeats are 600 images per epoch" in page.locator(".images .steps").inner_text()
    page.wait_for_function("document.querySelector('.images article img').naturalWidth > 0")

    page.locator(".images .findings button", has_text="without a caption").click()
    page.wait_for_function("document.querySelectorAll('.images article').length === 1")
    words = page.locator(".images article textarea")
    words.fill("zorb, by hand")
    with monkeypatch.context() as full:
        full.setattr(changes, "change_caption", refused)
        words.blur()
        page.locator(".images article .why", has_text="the disk is full").wait_for()
    assert words.input_value() == "zorb, by hand" and not (images / "10_zorb" / "00.txt").exists()
    words.focus()  # leaving the field saves again, now that there is space
    words.blur()
    page.locator('.images textarea[data-state="stored"]').wait_for()
    assert page.locator(".images .why").count() == 0
    assert (images / "10_zorb" / "00.txt").read_text() == "zorb, by hand"
    page.locator(".images .findings button", has_text="without a caption").click()

    page.locator("[data-panel=tags] summary").click()
    page.locator(".frequencies button", has_text="red hat").click()
    assert page.locator("#tags-find").input_value() == "red hat"
    page.locator("#tags-put").fill("blue hat")
    visitor.click("Preview")
    page.get_by_text("3 captions of 60 shown images would change").wait_for()
    visitor.click("Apply")
    visitor.until("3 captions changed")
    assert (images / "10_zorb" / "02.txt").read_text() == "zorb, blue hat"

    visitor.open()  # changes can be undone even after a reload, as they are stored in files
    page = go(visitor, "Data")  # opens the same folder again
    cards.first.wait_for()
    for title in ("Replaced", "Caption of"):
        page.locator(".sieve [data-do=undo]").click()
        visitor.until(f"Undone: {title}")
    page.locator(".sieve [data-do=undo]:disabled").wait_for()
    assert tree(images) == start


def test_cached_folder_listing_does_not_hide_a_change(visit, images):
    visitor, held = visit(), []
    page = go(visitor, "Data")
    page.locator("#images-folder").fill(str(images))
    page.keyboard.press("Enter")
    page.locator(".images .findings button", has_text="without a caption").click()
    page.wait_for_function("document.querySelectorAll('.images article').length === 1")
    words = page.locator(".images article textarea")
    words.fill("zorb, by hand")
    words.blur()
    undo = page.locator(".sieve [data-do=undo]")
    page.locator(".sieve [data-do=undo]:enabled").wait_for()

    def late(route):
        held.append((route, route.fetch()))

    page.route("**/own/images_open", late, times=1)
    page.locator("#images-folder").press("Enter")
    while not held:
        page.wait_for_timeout(20)
    undo.click()
    visitor.until("Undone: Caption of")
    page.locator(".sieve [data-do=undo]:disabled").wait_for()
    route, answer = held[0]
    with page.expect_response("**/own/images_open"), page.expect_response("**/own/images_page"):
        route.fulfill(response=answer)
    assert undo.is_disabled() and "Undone: Caption of" in visitor.said()


def test_a_folder_that_cannot_be_opened_is_named_by_its_label_and_no_other_images_stay(visit, images):
    visitor = visit(locale="ja-JP")
    page, cards = visitor.page, visitor.page.locator(".images article")
    page.locator("#rooms").get_by_role("tab", name="データセット", exact=True).click()
    page.locator("#images-folder").fill(str(images))
    page.keyboard.press("Enter")
    cards.first.wait_for()
    assert page.locator("#images-folder").bounding_box()["width"] > 150  # beside long words on buttons
    page.locator("#images-folder").fill(f"{images}-none")
    page.keyboard.press("Enter")
    visitor.until("がありません")
    assert visitor.said().startswith("画像フォルダー：") and not cards.first.is_visible()
    page.locator("#images-folder").fill(str(images))
    page.keyboard.press("Enter")
    cards.first.wait_for()
    page.locator(".images details.how summary").click()
    page.locator("#images-resolution").fill("none")  # the same folder, with a setting that is being corrected
    page.locator("#images-resolution").blur()
    visitor.until("解像度")
    assert cards.first.is_visible()


def test_regularisation_and_dataset_file_of_a_tab_can_be_opened_alone(visit, images):
    reg, file = images.parent / f"{images.name}-reg", images.parent / f"{images.name}.toml"
    (reg / "1_thing").mkdir(parents=True)
    for i in range(5):
        picture(200 + i).save(reg / "1_thing" / f"{i}.png")
    file.write_text(f'[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = "{reg.as_posix()}/1_thing"\n')
    visitor = visit()
    go(visitor, "DreamBooth")
    visitor.fill(train_data_dir=images, reg_data_dir=reg, resolution=512)
    visitor.until("regularisation", ".datasets li .numbers")  # the colour of its share alone would not say it
    page = go(visitor, "Data")
    page.locator("#images-tab").select_option("dreambooth")
    visitor.click("Use this tab's settings")
    rows = page.locator(".images .sources tbody tr")
    rows.nth(1).wait_for()
    assert [rows.nth(i).inner_text().split("\t")[1:] for i in range(2)] == [["60", "10", "600"], ["5", "120", "600"]]
    assert "1,200 images per epoch" in page.locator(".images .steps").inner_text()
    page.locator(".images .findings button", has_text="regularisation").click()
    page.wait_for_function("document.querySelectorAll('.images article').length === 5")
    assert page.locator(".images article textarea").first.get_attribute("readonly") is not None
    visitor.click("Open")  # without the comparison the folder can be edited
    page.wait_for_function("document.querySelectorAll('.images article textarea:not([readonly])').length === 5")
    visitor.open()  # still undoable after a reload
    go(visitor, "Data")
    visitor.click("Back to all of the training's images")
    rows.nth(1).wait_for()

    visitor.tab("Finetune")
    visitor.fill(dataset_config=file)
    go(visitor, "Data")
    page.locator("#images-tab").select_option("finetune")
    visitor.click("Use this tab's settings")
    page.locator(".images .also", has_text="describes these images").wait_for()
    page.wait_for_function("document.querySelectorAll('.images article').length === 5")
    assert not page.locator(".images .panels").is_visible()


@pytest.mark.parametrize("kind", ["dataset_config", "in_json"])
def test_a_folder_that_is_given_to_a_form_is_the_one_that_it_trains(visit, images, kind):
    """A file of other images stayed in the form, so the folder had no effect."""
    other = images.parent / f"{images.name}.{'toml' if kind == 'dataset_config' else 'json'}"
    other.write_text(
        "{}" if kind == "in_json" else "[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir='x'\n"
    )
    visitor = visit()
    page = go(visitor, "Data")
    page.locator("#images-folder").fill(str(images))
    visitor.click("Open folder")
    page.locator(".images article").first.wait_for()
    visitor.put(**{kind: str(other)})
    visitor.click("Use this folder in that tab")
    visitor.until("The LoRA tab has this folder now")
    values = visitor.held()["values"]
    assert values["train_data_dir"] == str(images) and not values[kind]
    visitor.until(f"It no longer uses {other}")
    go(visitor, "Train")
    visitor.click("Undo the last change")
    assert visitor.held()["values"][kind] == str(other) and not visitor.held()["values"]["train_data_dir"]


def test_captions_with_another_extension_are_read_at_a_press(visit, images):
    """The setting is the tab's own from then on, until it is given to a form."""
    for path in (images / "10_zorb").glob("*.txt"):
        path.rename(path.with_suffix(".caption"))
    visitor = visit()
    page = go(visitor, "Data")
    page.locator("#images-folder").fill(str(images))
    visitor.click("Open folder")
    page.locator(".images .notes", has_text="set the caption files' extension to .caption").wait_for()
    visitor.click("Read .caption files")
    page.locator(".images .numbers", has_text="59 of 60").wait_for()
    assert page.locator("[data-setting=caption_extension]").input_value() == ".caption"
    assert page.get_by_role("button", name="Read .caption files").count() == 0
    visitor.click("Use this folder in that tab")
    visitor.until("The LoRA tab has this folder now")
    assert visitor.held()["values"]["caption_extension"] == ".caption"
    go(visitor, "Train")
    visitor.click("Undo the last change")
    assert visitor.held()["values"]["caption_extension"] != ".caption"


def test_a_tools_form_is_as_it_was_when_the_page_is_opened_again(visit, served):
    visitor = visit()
    page = go(visitor, "Tools")
    page.locator("#tools-merge-loras-first").fill("/a=b.safetensors")
    page.locator("#tools-merge-loras-1").fill("/b.safetensors")
    page.locator(".files .weight").nth(1).fill("0.5")
    page.locator("#tools-merge-out").fill("sum.safetensors")
    page.locator("#tools-merge-out").blur()
    visitor.open()
    page = go(visitor, "Tools")
    paths = "[...document.querySelectorAll('#tools-merge-loras input:first-of-type')].map((field) => field.value)"
    page.wait_for_function(f"`${{{paths}}}` === '/a=b.safetensors,/b.safetensors,'")
    weights = [field.input_value() for field in page.locator("#tools-merge-loras .weight").all()]
    assert weights == ["1", "0.5", "1"] and page.locator("#tools-merge-out").input_value() == "sum.safetensors"


@pytest.mark.parametrize("stored", ["null", "7", '"x"', "[1]", "{", '{"tools-merge-loras": {"a": 1}, "which": 5}'])
def test_the_tools_work_whatever_the_browser_has_kept(visit, stored):
    visitor = visit()
    visitor.page.evaluate("text => localStorage.setItem('command-tools', text)", stored)
    visitor.open()
    go(visitor, "Tools")
    visitor.click("Run")
    visitor.until("this must be filled in")


def test_two_loras_are_merged_and_nothing_is_overwritten(visit, served):
    root = served[1]
    first, second = lora(root / "mergeable.safetensors"), lora(root / "second.safetensors", 1)
    visitor = visit()
    page = go(visitor, "Tools")
    page.locator(".files .pick").click()  # keyboard only: filter, and take
    page.locator(".picker[open] li", has_text="mergeable.safetensors").wait_for()
    page.keyboard.type("mergeable")  # other tests' files may come first
    page.wait_for_function("document.querySelectorAll('.picker[open] li').length === 1")
    page.keyboard.press("Enter")
    page.locator(".picker[open]").wait_for(state="hidden")  # once the last letter's listing is there
    assert page.locator("#tools-merge-loras-first").input_value() == str(first)
    page.locator("#tools-merge-loras-1").fill(str(second))
    page.locator(".files .weight").nth(1).fill("0.5")
    page.locator("#tools-merge-out").fill(str(root / "sum.safetensors"))
    visitor.click("Run")
    page.locator('.tools .job[data-state="finished"]').wait_for(timeout=60_000)
    assert "one LoRA of 2" in page.locator(".tools .job pre").inner_text()
    assert float((product(root / "sum.safetensors") - product(first) - 0.5 * product(second)).abs().max()) < 1e-5
    visitor.click("Run")
    visitor.until("exists already and is not overwritten")
