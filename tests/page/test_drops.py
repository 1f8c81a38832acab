"""Files and folders that are dropped on every part of the page, as a file manager drops them."""

import os
import re

import numpy as np
import pytest
from PIL import Image

from library.config.values import WINDOWS
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
    # The sentence follows the numbers: Data requests its cards in between.
    said = visitor.read("2 files", ".datasets .file" if room == "Train" else ".images > .said-of")
    assert "neither" not in said and said.count("2 files") == 2
    name = made.name if room == "Train" else "images"
    sent = max((served[1] / "kohya" / "images").glob(f"{name}*"), key=lambda folder: folder.stat().st_mtime)
    assert sorted(path.relative_to(sent).as_posix() for path in sent.rglob("*") if path.is_file()) == [
        "10_zorb cat/01.png",
        "10_zorb cat/01.txt",
        "3_dog/01.png",
        "3_dog/01.txt",
    ]


@pytest.mark.parametrize("name", ["own", "own/kohya/images/cats"])
def test_added_images_leave_a_folder_of_the_users_alone_unless_they_are_dropped_on_it(visit, served, tmp_path, name):
    own, added = served[1] / name, name.replace("/", "-")
    draw(own / "01.png")
    visitor = visit()
    page = visitor.page
    visitor.room("Train")
    visitor.fill(output_name=added, output_dir=served[1] / "out", train_data_dir=own)
    visitor.until("1 image per epoch", ".datasets .sum")
    drop(page, draw(tmp_path / "02.png", 2))
    visitor.until("2 images per epoch", ".datasets .sum")
    rows = page.locator(".datasets:visible .groups li [data-set=image_dir]")
    folders = [row.input_value() for row in rows.all()]
    assert folders == [str(own), str(served[1] / "kohya" / "images" / added)]
    assert [path.name for path in own.glob("*.png")] == ["01.png"]
    drop(page, draw(tmp_path / "03.png", 3), at=".datasets:visible .groups li >> nth=0")
    visitor.until("3 images per epoch", ".datasets .sum")
    assert sorted(path.name for path in own.glob("*.png")) == ["01.png", "03.png"] and rows.count() == 2


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


# Names of folders in a drop, and those that their images get.
NAMES = {
    "aux": "_aux",
    ".trash": "trash",
    "a'\"b": "a'_b",
    "new\nline": "newline",
    "two:parts": "two_parts",
    "dot.": "dot",
    "..\\up": "up",
    "\u202egnp": "gnp",
    "same/x": "x",
    "other/X": "X_2",
    "x_2": "x_2_2",
    "v1.5 Cats": "v1.5 Cats",
}


@pytest.mark.skipif(WINDOWS, reason="has no such names")
@pytest.mark.parametrize("room", ["Data", "Train"])
def test_folders_of_any_name_are_sent_apart_under_names_for_every_system(visit, served, tmp_path, room):
    for number, name in enumerate(NAMES):
        draw(tmp_path / "made" / name / "01.png", number)
    visitor = visit()
    visitor.room(room)
    if room == "Train":
        visitor.fill(output_name="names")
    drop(visitor.page, *sorted((tmp_path / "made").iterdir()))
    said = ".datasets .file" if room == "Train" else ".images .said-of"
    visitor.until("v1.5 Cats", said)
    name = "names" if room == "Train" else "images"
    sent = max((served[1] / "kohya" / "images").glob(f"{name}*"), key=lambda folder: folder.stat().st_mtime)
    folders = [path.parent.name for path in sent.rglob("*.png")]
    expected = {*NAMES.values()} - {"x", "X_2", "x_2_2"}
    assert {*folders} > expected and len(folders) == len({folder.lower() for folder in folders}) == len(NAMES)
    if room == "Train":
        rows = visitor.page.locator(".datasets:visible .groups li [data-set=image_dir]")
        wait_for(lambda: rows.count() == len(NAMES), 30)


@pytest.mark.parametrize("room", ["Data", "Train"])
def test_a_folder_that_cannot_be_made_does_not_stop_the_others(visit, served, tmp_path, room):
    for number, folder in enumerate(("birds", "cats", "dogs")):
        draw(tmp_path / "made" / folder / "01.png", number)
    visitor = visit()
    visitor.page.route("**/own/upload", lambda route: refuse(route, "cats"))
    visitor.room(room)
    if room == "Train":
        visitor.fill(output_name="apart")
    drop(visitor.page, *sorted((tmp_path / "made").iterdir()))
    visitor.until("cats cannot be used", ".datasets .file" if room == "Train" else ".images .said-of")
    if room == "Train":
        rows = visitor.page.locator(".datasets:visible .groups li [data-set=image_dir]")
        wait_for(lambda: rows.count() == 2, 30)
    else:
        visitor.until("of 2", ".images .numbers")
    visitor.page.unroute_all()


