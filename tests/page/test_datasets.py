"""The images of a training as rows of its form: showing, saving, and refusing them."""

import json

import pytest
from PIL import Image

from kohya_gui.form import datasets
from kohya_gui.form.form import SettingsForm
from kohya_gui.form.tabs import FAMILY_TITLES, TABS
from kohya_gui.server.json_api import ApiRequest
from library.config.problems import ConfigError
from tests.training import wait_for

TAB = TABS[0]
START = {"resolution": "64", "caption_extension": ".txt", "max_train_steps": "100", "train_batch_size": "2"}


@pytest.fixture(scope="module")
def form():
    return SettingsForm(TAB.id, FAMILY_TITLES, TAB.configs, TAB.basics)


def fill(folder, count, captions=0):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB", (64, 64), (9 * number, 40, 40)).save(folder / f"{number}.png")
        if number < captions:
            (folder / f"{number}.txt").write_text("zorb")
    return folder


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    fill(folder / "flat", 4, 3)
    fill(folder / "named" / "10_zorb cat", 2)
    fill(folder / "named" / "3_dog", 5)
    fill(folder / "reg" / "1_cat", 3)
    return folder


@pytest.fixture
def page(form, root):
    """The browser's requests: show, count and save."""

    class Page:
        def submission(self, values):
            return form.parse_submission(
                json.dumps({"family": "sdxl", "values": {**START, **values}, "launch": {"num_processes": "1"}})
            )

        def look(self, **values):
            return datasets.scan_form_datasets(form, self.submission(values), [root])

        def count(self, **values):
            return datasets.count_images(form, self.submission(values), [root])

        def save(self, groups, file="", state="", **values):
            sent = ApiRequest({"groups": groups, "file": str(file), "known": state})
            return datasets.save_datasets(form, self.submission(values), sent, [root])

    return Page()


def rows(look):
    return [row["texts"] for group in look["groups"] for row in group["rows"]]


def test_a_flat_folder_named_folders_and_a_file_are_shown_alike(page, root):
    flat = page.look(train_data_dir=str(root / "flat"), dataset_repeats="5")
    assert flat["flat"] and rows(flat) == [{"image_dir": str(root / "flat"), "num_repeats": "5"}]
    assert flat["groups"][0]["shown"]["resolution"] == "64" and flat["groups"][0]["rows"][0]["images"] == 4
    named = page.look(train_data_dir=str(root / "named"), reg_data_dir=str(root / "reg"))
    cat, dog = str(root / "named/10_zorb cat"), str(root / "named/3_dog")
    assert rows(named) == [
        {"image_dir": cat, "num_repeats": "10", "class_tokens": "zorb cat"},
        {"image_dir": dog, "num_repeats": "3", "class_tokens": "dog"},
        {"image_dir": str(root / "reg/1_cat"), "num_repeats": "1", "class_tokens": "cat", "is_reg": "true"},
    ]
    saved = page.save(named["groups"], output_name="cat")
    assert saved["file"] == str(root / "kohya" / "cat-dataset.toml")
    file = page.look(dataset_config=saved["file"])
    assert rows(file) == rows(named) and file["known"] == saved["known"] and not file["problems"]
    counted = page.count(dataset_config=saved["file"])
    again = page.count(train_data_dir=str(root / "named"), reg_data_dir=str(root / "reg"))
    assert {name: counted[name] for name in ("seen", "steps", "rows")} == {
        n: again[n] for n in ("seen", "steps", "rows")
    }


def test_balance_and_steps_are_those_of_the_training(page, root):
    counted = page.count(train_data_dir=str(root / "named"), reg_data_dir=str(root / "reg"))
    assert [(row["images"], row["seen"]) for row in counted["rows"]] == [(2, 20), (5, 15), (3, 35)]
    assert (counted["seen"], counted["steps_per_epoch"], counted["steps"], counted["epochs"]) == (70, 35, 100, 3)
    flat = page.count(train_data_dir=str(root / "flat"))
    assert flat["rows"][0]["captioned"] == 3 and any("without a .txt file" in str(text) for text in flat["warnings"])
    assert not any("directly in" in str(text) for text in flat["warnings"])


