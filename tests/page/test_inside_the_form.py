"""The inside of the form in a real browser: closed sections, Undo, the text, Save as, and the data set's counts."""

import pytest

from tests.curation.conftest import picture

pytestmark = pytest.mark.browser

SOURCE = """# SDXL LoRA: accelerate launch sd-scripts/sdxl_train_network.py --config_file THIS_FILE
[optim]
learning_rate = 1e-4 # low on purpose
lr_scheduler = "cosine"
"""


EMPTY = """tab => [...document.querySelectorAll(`#${tab}-form .section`)].filter((section) => {
  const button = section.querySelector(".fold button");
  if (!section.checkVisibility()) return false;
  if (button.getAttribute("aria-expanded") === "false") button.click();
  return ![...section.querySelectorAll(".grid > *")].some((part) => part.checkVisibility());
}).map((section) => section.querySelector("h3").innerText)"""


def line_of(visitor, section):
    return visitor.page.locator(f"#lora-form .section:has(#lora-section-{section}) .set")


def test_a_form_says_what_is_set_and_takes_it_back(visit, served):
    visitor = visit()
    page = visitor.page
    form = page.locator("#lora-form")

    # live, in words, and only while the section is closed
    memory = line_of(visitor, "memory")
    assert not memory.is_visible()
    page.locator("#lora-form .fold", has_text="Memory").click()
    form.locator("[data-option=blocks_to_swap]:visible").fill("4")
    assert not memory.is_visible()
    page.locator("#lora-form .fold", has_text="Memory").click()
    assert memory.inner_text() == "Blocks to swap 4"
    page.locator("#lora-form .fold", has_text="Loss function").click()
    form.locator("[data-option=loss_type]").select_option("smooth_l1")
    page.locator("#lora-form .fold", has_text="Loss function").click()
    assert line_of(visitor, "loss").inner_text().startswith("Smooth L1")
    assert "Compiling is off" in line_of(visitor, "compile").inner_text()

    # Undo of what was typed: a field is one change, whatever it took
    rate = form.locator("[data-option=learning_rate]")
    rate.press_sequentially("5")
    rate.fill("3e-4")
    rate.press("Control+z")  # the browser's own
    rate.fill("3e-4")
    rate.blur()
    form.locator("[data-option=sample_images]").uncheck()
    visitor.family("FLUX.1")
    keys = ["Control+z"] * 3 + ["Control+Shift+Z", "Control+y", "Control+z"]
    said = ["Model family: SDXL again", "Sample images: on again", "Learning rate: ", "Learning rate: 3e-4 again"]
    for key, words in zip(keys, [*said, "Sample images: off again", "Sample images: on again"], strict=True):
        page.keyboard.press(key)
        visitor.until(words, ".told .message")
    page.get_by_role("button", name="Redo the change").locator("visible=true").click()
    visitor.until("Sample images: off again", ".told .message")
    page.get_by_role("button", name="Undo the last change").locator("visible=true").click()
    visitor.until("Sample images: on again", ".told .message")

    # the data set tab counts as this form
    data = served[1] / "inside" / "3_cat"
    data.mkdir(parents=True)
    for number in range(4):
        picture(number).save(data / f"{number}.png")
    visitor.fill(train_batch_size=2)
    page.get_by_role("tab", name="Data", exact=True).click()
    page.locator("#images-folder").fill(str(data.parent))
    page.get_by_role("button", name="Open folder").click()
    page.locator(".images .steps", has_text="in batches of 2 that is 6 steps").wait_for()
    assert "of the LoRA tab" in page.locator(".images .taken").inner_text()


def test_a_config_is_edited_as_text_and_saved_under_a_free_name(visit, served):
    visitor = visit()
    page, text = visitor.page, visitor.page.get_by_label("Settings as TOML")
    (served[1] / "as-text.toml").write_text(SOURCE, encoding="utf-8")
    page.get_by_placeholder("Config file").locator("visible=true").fill(str(served[1] / "as-text.toml"))
    visitor.click("Load config")
    visitor.until("Loaded as-text.toml")
    visitor.fill(learning_rate="2e-4", output_dir=served[1] / "named", output_name="cat")
    visitor.click("More")
    visitor.click("Edit as text")
    text.wait_for()
    assert "learning_rate = 0.0002 # low on purpose" in text.input_value()
    text.press("Tab")
    assert page.evaluate("document.activeElement") != text.element_handle()
    text.fill(text.input_value().replace('"cosine"', '"cosine"\nlerning_rate = 3') + "\nseed = 7 # luck\n")
    line = page.locator(".text-editor .line")
    line.click()
    assert (
        page.evaluate(
            "getSelection().toString() || document.activeElement.value.slice("
            "document.activeElement.selectionStart, document.activeElement.selectionEnd)"
        )
        == "lerning_rate = 3"
    )
    page.keyboard.press("Escape")
    visitor.click("Keep editing")
    text.fill(text.input_value().replace("lerning_rate = 3\n", ""))
    page.locator(".text-editor .state", has_text="No problems found").wait_for()
    text.press("Control+Enter")
    visitor.until("The form now has the settings of this text, for SDXL")
    assert page.locator("#lora-seed").input_value() == "7"
    visitor.click("Save config")
    visitor.until("Saved")
    saved = (served[1] / "as-text.toml").read_text(encoding="utf-8")
    assert "learning_rate = 0.0002 # low on purpose" in saved and "seed = 7 # luck" in saved

    for name in ("cat-sdxl-lora", "cat-sdxl-lora-2"):
        visitor.click("Save as")
        page.wait_for_function(f"document.querySelector('.picker .name')?.value === '{name}.toml'")
        page.wait_for_function("document.querySelector('.picker .where').value")  # its folder is listed
        page.locator(".picker .take").click()
        visitor.until(f"{name}.toml")
    visitor.click("Save as")
    page.wait_for_function("document.querySelector('.picker .where').value")
    page.locator(".picker .name").fill("cat-sdxl-lora.toml")
    page.locator(".picker .take").click()
    visitor.click("Overwrite")
    visitor.until("Saved")
    visitor.click("Undo the last change")
    visitor.until("Seed: not set again", ".told .message")
    assert page.locator("#lora-seed").input_value() == ""


@pytest.mark.parametrize("tab", ["LoRA", "Finetune"])
def test_no_section_unfolds_to_nothing(visit, tab):
    visitor = visit()
    visitor.tab(tab)
    page, form = visitor.page, f"#{tab.lower()}-form"
    families = page.locator(f"{form} input[name=family]").evaluate_all("all => all.map((one) => one.value)")
    assert len(families) > 8
    empty = {}
    for family in families:
        page.locator(f"{form} input[name=family][value='{family}'] + span").click()
        empty[family] = page.evaluate(EMPTY, tab.lower())
    assert not any(empty.values()), empty
    page.locator(f"{form} input[name=family][value=anima] + span").click()
    model = page.locator(f"{form} .section", has=page.locator("h3", has_text="Model"))
    assert not model.is_visible()
    page.locator(f"{form} input[name=advanced]").check()
    assert model.is_visible()