def refuse(route, name):
    """Answer a request about a folder of this name as the server does where the system refuses it."""
    sent = route.request.post_data_json
    if sent["folder"].endswith(name):
        route.fulfill(json={"error": f"{name} cannot be used: No space left on device"})
    else:
        route.continue_()


@pytest.mark.parametrize("room", ["Data", "Train"])
def test_what_is_dropped_while_files_are_sent_is_not_lost_without_a_word(visit, tmp_path, room):
    visitor = visit()
    visitor.room(room)
    held = []
    visitor.page.route("**/own/upload_folder", lambda route: held.append(route))
    drop(visitor.page, draw(tmp_path / "a.png"))
    wait_for(lambda: visitor.page.wait_for_timeout(20) or held, 30)
    at = ".datasets" if room == "Train" else "#top"  # the first drop has scrolled to it
    drop(visitor.page, draw(tmp_path / "b.png", 1), at=at)
    said = ".datasets .file" if room == "Train" else ".images .said-of"
    visitor.until("Files are being sent: drop these again when they are there.", said)
    held[0].continue_()
    visitor.until("Sent to", said)
    assert len(held) == 1
    visitor.page.unroute_all()
    drop(visitor.page, tmp_path / "b.png", at=at)
    visitor.until("2 images per epoch" if room == "Train" else "2 of 2", ".datasets .sum, .images .numbers")


def test_images_that_are_added_later_join_those_that_were_sent(visit, served, tmp_path):
    visitor = visit()
    page = visitor.page
    visitor.room("Train")
    visitor.fill(output_name="joined", output_dir=served[1] / "out")
    page.locator(".datasets:visible [data-row=add]").click()  # a folder without a name takes them, too
    for number in (1, 2):
        drop(page, draw(tmp_path / f"{number}.png", number), at=".datasets .choose-images")
        visitor.until(f"{number} image{'s' * (number > 1)} per epoch", ".datasets .sum")
    rows = page.locator(".datasets:visible .groups li [data-set=image_dir]")
    assert [row.input_value() for row in rows.all()] == [str(served[1] / "kohya" / "images" / "joined")]


def test_images_sent_before_the_output_is_named_get_no_name_of_a_lora_and_open_for_captions(visit, served, tmp_path):
    visitor = visit()
    page = visitor.page
    visitor.room("Train")
    visitor.fill(output_dir=served[1] / "out")
    drop(page, draw(tmp_path / "1.png", 1), at=".datasets .choose-images")
    visitor.until("1 image per epoch", ".datasets .sum")
    folder = page.locator(".datasets:visible .groups li [data-set=image_dir]").input_value()
    parent, name = os.path.split(folder)
    assert re.fullmatch(r"images(_\d+)?", name) and parent == str(served[1] / "kohya" / "images")
    visitor.fill(output_name="cat")  # which renames nothing that is there
    assert page.locator(".datasets:visible .groups li [data-set=image_dir]").input_value() == folder
    visitor.click("Images and captions")
    visitor.until("1 of 1", ".images .numbers")
    assert page.locator("#images-folder").input_value() == folder


def test_masks_that_were_sent_are_named_in_a_row_that_was_rebuilt_meanwhile(visit, served, tmp_path):
    own, held = served[1] / "to-mask", []
    draw(own / "01.png")
    visitor = visit()
    page = visitor.page
    visitor.room("Train")
    visitor.fill(output_name="masked", output_dir=served[1] / "out", train_data_dir=f"{own}/")
    visitor.until("1 image per epoch", ".datasets .sum")
    row = page.locator(".datasets:visible .groups li")
    row.locator("details > summary").click()
    page.route("**/own/upload", lambda route: held.append(route), times=1)
    with page.expect_file_chooser() as chooser:
        row.locator("[data-row=send]").nth(0).click()
    chooser.value.set_files(str(draw(tmp_path / "01.png", 1)))
    wait_for(lambda: page.wait_for_timeout(20) or held, 30)
    row.evaluate("row => void (row.isBefore = true)")
    visitor.fill(train_batch_size=2)
    page.wait_for_function("![...document.querySelectorAll('.datasets .groups li')].some((row) => row.isBefore)")
    held[0].continue_()
    visitor.until("Sent to", ".datasets .file")
    assert row.locator("[data-set=conditioning_data_dir]").input_value() == f"{own}-masks"
    assert [path.name for path in own.iterdir()] == ["01.png"]


def test_more_is_taken_while_a_slow_server_lists_what_was_sent(visit, tmp_path):
    visitor = visit()
    visitor.room("Data")
    held = []
    visitor.page.route("**/own/images_page", lambda route: held.append(route), times=1)
    drop(visitor.page, draw(tmp_path / "a.png"))
    visitor.until("1 of 1", ".images .numbers")
    wait_for(lambda: visitor.page.wait_for_timeout(20) or held, 30)
    drop(visitor.page, draw(tmp_path / "b.png", 1))
    visitor.until("2 of 2", ".images .numbers")
    held[0].continue_()
    visitor.until("Sent to", ".images > .said-of")


