"""The four steps to a first training, on a page on which nothing was trained yet."""

import pytest
from PIL import Image


@pytest.mark.browser
def test_four_steps_lead_to_the_first_training(visit, served):
    folder = served[1] / "first steps"
    folder.mkdir()
    Image.new("RGB", (64, 64)).save(folder / "a.png")
    seen = visit()
    page = seen.page
    steps = page.locator(".first-steps button")
    assert steps.all_inner_texts() == ["Choose a model", "Add images", "Look at them", "Start the training"]
    page.get_by_role("tab", name="Queue", exact=True).click()
    steps.nth(0).click()  # also from a tab without a form
    page.locator("dialog[open]").wait_for()
    page.keyboard.press("Escape")
    steps.nth(1).click()
    page.wait_for_function("document.activeElement.matches('#lora-form .choose-images input')")
    assert page.locator("#lora-form .datasets").bounding_box()["y"] < 900
    seen.fill(train_data_dir=folder)
    page.locator("#side[data-done=images]").wait_for()
    steps.nth(2).click()
    page.locator(".images .cards article").wait_for()
    steps.nth(3).click()
    page.wait_for_function("document.activeElement.matches('button.train')")
    page.set_viewport_size({"width": 390, "height": 844})
    boxes = [step.bounding_box() for step in steps.all()]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["height"] >= 24 for box in boxes)
    assert max(box["y"] + box["height"] for box in boxes) - min(box["y"] for box in boxes) < 100
