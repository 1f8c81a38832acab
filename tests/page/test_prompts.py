"""Sample prompts as rows of the form: what is saved, kept and refused."""

import json

import pytest
from PIL import Image

from kohya_gui.form import prompts as prompts_page
from kohya_gui.form.form import SettingsForm
from kohya_gui.form.tabs import FAMILY_TITLES, TABS
from kohya_gui.server.json_api import ApiRequest
from library.config.problems import ConfigError
from library.sampling import prompt_rows
from library.sampling.prompts import parse_line, read_prompts
from tests.training import wait_for

TAB = TABS[0]
CAT = {"prompt": "a cat", "negative_prompt": "blurry, dark", "width": "640", "seed": "7", "scale": "4.5"}


@pytest.fixture(scope="module")
def form():
    return SettingsForm(TAB.id, FAMILY_TITLES, TAB.configs, TAB.basics)


@pytest.fixture
def save(form, tmp_path):
    """Save as the browser does, with an output folder of the test."""

    def ask(rows, file="", state="", **values):
        form_values = {"output_dir": str(tmp_path / "out"), "output_name": "cat"} | values
        sent = form.parse_submission(json.dumps({"family": "flux", "values": form_values, "launch": {}}))
        request = ApiRequest({"rows": rows, "file": str(file), "known": state})
        return prompts_page.save_rows(form, sent, request, [tmp_path])

    return ask


def load(file, tmp_path):
    return prompts_page.load_rows(ApiRequest({"file": str(file)}), [tmp_path])


def test_rows_become_the_lines_that_trainings_read(save, tmp_path):
    saved = save(
        [CAT, {"prompt": "  a dog\t"[:-1], "sample_steps": "12", "sample_sampler": "euler_a"}, {"prompt": " "}]
    )
    file = tmp_path / "out" / "cat-prompts.txt"
    assert saved["file"] == str(file)
    assert file.read_text() == "a cat --w 640 --d 7 --l 4.5 --n blurry, dark\na dog --s 12 --ss euler_a\n"
    first, second = read_prompts(file)
    assert (first.prompt, first.negative_prompt, first.width, first.seed, first.scale) == (
        "a cat",
        "blurry, dark",
        640,
        7,
        4.5,
    )
    assert (second.prompt, second.sample_steps, second.sample_sampler) == ("a dog", 12, "euler_a")
    loaded = load(file, tmp_path)
    assert loaded["known"] == saved["known"] and loaded["rows"][0] == CAT
    other = save([CAT], state=saved["known"])  # the form names no file, so a new one is written
    assert other["file"] == str(tmp_path / "out" / "cat-prompts-2.txt") and len(read_prompts(file)) == 2


