"""Small obstacles on the page that were removed, in one visit."""

import pytest

pytestmark = pytest.mark.browser


def test_rare_settings_names_tabs_and_the_data_set_tab(visit, served):
    from tests.curation.conftest import picture

    images = served[1] / "ways" / "1_cat"
    images.mkdir(parents=True)
    picture(1).save(images / "1.png")
    visitor = visit()
    page = visitor.page

    # A rare setting that was changed is there, and the others stay folded away.
    visitor.put(
        adaptive_noise_scale="0.1",
        train_data_dir=str(images.parent),
        resolution="512",
        train_batch_size="4",
        output_dir=str(served[1] / "out"),
        output_name="cat",
    )
    assert not page.locator("#lora-form [name=advanced]").is_checked()
    visitor.click("Noise")
    assert page.locator("#lora-adaptive_noise_scale").is_visible()
    assert not page.locator("#lora-ip_noise_gamma_random_strength").is_visible()

    # Save as proposes a name, and takes it back when nothing is chosen.
    visitor.click("More")
    visitor.click("Save as")
    name = page.locator("dialog.picker input").filter(visible=True).last
    page.wait_for_function(
        "() => [...document.querySelectorAll('dialog.picker input')].some((e) => e.value === 'cat-sdxl-lora.toml')"
    )
    assert name
    page.keyboard.press("Escape")
    page.locator("dialog.picker").wait_for(state="hidden")
    assert page.get_by_placeholder("Config file").locator("visible=true").input_value() == ""

    # The name of a file stays as it is written.
    visitor.fill(pretrained_model_name_or_path=served[1] / "dog.png")
    page.locator("#lora-pretrained_model_name_or_path[aria-invalid]").wait_for()
    assert page.locator("#lora-pretrained_model_name_or_path-help").inner_text().startswith("dog.png must end in")

    # Arrow keys move between tabs.
    page.get_by_role("tab", name="LoRA", exact=True).focus()
    page.keyboard.press("ArrowLeft")
    page.locator("#dreambooth-form").wait_for()
    assert page.evaluate("document.activeElement.textContent.trim()") == "DreamBooth"
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.textContent.trim()") == "LLLite"
    visitor.tab("LoRA")

    # The data set tab counts the folder of a form as that form trains it.
    page.get_by_role("tab", name="Data", exact=True).click()
    page.locator("#images-folder").fill(str(images.parent))
    page.get_by_role("button", name="Open folder").click()
    page.locator(".images article").first.wait_for()
    assert page.locator(".images [data-setting=resolution]").input_value() == "512"
    assert "Counted as the training of the LoRA tab" in page.locator(".images .taken").inner_text()
