"""The purpose of a training: its settings on top of a preset, and the steps that it proposes for the images."""

from pathlib import Path

import pytest
from PIL import Image

from kohya_gui.form import recipes, start_preset
from kohya_gui.form.start_preset import Situation
from kohya_gui.form.tabs import TABS
from kohya_gui.panel import actions
from library.config.building import draft
from library.config.schema import options_of
from library.recipes import preset_files, recipe_files

LORA = TABS[0]


def start(name, **situation):
    preset = preset_files.by_id(name)
    return start_preset.preset_as_start("lora", preset, LORA.configs[preset.family], "", "", Situation(**situation))


def test_a_form_begins_with_the_first_purpose_that_fits_and_says_what_it_sets():
    plain = start("sdxl/lora-12gb")
    assert plain["purpose"] == "character" and ["style", "Style"] in plain["purposes"]
    assert ["Learning rate", "0.0002"] in plain["sets"] and "15 to 50 images are usual" in str(plain["advice"])
    edit = start("flux/lora-kontext-24gb")
    assert edit["purpose"] == "edit" and [purpose for purpose, _ in edit["purposes"]] == ["edit"]
    assert str(start("flux/lora-24gb")["elsewhere"]) == "Edit: choose another model first (FLUX.1 Kontext)."
    assert edit["elsewhere"] == start("zimage/lora-16gb")["elsewhere"] == ""
    assert "edit" not in dict(start("flux/lora-24gb")["purposes"]) and "edit" in dict(
        start("flux_2/lora-8gb")["purposes"]
    )


def test_steps_follow_the_number_of_images_and_the_batch_size():
    assert start("sdxl/lora-12gb", images=30)["values"]["max_train_steps"] == "3000"
    assert start("sdxl/lora-12gb", images=30, at_once=4)["values"]["max_train_steps"] == "750"
    small_set = start("sdxl/lora-12gb", images=5)
    advice = "5 images, each seen about 400 times: 2,000 steps, as fewer teach too little."
    assert small_set["values"]["max_train_steps"] == "2000" and str(small_set["advice"]) == advice
    assert "about 10 times: 5,000 steps, as more" in str(start("sdxl/lora-12gb", images=500)["advice"])
    assert start("flux_2/lora-8gb", purpose="style", images=20)["values"]["max_train_steps"] == "600"


def test_a_model_of_the_family_has_its_own_advice():
    turbo = start("zimage/lora-16gb", model={"model_version": "turbo"})
    assert "zimage_turbo_training_adapter_v2.safetensors" in turbo["values"]["assistant_lora"]
    assert "assistant_lora" not in start("zimage/lora-16gb")["values"]
    large = start("flux_2/lora-8gb", model={"model_version": "klein-base-9b"}, images=10)
    assert float(large["values"]["learning_rate"]) == 1e-4 and large["values"]["max_train_steps"] == "1000"


@pytest.mark.parametrize(
    ("name", "memory", "recomputed"),
    [
        ("qwen_image_21/lora-24gb", 32.0, True),
        ("qwen_image_21/lora-24gb", 80.0, False),  # a reference at most doubles what a preset needs
        ("qwen_image_21/lora-16gb", 16.0, False),  # recomputes anyway
        ("flux_2/lora-24gb", 24.0, True),
        ("flux/lora-kontext-80gb", 80.0, False),  # measured with references
    ],
)
def test_an_edit_recomputes_activations_where_its_references_need_their_memory(monkeypatch, name, memory, recomputed):
    monkeypatch.setattr(start_preset, "training_gpu", lambda: start_preset.Gpu("Gpu", memory))
    model = {"model_type": "kontext"} if "kontext" in name else {}
    others, edit = start(name, model=model), start(name, model=model, purpose="edit")
    changes = {key for key, value in edit["values"].items() if key in start_preset.RECOMPUTED}
    assert "compile_activation_budget" not in changes or not recomputed
    assert (
        (str(edit["text"]) != str(others["text"]))
        == recomputed
        == ("reference images" in "".join(map(str, edit["notes"])))
    )
    if recomputed:
        assert {"gradient_checkpointing", "checkpoint_keep_attention"} <= changes
        assert "checkpointing that keeps attention outputs" in str(edit["text"]) and "per step" not in str(edit["text"])


