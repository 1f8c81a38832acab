"""Masks on the page: shown over the images, painted by mouse and finger, undone; and refused requests."""

import io
import sys

import numpy as np
import pytest
from PIL import Image

from kohya_gui.dataset.masks import MaskEditing
from kohya_gui.server.json_api import ApiRequest
from kohya_gui.tools.commands import ToolCommands
from library.config.problems import ConfigError
from library.data import pixels
from library.jobs import jobs
from library.masking.files import MaskOptions, make_masks, usual_folder
from tests.curation.conftest import data, picture  # noqa: F401 (a fixture)
from tests.curation.test_trash import tree
from tests.masking.test_masks import Half, painted, quiet
from tests.page.test_images import images, opened  # noqa: F401 (a fixture)

# `kohya mask` with a model that is there at once, and finds the left half of each picture.
STUB = """
import sys
from library.masking import shell
from tests.masking.test_masks import Half

shell.model_folder.find_model_folder = lambda *given: None
shell.SegmentationModel = lambda *given: Half()
sys.exit(shell.main(sys.argv[2:]))
"""


@pytest.fixture
def editing(images, data):  # noqa: F811
    masks = MaskEditing(images.roots, images.collection)
    scope = {"folder": str(data), "collection": opened(images, data)["collection"]}
    return masks, scope


def test_masks_are_shown_kept_and_taken_back(editing, data):  # noqa: F811
    masks, scope = editing
    start, place = tree(data), usual_folder(data)
    assert masks.look(ApiRequest(scope)) == {"folder": str(place), "count": 0, "images": 11, "past": ""}
    query = {**scope, "name": "10_cat/1.png", "side": "320", "v": "0"}
    clear = Image.open(io.BytesIO(masks.show(query).body))
    assert clear.size == (1, 1) and clear.convert("RGBA").getpixel((0, 0))[3] == 0
    size = Image.open(data / "10_cat/1.png").size
    answer = masks.put(query, painted(size, 64))
    assert answer["count"] == 1 and answer["past"] == "Mask of 1" and tree(data) == start
    assert pixels.read_mask(place / "10_cat/1.png").max() == 64
    shown = np.asarray(Image.open(io.BytesIO(masks.show(query).body)).convert("RGBA"))
    assert shown[0, 0].tolist() == [220, 30, 60, 191]
    assert masks.undo(ApiRequest(scope))["count"] == 0
    with pytest.raises(ConfigError, match="nothing to undo"):
        masks.undo(ApiRequest(scope))


def test_nothing_outside_of_the_masks_is_read_or_written(editing, data, tmp_path):  # noqa: F811
    masks, scope = editing
    place = usual_folder(data)
    for name in ("../../etc/passwd", "/etc/passwd", "", "10_cat/none.png", "10_cat/../../x.png"):
        for act in (lambda q: masks.show(q), lambda q: masks.put(q, painted((4, 4)))):
            with pytest.raises(ConfigError, match="is not in"):
                act({**scope, "name": name})
    for query in ({}, {"folder": "/etc"}, {"folder": str(data), "collection": "x", "name": "10_cat/1.png"}):
        with pytest.raises(ConfigError):
            masks.show(query)
    image_query = {**scope, "name": "10_cat/1.png"}
    for content in (b"", b"<svg/>", painted((4, 400)), painted((9000, 9000))):
        with pytest.raises(ConfigError):
            masks.put(image_query, content)
    assert not place.exists() or tree(place) == {}
    (place / "10_cat").mkdir(parents=True, exist_ok=True)
    secret = tmp_path.parent / "secret.png"
    Image.new("L", (4, 4)).save(secret)
    before = secret.read_bytes()
    (place / "10_cat/1.png").symlink_to(secret)
    with pytest.raises(ConfigError):
        masks.show(image_query)
    with pytest.raises(ConfigError):
        masks.put(image_query, painted((72, 64)))
    assert secret.read_bytes() == before
    (place / "10_cat/2.png").write_bytes(b"\x89PNG\r\n\x1a\nrubbish")
    with pytest.raises(ConfigError, match="cannot be read as an image"):
        masks.show({**scope, "name": "10_cat/2.png"})
    tools = ToolCommands([data.resolve()])  # without its parent, where masks would be written
    sent = {"command": "mask", "name": "alpha", "values": {"folder": str(data)}}
    with pytest.raises(ConfigError, match="mask folder"):
        tools.begin(ApiRequest(sent))