def test_a_folder_at_several_sizes_is_one_row_with_all_that_it_is_seen(page, root):
    flat = page.look(train_data_dir=str(root / "flat"), resolution="64;96")
    assert [group["shown"]["resolution"] for group in flat["groups"]] == ["64;96"] and len(rows(flat)) == 1
    once = page.count(train_data_dir=str(root / "flat"))
    twice = page.count(train_data_dir=str(root / "flat"), resolution="64;96")
    assert [row["images"] for row in twice["rows"]] == [row["images"] for row in once["rows"]]
    assert twice["seen"] == 2 * once["seen"] and twice["images"] == once["images"] == 4
    file = root / "sizes.toml"
    table = "[[datasets]]\nresolution = {}\n[[datasets.subsets]]\nimage_dir = '{}'\n"
    file.write_text(table.format("[64, 96, 128]", root / "flat") + table.format(64, root / "named/3_dog"))
    shown = page.look(dataset_config=str(file))
    assert [group["texts"]["resolution"] for group in shown["groups"]] == ["64;96;128", "64"]
    assert [row["images"] for group in shown["groups"] for row in group["rows"]] == [4, 5]
    assert [(r["dataset"], r["seen"]) for r in page.count(dataset_config=str(file))["rows"]] == [(0, 12), (1, 5)]


def test_one_number_of_a_file_changes_and_its_comments_stay(page, root):
    file = root / "mine.toml"
    text = f"# mine\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{root / 'flat'}' # all\nnum_repeats = 2 # twice\n"
    file.write_text(text)
    shown = page.look(dataset_config=str(file))
    assert shown["groups"][0]["rows"][0]["shown"]["caption_extension"] == ".txt"  # the form's value
    shown["groups"][0]["rows"][0]["texts"]["num_repeats"] = "7"
    saved = page.save(shown["groups"], file, shown["known"])
    assert file.read_text() == text.replace("= 2", "= 7")
    file.write_text(text)
    for state in (saved["known"], "", shown["known"][:-1]):
        with pytest.raises(ConfigError, match="changed elsewhere"):
            page.save(shown["groups"], file, state)
    assert file.read_text() == text


def test_a_folder_that_is_added_brings_what_its_name_says(page, root):
    def added(folder, **texts):
        group = {"at": None, "texts": {}, "rows": [{"at": None, "texts": {"image_dir": str(folder), **texts}}]}
        return rows(page.look(dataset_config=page.save([group])["file"]))

    cat = {"image_dir": str(root / "named/10_zorb cat"), "num_repeats": "10", "class_tokens": "zorb cat"}
    assert added(root / "named") == [
        cat,
        {**cat, "image_dir": str(root / "named/3_dog"), "num_repeats": "3", "class_tokens": "dog"},
    ]
    assert added(root / "named/10_zorb cat") == [cat]
    assert added(root / "named/10_zorb cat", num_repeats="2") == [{"image_dir": cat["image_dir"], "num_repeats": "2"}]
    assert added(root / "flat") == [{"image_dir": str(root / "flat")}]


def test_what_is_wrong_in_a_file_is_shown_so_that_it_can_be_mended(page, root):
    file = root / "wrong.toml"
    file.write_text(
        f"[[datasets]]\nbatch_size = 'many'\n[[datasets.subsets]]\nimage_dir = '{root / 'flat'}'\nfoo = 1\n"
    )
    shown = page.look(dataset_config=str(file))
    assert shown["groups"][0]["texts"] == {"batch_size": "many"} and len(shown["problems"]) == 2
    shown["groups"][0]["texts"]["batch_size"] = "1"
    page.save(shown["groups"], file, shown["known"])
    assert "batch_size = 1\n" in file.read_text() and len(page.look(dataset_config=str(file))["problems"]) == 1