@pytest.mark.parametrize("sent", [None, True, -1, "many", 10**9, 2.5])
def test_a_number_of_images_that_no_page_counts_is_none(sent):
    assert recipes.number_of_images(sent) == 0


@pytest.mark.parametrize(
    ("values", "number"),
    [
        ({}, 1),
        ({"train_batch_size": "4"}, 4),
        ({"train_batch_size": "x"}, 1),
        ({"train_batch_size": "2", "gradient_accumulation_steps": "3"}, 6),
        ({"train_batch_size": "4", "num_processes": "2"}, 8),
        ({"train_batch_size": "9" * 400}, 1),
    ],
)
def test_a_batch_size_that_cannot_be_read_counts_one_image(values, number):
    assert recipes.images_in_step(values) == number


@pytest.mark.parametrize(
    ("settings", "can"),
    [
        ({}, False),
        ({"sample_prompts": "p.txt"}, True),
        ({"sample_from_captions": 2}, True),
        ({"sample_from_captions": 2, "sample_images": False}, False),
    ],
)
def test_samples_can_be_requested_from_a_running_training_with_prompts(settings, can):
    assert actions._has_prompts(settings) == can


@pytest.fixture
def folder(served):
    place = served[1] / "thirty"
    if not place.exists():
        place.mkdir()
        for number in range(30):
            Image.new("RGB", (64, 64)).save(place / f"{number}.png")
            (place / f"{number}.txt").write_text("a toy", encoding="utf-8")
    return place


EDITS = {"flux": {"model_type": "kontext"}, "qwen_image": {"model_version": "edit-2511"}}  # models that take references


@pytest.mark.parametrize("family", LORA.configs)
@pytest.mark.parametrize(
    ("purpose", "values", "missing"),
    [
        ("edit", {}, ["control_directory"]),
        ("edit", {"control_directory": "before"}, []),
        ("edit", {"dataset_config": Path("sets.toml")}, []),
        ("style", {}, []),
        ("", {}, []),
    ],
)
def test_an_edit_needs_reference_images_if_its_model_takes_them(family, purpose, values, missing):
    config = LORA.configs[family]
    named = {name: value for name, value in values.items() if name in options_of(config)}
    model = draft(config, named | EDITS.get(family, {}))
    is_left_open = (
        model.control_images.most > model.control_images.least == 0
    )  # otherwise the check asks for each folder
    found = [problem.option for problem in recipes.missing_references(purpose, model)]
    assert found == (missing if is_left_open else [])


@pytest.mark.parametrize("family", LORA.configs)
def test_every_model_that_takes_reference_images_offers_edits(family):
    model = draft(LORA.configs[family], EDITS.get(family, {}))
    offered = {recipe.purpose for recipe in recipe_files.fitting_recipes(model)}
    assert ("edit" in offered) == (model.control_images.most > 0)


STEPS = "#lora-max_train_steps"


@pytest.mark.browser
def test_a_purpose_is_one_click_and_leaves_alone_what_was_typed(visit):
    visitor = visit()
    page, recipe = visitor.page, visitor.page.locator("#lora-form .recipe")
    assert recipe.get_by_label("Character or object").is_checked()
    assert "0.0002" in page.locator("#lora-form .recipe-about").inner_text()
    visitor.family("FLUX.2")
    visitor.fill(network_dim="8")
    recipe.get_by_text("Style", exact=True).click()
    page.wait_for_function("document.querySelector('#lora-learning_rate').value == '0.0003'")
    assert page.locator(STEPS).input_value() == "800" and page.locator("#lora-network_dim").input_value() == "8"
    assert visitor.held()["typed"] == ["network_dim"]
    visitor.open()  # a reload keeps the purpose
    assert recipe.get_by_label("Style").is_checked()
    assert visitor.held()["values"]["learning_rate"] == "0.0003" and visitor.held()["typed"] == ["network_dim"]


@pytest.mark.browser
def test_a_chosen_purpose_outlives_a_change_that_comes_before_its_answer(visit):
    visitor = visit()
    page, recipe, requests = visitor.page, visitor.page.locator("#lora-form .recipe"), []
    visitor.family("FLUX.2")
    page.route("**/purpose*", lambda request: requests.append(request))  # Playwright takes no builtin
    recipe.get_by_text("Style", exact=True).click()
    visitor.fill(network_dim="8")
    page.locator("#lora-network_dim").blur()
    page.wait_for_function("document.querySelector('#lora-form .recipe input:checked').value == 'style'")
    while requests:
        requests.pop().continue_()
    page.wait_for_function("document.querySelector('#lora-learning_rate').value == '0.0003'")
    assert recipe.get_by_label("Style").is_checked()
    page.unroute_all(behavior="ignoreErrors")