def look_at(visitor, folder):
    """Open a folder with two new pictures in the data set tab."""
    folder.mkdir()
    for number in range(2):
        picture(number, 96, 64).save(folder / f"{number}.png")
    page = visitor.page
    page.get_by_role("tab", name="Data", exact=True).click()
    page.locator("#images-folder").fill(str(folder))
    visitor.click("Open folder")
    return page, usual_folder(folder), tree(folder)


def paint(visitor, name):
    """Open the window for painting an image's mask; returns the place of its canvas."""
    visitor.page.locator(f'.images .cards [data-name="{name}"] .look').click()
    visitor.click("Edit mask")
    visitor.page.locator(".painter .go:enabled").wait_for()
    visitor.page.locator("#mask-size").fill("20")
    return visitor.page.get_by_role("img", name=f"Mask of {name}").bounding_box()


@pytest.mark.browser
def test_masks_are_made_by_a_model_shown_and_painted_with_the_mouse(visit, served, monkeypatch):
    monkeypatch.setattr(jobs, "job_command", lambda words: [sys.executable, "-c", STUB, *words])
    visitor = visit()
    page, place, start = look_at(visitor, served[1] / "masked")
    page.locator("[data-panel=masks] summary").first.click()
    visitor.until("0 of 2 images have a mask", ".images")
    page.locator("#mask-model-model").fill("some/clipseg")
    page.locator("#mask-model-words").fill("cat")
    visitor.click("Make masks")
    visitor.until("2 of 2 images have a mask", ".images")
    page.locator('.images .cards [data-name="0.png"] .mask').wait_for()
    assert page.get_by_label("Show masks over the images").is_checked()
    mask = pixels.read_mask(place / "0.png")
    assert mask[:, :48].min() == 255 and mask[:, 48:].max() == 0

    box = paint(visitor, "0.png")
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + box["height"] * 0.5)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.5, steps=4)
    page.mouse.up()
    visitor.click("Leave this out")
    page.mouse.click(box["x"] + box["width"] * 0.2, box["y"] + box["height"] * 0.5)
    page.mouse.click(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.5)
    page.keyboard.press("Control+z")
    page.keyboard.press("Escape")
    page.get_by_text("Save the mask, or discard what you have painted.").wait_for()
    visitor.click("Save mask")
    visitor.until("The mask of 0.png is kept in", ".images")
    mask = pixels.read_mask(place / "0.png")
    assert mask.shape == (64, 96) and mask[32, 80] == 255 and mask[2, 80] == 0  # painted: trained
    assert mask[32, 19] == 0 and mask[32, 38] == 255  # erased: not trained; the undone stroke: trained
    for title in ("Mask of 0", "Masks by half"):
        visitor.click("Undo last masks")
        visitor.until(f"Undone: {title}.", ".images")
    visitor.until("0 of 2 images have a mask", ".images")
    assert tree(place) == {} and tree(served[1] / "masked") == start


@pytest.mark.browser
def test_masks_are_painted_with_a_finger(visit, served):
    visitor = visit(has_touch=True, is_mobile=True, color_scheme="dark")
    visitor.page.set_viewport_size({"width": 390, "height": 844})
    page, place, _ = look_at(visitor, served[1] / "touched")
    make_masks(served[1] / "touched", place, Half(), MaskOptions(), quiet)
    box = paint(visitor, "1.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    visitor.click("Leave this out")
    page.touchscreen.tap(box["x"] + box["width"] * 0.25, box["y"] + box["height"] * 0.5)
    visitor.click("Save mask")
    visitor.until("The mask of 1.png is kept in", ".images")
    mask = pixels.read_mask(place / "1.png")
    assert mask[32, 24] == 0 and mask[2, 24] == 255
    paint(visitor, "1.png")
    visitor.click("Learn all")
    visitor.click("Discard")  # writes nothing
    page.locator(".painter").wait_for(state="detached")
    assert np.array_equal(pixels.read_mask(place / "1.png"), mask)