def test_nothing_outside_of_the_roots_is_read_written_or_named(page, root, tmp_path):
    outside = fill(tmp_path / "outside", 2)
    (root / "link").symlink_to(outside)
    file = root / "names.toml"
    file.write_text(f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{outside}'\nnum_repeats = 2\n")
    shown = page.look(dataset_config=str(file))
    assert shown["groups"][0]["rows"][0]["images"] is None
    for values in (
        {"dataset_config": str(file)},
        {"train_data_dir": str(outside)},
        {"train_data_dir": str(root / "link")},
    ):
        with pytest.raises(ConfigError, match="outside"):
            page.count(**values)
    shown["groups"][0]["rows"][0]["texts"]["num_repeats"] = "3"  # folders that the file named before may stay
    page.save(shown["groups"], file, shown["known"])
    for option in ("image_dir", "conditioning_data_dir", "control_directory", "metadata_file"):
        new = {
            "at": None,
            "texts": {},
            "rows": [{"at": None, "texts": {"image_dir": str(root / "flat"), option: str(outside)}}],
        }
        with pytest.raises(ConfigError, match="outside"):
            page.save([new])
    for values in ({"dataset_config": str(outside / "a.toml")}, {"train_data_dir": str(outside)}):
        with pytest.raises(ConfigError):
            page.look(**values)
    flat = {"at": None, "texts": {}, "rows": [{"at": None, "texts": {"image_dir": str(root / "flat")}}]}
    for place in ({"file": outside / "a.toml"}, {"output_dir": str(outside)}, {"file": root / "a.exe"}):
        with pytest.raises(ConfigError):
            page.save([flat], **place)
    assert not list(outside.glob("*.toml"))


@pytest.mark.parametrize(
    "groups",
    [
        None,
        "a",
        [3],
        [{"rows": 3}],
        [{"texts": {}, "rows": [{"texts": {"evil": "x"}}]}],
        [{"texts": {"resolution": 3}, "rows": []}],
        [{"texts": {}, "rows": [{"texts": {"image_dir": "a\nb"}}]}],
        [{"texts": {}, "rows": [{"texts": {}, "at": -1}]}],
        [{"texts": {}, "rows": [{"texts": {}, "at": True}]}],
        [{"texts": {}, "rows": [{"texts": {}}] * 600}],
        [[]] * 600,
    ],
)
def test_what_the_page_does_not_send_is_refused(page, root, groups):
    with pytest.raises(ConfigError, match="load it again"):
        page.save(groups)
    assert not (root / "kohya").exists()


def test_too_much_is_refused(page, root):
    large = root / "large.toml"
    large.write_text("# x\n" * 300_000)
    with pytest.raises(ConfigError, match="too large"):
        page.look(dataset_config=str(large))
    with pytest.raises(ConfigError, match="an epoch would have"):
        page.count(train_data_dir=str(fill(root / "many", 101)), dataset_repeats="100000")
    with pytest.raises(ConfigError, match="num_repeats"):
        row = {"at": None, "texts": {"image_dir": str(root / "flat"), "num_repeats": "9999999"}}
        page.save([{"at": None, "texts": {}, "rows": [row]}])


@pytest.mark.browser
def test_photos_from_a_phone_become_a_data_set(visit, served, tmp_path):
    photos = fill(tmp_path / "photos", 3, 2)
    (photos / "bad.png").write_text("no image")
    visitor = visit()
    page, form = visitor.page, visitor.page.locator("#lora-form")
    box = form.locator(".datasets")
    visitor.fill(output_name="phone")
    box.locator(".choose-images input").set_input_files([str(file) for file in sorted(photos.iterdir())])
    visitor.until("phone: 5 files.", ".datasets .file").until("bad.png is not an image", ".datasets .file")
    folder = served[1] / "kohya" / "images" / "phone"
    assert sorted(file.name for file in folder.iterdir()) == ["0.png", "0.txt", "1.png", "1.txt", "2.png"]
    wait_for(lambda: form.locator("[data-option=train_data_dir]").input_value() == str(folder), 30)
    visitor.until("100% of an epoch", ".datasets .numbers").until("2 with a caption", ".datasets .numbers")
    repeats = box.locator("li [data-set=num_repeats]")
    repeats.fill("4")  # a single folder needs no dataset file
    visitor.until("12 images per epoch", ".datasets .sum")
    assert form.locator("[data-option=dataset_repeats]").input_value() == "4"
    box.locator(".choose-images input").set_input_files([str(photos / "0.png")])
    visitor.until("Already there: 1 file", ".datasets .file")
    drop = """async (box) => {
      const data = new DataTransfer();
      data.items.add(new File(["a dog"], "2.txt", { lastModified: 5 }));
      const how = { bubbles: true, cancelable: true, dataTransfer: data };
      for (const type of ["dragover", "drop"]) box.querySelector("li").dispatchEvent(new DragEvent(type, how));
    }"""
    box.evaluate(drop)
    wait_for(lambda: (folder / "2.txt").exists(), 30)
    visitor.until("3 with a caption", ".datasets .numbers")
    assert (folder / "2.txt").read_text() == "a dog" and not list(folder.glob(".*.part"))
    page.reload()
    visitor.until("12 images per epoch", ".datasets .sum")


@pytest.mark.browser
def test_named_folders_are_rows_and_a_change_is_written_into_a_file(visit, served):
    root = served[1] / "sets"
    for name, count in (("10_zorb cat", 2), ("3_dog", 3), ("more", 2)):
        fill(root / ("named" if name[0].isdigit() else "") / name, count, count)
    visitor = visit()
    page, form = visitor.page, visitor.page.locator("#lora-form")
    box = form.locator(".datasets")
    visitor.fill(output_name="zorb", output_dir=root / "out", train_data_dir=root / "named")
    visitor.until("29 images per epoch", ".datasets .sum")
    assert box.locator("li").count() == 2
    box.locator("li [data-set=num_repeats]").first.fill("5")
    visitor.until("Saved in", ".datasets .file").until("19 images per epoch", ".datasets .sum")
    file = root / "out" / "zorb-dataset.toml"
    assert (
        form.locator("[data-option=dataset_config]").input_value() == str(file)
        and "num_repeats = 5" in file.read_text()
    )
    assert form.locator("[data-option=train_data_dir]").input_value() == ""
    visitor.until("No effect: the images are those of the list below, which zorb-dataset.toml holds", ".ineffective")
    box.get_by_role("button", name="Add a data set").click()
    row = box.locator("li").nth(2)
    row.locator("[data-set=image_dir]").fill(str(root / "more"))
    page.keyboard.press("Tab")
    wait_for(lambda: "more" in file.read_text(), 30)
    visitor.until("Data set 2", ".datasets summary").until("21 images per epoch", ".datasets .sum")
    group = box.locator(".group").nth(1)
    with page.expect_response(
        lambda answer: answer.url.endswith("datasets_count")
    ):  # after this response nothing reads the file again
        group.locator("[data-set=resolution]").fill("768")
    assert "resolution = 768" in file.read_text()
    file.write_text("# by hand\n" + file.read_text())
    group.locator("[data-set=batch_size]").fill("2")
    visitor.until("changed elsewhere", ".datasets .file")
    assert "batch_size" not in file.read_text()
    page.reload()
    visitor.until("21 images per epoch", ".datasets .sum")  # the saved value
    box.locator("li [data-set=num_repeats]").first.fill("many")  # invalid text survives a reload
    visitor.until("num_repeats", ".datasets .file .bad")
    page.reload()
    visitor.until("num_repeats", ".datasets .file .bad")
    assert box.locator("li [data-set=num_repeats]").first.input_value() == "many"
    box.locator("li [data-set=num_repeats]").first.fill("5")
    visitor.until("21 images per epoch", ".datasets .sum")
    box.locator("li").first.get_by_role("button", name="Remove").click()
    wait_for(lambda: "zorb cat" not in file.read_text(), 30)
    assert file.read_text().startswith("# by hand\n")


@pytest.mark.browser
@pytest.mark.parametrize("locale", ["en-US", "ja-JP"])
def test_on_a_phone_the_words_that_open_more_settings_stay_in_one_line(visit, served, locale):
    fill(served[1] / "narrow", 1)
    visitor = visit(locale=locale)
    visitor.page.set_viewport_size({"width": 390, "height": 844})
    visitor.fill(train_data_dir=served[1] / "narrow")
    summary = visitor.page.locator("#lora-form .groups li summary").first
    summary.wait_for()
    assert summary.bounding_box()["height"] < 30
