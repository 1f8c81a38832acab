"""Files and folders that are dropped on every part of the page, as a file manager drops them."""

import numpy as np
import pytest
from PIL import Image

from tests.training import wait_for

pytestmark = pytest.mark.browser

ROOMS = ("Data", "Train", "Runs", "Try it", "Tools", "Lab")


def draw(path, number=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def drop(page, *paths, at="#top"):
    """Drop files and folders on the middle of an element."""
    box = page.locator(f"{at} >> visible=true").first.bounding_box()
    data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    session = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "data": data, **place})
    session.detach()


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_is_left_for_a_dropped_image(visit, tmp_path, room):
    visitor = visit()
    page = visitor.page
    visitor.room(room)
    page.evaluate("window.isSame = true")
    drop(page, draw(tmp_path / f"{room}.png"))
    if room == "Data":
        visitor.until("1 of 1", ".images .numbers").until("Sent to", ".images .said-of")
    elif room == "Train":
        visitor.until("1 image per epoch", ".datasets .sum")
    else:
        visitor.until("Drop images and captions in Data or in Train", ".notices .message")
        page.locator(".notices").get_by_role("button", name="Close").click()
        visitor.has_none("[...document.querySelectorAll('.notices .message')]")
    assert page.evaluate("window.isSame")


@pytest.mark.parametrize("at", ["#top", "form.settings .field", ".datasets", ".bar"])
def test_a_config_is_loaded_wherever_it_is_dropped_on_a_form(visit, tmp_path, at):
    config = tmp_path / "dropped.toml"
    config.write_text("max_train_steps = 77\n")
    other = tmp_path / "other.toml"
    other.write_text("max_train_steps = 78\n")
    visitor = visit()
    visitor.room("Train")
    drop(visitor.page, config, at=at)
    visitor.until("Loaded dropped.toml")
    assert visitor.held()["values"]["max_train_steps"] == "77"
    drop(visitor.page, config, other, at=at)
    visitor.until("Drop one config at a time: dropped.toml, other.toml")
    assert visitor.held()["values"]["max_train_steps"] == "77"


@pytest.mark.parametrize("room", ["Data", "Train"])
def test_folders_inside_of_a_dropped_folder_keep_their_names_and_captions(visit, served, tmp_path, room):
    made = tmp_path / f"pets {room}"
    for number, folder in enumerate(("10_zorb cat", "3_dog")):
        draw(made / folder / "01.png", number)
        (made / folder / "01.txt").write_text("the same words")
        for name in (".DS_Store", "Thumbs.db", "01_sdxl.npz", "01_0064x0064_flux.safetensors"):
            (made / folder / name).write_bytes(b"of the system, or a cache")
    visitor = visit()
    visitor.room(room)
    if room == "Train":
        visitor.fill(output_name=made.name)
    drop(visitor.page, made)
    visitor.until("13 images per epoch", ".datasets .sum" if room == "Train" else ".images .steps")
    said = visitor.page.locator(".datasets .file" if room == "Train" else ".images .said-of").first.inner_text()
    assert "neither" not in said and said.count("2 files") == 2
    name = made.name if room == "Train" else "images"
    sent = max((served[1] / "kohya" / "images").glob(f"{name}*"), key=lambda folder: folder.stat().st_mtime)
    assert sorted(path.relative_to(sent).as_posix() for path in sent.rglob("*") if path.is_file()) == [
        "10_zorb cat/01.png",
        "10_zorb cat/01.txt",
        "3_dog/01.png",
        "3_dog/01.txt",
    ]


def test_folders_without_repeats_become_rows(visit, served, tmp_path):
    for number, folder in enumerate(("cats", "dogs", "deep/inside")):
        draw(tmp_path / "pets" / folder / "01.png", number)
    visitor = visit()
    visitor.room("Train")
    visitor.fill(output_name="rows", output_dir=served[1] / "out")
    drop(visitor.page, tmp_path / "pets")
    visitor.until("inside", ".datasets .file")
    rows = visitor.page.locator(".datasets:visible .groups li [data-set=image_dir]")
    wait_for(lambda: rows.count() == 3, 30)
    folders = sorted(row.input_value().replace("\\", "/").split("/")[-1] for row in rows.all())
    assert folders == ["cats", "dogs", "inside"]


WRONG = {
    "movie.mp4": (b"0000ftyp" * 9, "is neither an image"),
    "setup.exe": (b"MZ" * 9, "is neither an image"),
    "empty.png": (b"", "is empty"),
    "set.zip": (b"PK" * 9, "is an archive: unpack it"),
    "broken.png": (b"\x89PNG" * 9, "is not an image that can be read"),
}


@pytest.mark.parametrize("room", ["Data", "Train"])
def test_what_is_no_image_is_refused_by_name_and_adds_no_folder(visit, tmp_path, room):
    for name, (content, _) in WRONG.items():
        (tmp_path / name).write_bytes(content)
    visitor = visit()
    visitor.room(room)
    drop(visitor.page, *(tmp_path / name for name in WRONG))
    for name, (_, why) in WRONG.items():
        visitor.until(f"{name} {why}", ".datasets .file" if room == "Train" else ".images .said-of")
    assert visitor.page.locator(".datasets:visible li, .images .collection:visible").count() == 0