def test_comments_and_what_has_no_field_stay(save, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text(
        "\ufeff# portraits\na cat --w 640 --cn pose.png --x 3\n\n# places\nthe sea\nold\n", encoding="utf-8"
    )
    loaded = load(file, tmp_path)
    rows = [row["prompt"] for row in loaded["rows"]]
    assert rows == ["a cat", "the sea", "old"] and loaded["rows"][0]["controlnet_image"] == "pose.png"
    changed = [loaded["rows"][0] | {"width": "512"}, {"prompt": "the sea at night"}]
    saved = save(changed, file, loaded["known"])
    assert saved["file"] == str(file)
    assert file.read_text() == "# portraits\na cat --w 512 --cn pose.png --x 3\n\n# places\nthe sea at night\n"
    save([*changed, {"prompt": "new"}], file, saved["known"])
    assert file.read_text().splitlines()[-2:] == ["the sea at night", "new"]


def test_images_that_a_model_is_shown_have_fields(save, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("a cat --ci my room.png --ci b.png --cim hole.png --d 4\na dog --ci one;two.png\n")
    loaded = load(file, tmp_path)
    first, second = loaded["rows"]
    assert first["control_image_path"] == "my room.png; b.png" and first["control_image_mask_path"] == "hole.png"
    assert "control_image_path" not in second, "a name with a semicolon stays as it is written"
    save([first | {"control_image_path": " c.png ;my room.png"}, second], file, loaded["known"])
    assert file.read_text() == "a cat --d 4 --ci c.png --ci my room.png --cim hole.png\na dog --ci one;two.png\n"
    assert read_prompts(file)[0].control_image_path == ("c.png", "my room.png")


def test_a_file_that_was_changed_elsewhere_is_not_written_over(save, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("a cat\n")
    loaded_state = load(file, tmp_path)["known"]
    file.write_text("a dog\n")
    for state in (loaded_state, ""):
        with pytest.raises(ConfigError, match="changed elsewhere"):
            save([CAT], file, state)
    assert file.read_text() == "a dog\n"


OTHER = {
    "mine.json": '["a cat --w 640", {"prompt": "the sea", "seed": 3}]',
    "mine.toml": '[prompt]\nwidth=640\n[[prompt.subset]]\nprompt="a cat"\n'
    '[[prompt.subset]]\nprompt="the sea"\nseed=3\n',
}


@pytest.mark.parametrize(("name", "text"), OTHER.items())
def test_files_of_other_formats_are_read_and_kept(save, tmp_path, name, text):
    file = tmp_path / name
    file.write_text(text)
    loaded = load(file, tmp_path)
    assert [row["prompt"] for row in loaded["rows"]] == ["a cat", "the sea"]
    assert loaded["rows"][0]["width"] == "640" and loaded["rows"][1]["seed"] == "3"
    saved = save(loaded["rows"], file, loaded["known"])
    assert saved["file"] == str(tmp_path / "mine.txt") and file.read_text() == text
    assert [prompt.prompt for prompt in read_prompts(saved["file"])] == ["a cat", "the sea"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a cat --w 3"}, "row 2: "),
        ({"prompt": "a -- b", "negative_prompt": "x --d 4"}, "row 2: "),
        ({"prompt": "# a"}, "cannot begin with #"),
        ({"prompt": "w 640 wide"}, "begins as an option"),
        ({"prompt": "a", "width": "wide"}, "width cannot be 'wide'"),
        ({"prompt": "a", "width": "99999"}, "width must be from 1 to 8192"),
        ({"prompt": "a", "seed": "-2"}, "seed cannot be '-2'"),
        ({"prompt": "a", "sample_steps": "5000"}, "sample_steps cannot be '5000'"),
        ({"prompt": "a", "scale": "1.2.3"}, "scale cannot be '1.2.3'"),
        ({"prompt": "a\nb"}, "prompt has to be one line"),
    ],
)
def test_what_a_line_cannot_say_is_refused_and_nothing_is_written(save, tmp_path, row, words):
    with pytest.raises(ConfigError) as refused:
        save([CAT, row, {"prompt": "b", "height": "tall"}])
    assert words in str(refused.value) and "row 3: height cannot be 'tall'" in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "rows", ["a cat", [["a"]], [{"prompt": 3}], [{"width": "3"}], [{"prompt": "a", "evil": "b"}], None]
)
def test_what_the_page_does_not_send_is_refused(save, rows):
    with pytest.raises(ConfigError, match="load it again"):
        save(rows)


def test_only_text_files_inside_the_roots_are_read_and_written(save, tmp_path, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "a.txt"
    outside.write_text("secret")
    (tmp_path / "model.safetensors").write_text("x")
    (tmp_path / "large.txt").write_text("a\n" * 600_000)
    for file in (outside, tmp_path / "model.safetensors", tmp_path / ".hidden" / "a.txt", tmp_path / "large.txt"):
        with pytest.raises(ConfigError):
            load(file, tmp_path)
        with pytest.raises(ConfigError):
            save([CAT], file)
    with pytest.raises(ConfigError, match="output_dir"):
        save([CAT], output_dir="")
    with pytest.raises(ConfigError):
        save([CAT], output_dir=str(outside.parent))
    assert outside.read_text() == "secret" and [*outside.parent.iterdir()] == [outside]


def test_a_row_says_what_its_line_says():
    for text in ("a cat --d 1 --w 64 --fs 3 --zz 1 --n no", "plain", "a --w x --h 8"):
        (row,) = [prompt_rows._row_of_line(text, 1)]
        assert parse_line(prompt_rows.prompt_line(row)) == parse_line(text)


@pytest.fixture
def data(served):
    folder = served[1] / "pictures for prompts"
    folder.mkdir(exist_ok=True)
    for number in range(3):
        Image.new("RGB", (640, 320), (90 * number, 40, 40)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"zorb toy number {number}")
    return folder


@pytest.mark.browser
def test_rows_that_cannot_be_saved_yet_are_not_lost(visit, served):
    visitor = visit()
    page = visitor.page
    box = page.locator("#lora-form .prompts")
    section = page.get_by_role("button", name="Sample images", exact=True).locator("visible=true")
    visitor.fill(output_dir="")  # the page had proposed a folder
    section.click()
    box.get_by_role("button", name="Add a prompt").click()
    box.get_by_label("Prompt", exact=True).fill("a red zorb toy")
    visitor.until("choose it first, the prompts are kept there", ".prompts .file")
    page.reload()
    page.wait_for_selector("form.settings")
    section.click()
    visitor.until("choose it first", ".prompts .file")
    assert box.get_by_label("Prompt", exact=True).input_value() == "a red zorb toy"
    visitor.fill(output_name="zorb")
    visitor.fill(output_dir=served[1] / "rows kept")  # with a folder they can be saved
    visitor.until("Saved in", ".prompts .file")
    assert page.locator("#lora-form [data-option=sample_every_n_steps]").input_value() == "800"  # the preset's value
    assert page.locator("#lora-form [data-option=sample_every_n_epochs]").input_value() == ""
    assert (served[1] / "rows kept" / "zorb-prompts.txt").read_text() == "a red zorb toy\n"


@pytest.mark.browser
def test_only_what_the_chosen_relative_takes_is_shown(visit, served):
    """CLIP-L, reference images, masks, and the chosen model's defaults."""
    (served[1] / "shown.txt").write_text("a cat --d 1\n")
    visitor = visit()
    page = visitor.page
    form = page.locator("#lora-form")
    visitor.family("FLUX.1")
    for name in ("Sample images", "Images"):
        page.get_by_role("button", name=name, exact=True).locator("visible=true").click()
    start = form.locator(".start")
    start.get_by_text("sd-scripts' defaults").wait_for()
    visitor.put(sample_prompts=str(served[1] / "shown.txt"))
    row = form.locator(".prompts ol > li")
    row.wait_for()
    places = {
        "folder": form.locator("#lora-flux-control_directory"),
        "clip": form.locator("[data-option=clip_l]"),
        "image": row.locator("[data-prompt=control_image_path]"),
        "mask": row.locator("[data-prompt=control_image_mask_path]"),
    }
    shown = lambda: {name for name, place in places.items() if place.is_visible()}  # noqa: E731
    kind = form.locator("[data-option=model_type]")
    expected = {
        "flux": {"clip"},
        "kontext": {"folder", "clip", "image"},
        "fill": {"clip", "image", "mask"},
        "chroma": set(),
    }
    for name, fields in expected.items():
        visitor.put(model_type=name)
        assert kind.input_value() == name and shown() == fields
    visitor.fill(output_name="zorb")  # any edit hides them
    assert shown() == set()
    visitor.put(control_directory="/second")
    assert shown() == {"folder"}, "what is filled in can be seen, and taken out"
    visitor.family("Qwen-Image")
    start.get_by_text("Defaults", exact=True).wait_for()
    assert "sd-scripts" not in start.inner_text()
    places = {"folder": form.locator("#lora-qwen_image-control_directory"), "image": places["image"]}
    for name, fields in {"edit-2511": {"folder", "image"}, "original": set()}.items():
        visitor.put(model_version=name)
        assert shown() == fields


@pytest.mark.browser
def test_prompts_are_written_while_one_types(visit, served, data, tmp_path):
    root = served[1]
    out = root / "prompts of a test"
    visitor = visit()
    page = visitor.page
    visitor.fill(output_dir=out, output_name="zorb", train_data_dir=data)
    visitor.put(sample_every_n_steps="")  # no sampling interval is set
    box = page.locator("#lora-form .prompts")
    page.get_by_role("button", name="Sample images", exact=True).locator("visible=true").click()
    box.get_by_role("button", name="Add a prompt").click()
    box.get_by_label("Prompt", exact=True).fill("a red zorb toy")
    box.get_by_label("Width").fill("512")
    visitor.until("Saved in", ".prompts .file")
    file = out / "zorb-prompts.txt"
    wait_for(lambda: file.read_text() == "a red zorb toy --w 512\n", 30)
    form = page.locator("#lora-form")
    assert form.locator("[data-option=sample_prompts]").input_value() == str(file)
    assert form.locator("[data-option=sample_every_n_epochs]").input_value() == "1"

    box.get_by_role("button", name="From captions").click()
    box.locator(".captions button").first.click()
    box.locator("li", has_text="").get_by_role("button", name="Copy").first.click()
    box.get_by_label("Seed").nth(1).fill("42")
    page.wait_for_function("path => document.querySelector('#lora-form .prompts ol').children.length === 3", arg="")
    wait_for(lambda: file.read_text().count("\n") == 3 and "--d 42" in file.read_text(), 30)
    *first_two, third = file.read_text().splitlines()
    assert first_two == ["a red zorb toy --w 512", "a red zorb toy --w 512 --d 42"]
    assert third.startswith("zorb toy number ") and " --w " in third and " --h " in third

    box.get_by_label("Width").nth(0).fill("wide")
    visitor.until("width cannot be 'wide'", ".prompts .file")
    assert file.read_text().startswith("a red zorb toy --w 512\n")
    page.reload()
    page.wait_for_selector("form.settings")
    page.get_by_role("button", name="Sample images", exact=True).locator("visible=true").click()
    box.get_by_label("Prompt", exact=True).nth(2).wait_for()
    assert box.get_by_label("Width").nth(0).input_value() == "wide"  # unsaved text is kept
    box.get_by_label("Width").nth(0).fill("512")
    page.wait_for_function("sessionStorage['lora-prompts'] === 'null'")


@pytest.mark.browser
def test_what_a_line_says_beside_its_fields_stays_and_removing_the_last_row_leaves_the_captions(visit, served):
    file = served[1] / "kept.txt"
    file.write_text("a cat --cn pose.png --ci room.png --zz 3\n", encoding="utf-8")
    visitor = visit()
    page = visitor.page
    form = page.locator("#lora-form")
    box = form.locator(".prompts")
    visitor.put(sample_prompts=str(file))
    page.get_by_role("button", name="Sample images", exact=True).locator("visible=true").click()
    box.get_by_label("Seed").fill("5")
    visitor.until("Saved in", ".prompts .file")
    wait_for(lambda: "--d 5" in file.read_text(), 30)
    (line,) = file.read_text().splitlines()
    assert line.startswith("a cat --d 5") and all(part in line for part in ("--cn pose.png", "--ci room.png", "--zz 3"))
    box.locator("ol").get_by_role("button", name="Remove").click()
    visitor.until("Samples are generated from captions", ".prompts .file")
    assert form.locator("[data-option=sample_prompts]").input_value() == "" and file.exists()