@pytest.mark.browser
def test_steps_are_proposed_for_the_images_unless_somebody_typed_them(visit, folder):
    visitor = visit()
    page, recipe = visitor.page, visitor.page.locator("#lora-form .recipe")
    about = page.locator("#lora-form .recipe-about")
    visitor.fill(train_data_dir=str(folder))
    about.get_by_text("30 images, each seen about 100 times: 3,000 steps.").wait_for()
    assert page.locator(STEPS).input_value() == "3000" and visitor.held()["typed"] == ["train_data_dir"]
    visitor.fill(train_batch_size="2")
    about.get_by_text("30 images, each seen about 100 times: 1,500 steps.").wait_for()
    assert page.locator(STEPS).input_value() == "1500"
    visitor.fill(max_train_steps="77")
    recipe.get_by_text("Style", exact=True).click()
    about.get_by_text("30 images, each seen about 67 times: 1,000 steps, as fewer teach too little.").wait_for()
    assert page.locator(STEPS).input_value() == "77"


@pytest.mark.browser
def test_an_edit_shows_the_folder_that_it_learns_from_and_a_report_leaves_with_its_family(visit, folder):
    visitor = visit()
    page = visitor.page
    references = page.locator("#lora-form [data-option=control_directory]:visible")
    visitor.family("FLUX.3")
    assert references.count() == 0  # a character needs none
    page.locator("#lora-form .recipe").get_by_text("Edit", exact=True).click()
    references.wait_for()
    assert references.get_attribute("aria-required") == "true"
    visitor.fill(train_data_dir=str(folder))
    visitor.click("Check")
    visitor.until("Reference folder is not set: choose the folder of the images before the edit")
    red = references.evaluate("e => getComputedStyle(e).borderColor")
    visitor.put(control_directory=str(folder))  # not typed
    assert references.evaluate("e => getComputedStyle(e).borderColor") != red
    visitor.family("Krea 2")
    page.wait_for_function(
        "!document.querySelector('#lora-form').closest('.training').querySelector('.message')?.checkVisibility()"
    )
    assert references.count() == 0


@pytest.mark.browser
def test_the_line_of_the_start_follows_the_purpose(visit):
    visitor = visit()
    visitor.family("FLUX.2")
    visitor.click("Presets")
    visitor.page.locator("[data-preset='flux_2/lora-24gb']:visible").click()
    visitor.until("no checkpointing", "#lora-form .start")
    visitor.page.locator("#lora-form .recipe").get_by_text("Edit", exact=True).click()
    visitor.until("checkpointing that keeps attention outputs", "#lora-form .start")
    assert visitor.held()["values"]["gradient_checkpointing"] is True
    visitor.click("Presets")  # the same preset again, for an edit: nothing differs from what the form began with
    visitor.page.locator("[data-preset='flux_2/lora-24gb']:visible").click()
    visitor.until("reference images need the memory")
    assert visitor.held()["values"]["gradient_checkpointing"] is True
    assert visitor.page.locator("#lora-form .changed [data-option]").count() == 0
    visitor.page.locator("#lora-form .recipe").get_by_text("Style", exact=True).click()
    visitor.until("no checkpointing", "#lora-form .start")


@pytest.mark.browser
def test_one_switch_leaves_samples_out(visit):
    visitor = visit()
    switch = visitor.page.locator("#lora-sample_images")
    assert switch.is_visible() and switch.is_checked() and visitor.held()["values"]["sample_from_captions"] == "1"
    switch.uncheck()
    assert visitor.held()["typed"] == ["sample_images"]


@pytest.mark.browser
def test_what_a_form_begins_with_is_reported_in_the_language_of_the_browser(visit):
    page = visit(locale="ja").page
    page.locator("#lora-form .recipe-about", has_text="画像は 15～50 枚が一般的").wait_for()
    assert page.locator("#lora-form .recipe").get_by_label("画風").count() == 1