def test_a_folder_that_cannot_be_opened_after_it_was_filled_is_said(visit, tmp_path):
    visitor = visit()
    visitor.room("Data")
    visitor.page.route("**/own/images_open", lambda route: route.fulfill(json={"error": "The disk is gone."}))
    drop(visitor.page, draw(tmp_path / "a.png"))
    visitor.until("The disk is gone.", ".images > .said-of")
    visitor.page.unroute_all()


def test_what_was_refused_is_still_said_when_the_rows_are_saved(visit, served, tmp_path):
    for number, folder in enumerate(("cats", "dogs")):
        draw(tmp_path / "pets" / folder / "01.png", number)
    (tmp_path / "movie.mp4").write_bytes(WRONG["movie.mp4"][0])
    visitor = visit()
    visitor.room("Train")
    visitor.fill(output_name="refused", output_dir=served[1] / "out")
    drop(visitor.page, tmp_path / "pets")
    visitor.until("2 images per epoch", ".datasets .sum")
    drop(visitor.page, draw(tmp_path / "bird.png", 2), tmp_path / "movie.mp4", at=".datasets .sum")
    visitor.until("3 images per epoch", ".datasets .sum")
    visitor.until("Sent to", ".datasets .file").until("movie.mp4 is neither an image", ".datasets .file")


def test_what_was_refused_is_said_also_while_the_rows_cannot_be_saved(visit, served, tmp_path):
    for number, folder in enumerate(("cats", "dogs")):
        draw(tmp_path / "pets" / folder / "01.png", number)
    (tmp_path / "movie.mp4").write_bytes(WRONG["movie.mp4"][0])
    visitor = visit()
    page = visitor.page
    visitor.room("Train")
    visitor.fill(output_name="unsaved", output_dir=served[1] / "out")
    drop(page, tmp_path / "pets")
    visitor.until("2 images per epoch", ".datasets .sum")
    page.route("**/own/datasets_save", lambda route: route.fulfill(json={"error": "The disk is full."}))
    page.locator(".datasets:visible .groups li [data-set=num_repeats]").first.fill("3")
    visitor.until("The disk is full.", ".datasets .file")
    row = ".datasets:visible .groups li >> nth=0"
    drop(page, draw(tmp_path / "bird.png", 2), tmp_path / "movie.mp4", at=row)
    visitor.until("Sent to", ".datasets .file").until("movie.mp4 is neither an image", ".datasets .file")
    assert "The disk is full." in page.locator(".datasets:visible .file").inner_text()
    page.unroute_all()


def test_an_image_of_the_page_that_is_dragged_over_it_is_no_file(visit, tmp_path):
    visitor = visit()
    visitor.room("Data")
    drop(visitor.page, draw(tmp_path / "a.png"))
    visitor.until("1 of 1", ".images .numbers")
    sent = []
    visitor.page.on("request", lambda request: sent.append(request.post_data or ""))
    # Browsers offer a dragged image of the page as a file, too.
    script = """image => {
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File(["0"], "dragged.png", { type: "image/png" }));
        const send = (type, at) =>
            at.dispatchEvent(new DragEvent(type, { bubbles: true, cancelable: true, dataTransfer }));
        send("dragstart", image);
        send("drop", image.closest(".images"));
        send("dragend", image);
    }"""
    visitor.page.locator(".images img >> visible=true").first.evaluate(script)
    drop(visitor.page, draw(tmp_path / "b.png", 1))
    visitor.until("2 of 2", ".images .numbers")
    assert any("b.png" in text for text in sent) and not any("dragged.png" in text for text in sent)


@pytest.mark.parametrize("room", ["Data", "Train"])
def test_a_file_that_the_browser_cannot_read_is_named(visit, tmp_path, room):
    draw(tmp_path / "made" / "01.png")
    visitor = visit()
    visitor.room(room)
    visitor.page.evaluate(
        """() => {
            const usual = DataTransferItem.prototype.webkitGetAsEntry;
            DataTransferItem.prototype.webkitGetAsEntry = function () {
                const folder = usual.call(this), reader = folder.createReader();
                const file = (_, fail) => fail(new DOMException("", "NotReadableError"));
                const some = [[{ isFile: true, name: "01.png", file }], []];
                reader.readEntries = (done) => done(some.shift());
                return { name: folder.name, isDirectory: true, createReader: () => reader };
            };
        }"""
    )
    drop(visitor.page, tmp_path / "made")
    visitor.until("01.png cannot be read", ".notices .message")
