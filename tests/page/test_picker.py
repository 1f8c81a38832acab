"""The file picker and its requests: only below the roots, however a path is written."""

import json
import os
import random
import stat
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from kohya_gui.server import hidden, paths, picker
from kohya_gui.server.json_api import ApiRequest, JsonApi
from kohya_gui.server.picker import Picker, browse_button
from library.config.command import quote_argument
from library.config.problems import ConfigError
from tests.training import wait_for


@pytest.fixture
def root(tmp_path):
    for name in ("home/models", "home/.ssh", "home/10_cat", "secret"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("models/b10.safetensors", "models/b9.safetensors", "models/a.ckpt", ".ssh/key", "note.txt"):
        (tmp_path / "home" / name).write_text("x")
    (tmp_path / "secret" / "a.safetensors").write_text("x")
    return (tmp_path / "home").resolve()


def listed(root, **sent):
    return Picker([root]).list(ApiRequest(sent))


def names(listing):
    return [entry["name"] for entry in listing["entries"]]


def test_folders_come_first_and_numbers_count(root):
    assert names(listed(root)) == ["10_cat", "models", "note.txt"]
    assert names(listed(root, kind="folder")) == ["10_cat", "models"]
    inside = listed(root, folder=str(root / "models"), endings=".safetensors")
    assert names(inside) == ["b9.safetensors", "b10.safetensors"] and inside["up"] == str(root)
    assert names(listed(root, folder=str(root / "models"), filter="B1")) == ["b10.safetensors"]
    assert listed(root)["up"] == "" and listed(root)["places"][0]["path"] == str(root)


def test_places_of_one_name_are_told_apart(tmp_path):
    roots = [tmp_path / "a" / "models", tmp_path / "b" / "models", tmp_path / "pictures"]
    for root in roots:
        root.mkdir(parents=True)
    listing = Picker(roots).list(ApiRequest({"folder": "", "filter": "", "kind": "file", "endings": ""}))
    assert [place["name"] for place in listing["places"]] == ["a/models", "b/models", "pictures"]


def test_of_a_path_that_is_not_there_the_nearest_folder_is_shown(root):
    for text in (root / "models" / "b9.safetensors", root / "models" / "not" / "yet.toml"):
        assert listed(root, folder=str(text))["folder"] == str(root / "models")


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need rights on Windows")
def test_links_that_lead_out_are_not_even_shown(root):
    (root / "out").symlink_to(root.parent / "secret")
    (root / "out.safetensors").symlink_to(root.parent / "secret" / "a.safetensors")
    (root / "in").symlink_to(root / "models")
    assert names(listed(root)) == ["10_cat", "in", "models", "note.txt"]
    with pytest.raises(ConfigError):
        listed(root, folder=str(root / "out"))


def test_three_thousand_hostile_folders_stay_inside(root):
    chance = random.Random(1)
    parts = [
        "..",
        ".",
        "",
        "~",
        "/",
        "\\",
        "//",
        "C:",
        "CON",
        ".ssh",
        "models",
        "%2e%2e",
        "\u202e",
        "\x00",
        "secret",
        "10_cat",
        str(root),
        str(root.parent),
        "file:",
        "*",
        "\n",
    ]
    for _ in range(3000):
        text = chance.choice(["/", "", "\\"]).join(chance.choices(parts, k=chance.randint(1, 7)))
        try:
            listing = listed(root, folder=text)
        except ConfigError:
            continue
        assert listing["folder"].startswith(str(root)) and ".ssh" not in listing["folder"]
        assert not {"key", "a.safetensors", ".ssh", "secret"} & set(names(listing))


@pytest.fixture
def client(root):
    app, service = FastAPI(), JsonApi()
    service.add(Picker([root]).handlers)
    service.attach(app)
    return TestClient(app)


def test_questions_are_json_by_post_and_mistakes_are_sentences(client, root):
    good = client.post("/own/list", json={"folder": str(root)})
    assert good.status_code == 200 and len(good.json()["entries"]) == 3
    assert "outside" in client.post("/own/list", json={"folder": "/etc"}).json()["error"]
    assert client.get("/own/list").status_code == 404
    assert client.post("/own/nothing", json={}).status_code == 404
    assert client.post("/own/list", content="{}", headers={"content-type": "text/plain"}).status_code == 415
    assert client.post("/own/list", json={"folder": "x" * 5_000_000}).status_code == 413


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "null",
        "{",
        "[" * 100_000,
        '{"folder": 7}',
        '{"folder": ["a"]}',
        '{"folder": "\\ud800"}',
        '{"folder": null}',
        '{"endings": {}}',
    ],
)
def test_no_question_breaks_the_server(client, body):
    answer = client.post("/own/list", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200 and "load" in answer.json()["error"]


def test_numbers_and_flags_are_what_they_say():
    sent = ApiRequest(json.loads('{"n": 3, "f": true, "t": ["a"], "v": {"a": 1, "b": "x", "c": null}}'))
    assert (sent.number("n"), sent.flag("f"), sent.texts("t"), sent.values("v")["b"]) == (3, True, ["a"], "x")
    for fields in ({"n": True}, {"n": -1}, {"n": 1e3}, {"n": "3"}, {"n": 2**70}):
        with pytest.raises(ConfigError):
            ApiRequest(fields).number("n")
    for fields in ({"v": {"a": []}}, {"v": []}):
        with pytest.raises(ConfigError):
            ApiRequest(fields).values("v")


def test_the_button_knows_what_suits_the_option():
    assert 'data-endings=".safetensors"' in browse_button("pretrained_model_name_or_path", "Base model", "file")
    assert 'data-endings=""' in browse_button("output_dir", "Output", "folder")
    assert ".toml .json" in browse_button("dataset_config", "Data", "file")
    assert browse_button("learning_rate", "Rate", "") == ""


def test_what_windows_and_macos_hide_is_neither_listed_nor_allowed(root, monkeypatch):
    for name in ("AppData", "kept", "marked"):
        (root / name).mkdir()
        (root / name / "key.toml").write_text("x")
    monkeypatch.setattr(hidden, "WINDOWS", False)
    assert {"AppData", "marked"} <= {*names(listed(root))}  # plain names elsewhere
    monkeypatch.setattr(hidden, "WINDOWS", True)
    assert "AppData" not in names(listed(root)) and "kept" in names(listed(root))
    with pytest.raises(ConfigError, match="AppData.key.toml is hidden"):
        paths.allowed_path(str(root / "AppData" / "key.toml"), [root])
    with pytest.raises(ConfigError) as raised:
        paths.allowed_path(str(root / "AppData" / "key.toml"), [root])
    assert str(raised.value).endswith(f"start the page with --root {quote_argument(str(root / 'AppData'))}")
    assert paths.allowed_path(str(root / "AppData" / "key.toml"), [root, root / "AppData"])  # it is a root of its own
    (root / ".keys").write_text("x")
    for name in (".keys", "AppData/NUL", "AppData/key.toml:stream"):  # no folder to start with helps
        with pytest.raises(ConfigError, match="hidden or reserved; choose another place$"):
            paths.allowed_path(str(root / name), [root])
    monkeypatch.setattr(picker, "MARKS_HIDDEN", True)
    os.utime(root / "marked", (1e9, 1e9))  # known by its time, as entries of a folder have no number on Windows
    for module in (picker, hidden):
        monkeypatch.setattr(module, "is_marked_hidden", lambda status: status.st_mtime == 1e9)
    assert "marked" not in names(listed(root)) and "kept" in names(listed(root))
    with pytest.raises(ConfigError, match="marked.key.toml is hidden"):
        paths.allowed_path(str(root / "marked" / "key.toml"), [root])


@pytest.mark.parametrize(
    ("status", "is_hidden"),
    [
        ({"st_file_attributes": stat.FILE_ATTRIBUTE_HIDDEN | stat.FILE_ATTRIBUTE_DIRECTORY}, True),
        ({"st_file_attributes": stat.FILE_ATTRIBUTE_DIRECTORY}, False),
        ({"st_flags": stat.UF_HIDDEN}, True),
        ({"st_flags": 0}, False),
        ({}, False),
    ],
)
def test_the_marks_of_windows_and_macos_are_read(status, is_hidden):
    assert hidden.is_marked_hidden(SimpleNamespace(**status)) is is_hidden


@pytest.mark.browser
def test_a_list_of_files_grows_by_one_with_each_choice(visit, served):
    names = ("fast style.safetensors", "other.safetensors")
    for name in names:
        (served[1] / name).write_bytes(b"x")
    page = visit().page
    page.locator(".search input:visible").fill("sample_lora")
    page.keyboard.press("Enter")
    for name in names:
        page.get_by_label("Browse for LoRA for samples").locator("visible=true").click()
        where = page.locator("dialog.picker .where")
        where.fill(str(served[1]))
        where.press("Enter")
        page.locator(f"dialog.picker li:has-text('{name}')").first.click()
        page.locator("dialog.picker:not([open])").first.wait_for(state="attached")
    files = [served[1] / name for name in names]
    assert page.locator("#lora-sample_lora").input_value() == f'"{files[0]}" {files[1]}'
    for file in files:
        file.unlink()


@pytest.mark.browser
def test_what_is_pressed_before_a_slow_server_has_listed_the_folder_is_done_then(visit, served):
    folder = served[1] / "slow"
    for name in ("birds", "cats"):
        (folder / name).mkdir(parents=True)
    page, held = visit().page, []
    field = page.locator("#lora-train_data_dir")
    browse = page.get_by_label("Browse for Image folder").locator("visible=true")

    def answer(requests):
        wait_for(lambda: page.wait_for_timeout(20) or len(held) == requests, 30)
        while held:
            held.pop(0).continue_()

    def chooses(expected):
        page.locator("dialog.picker").wait_for(state="hidden")
        wait_for(lambda: field.input_value() == str(expected), 30)

    page.route("**/own/list", lambda route: held.append(route))
    field.fill(str(folder))
    browse.click()
    page.get_by_role("button", name="Choose this folder").click()
    answer(1)
    chooses(folder)
    browse.click()
    page.keyboard.type("cat")
    page.keyboard.press("Enter")
    answer(4)
    page.get_by_role("button", name="Choose this folder").click()
    answer(1)
    chooses(folder / "cats")
    page.unroute_all()


@pytest.mark.browser
def test_what_is_pressed_before_a_slow_server_has_answered_is_about_the_folder_and_field_of_then(visit, served):
    folder = served[1] / "deep"
    (folder / "cats" / "red").mkdir(parents=True)
    (served[1] / "other").mkdir()
    page, held, asked = visit().page, [], []
    images, out = (page.locator(f"#lora-{name}") for name in ("train_data_dir", "output_dir"))
    entries = page.locator("dialog.picker li")

    def hold(route):
        asked.append(route.request.post_data_json)
        held.append(route)

    def wait_for_requests(count):
        wait_for(lambda: page.wait_for_timeout(20) or len(held) == count, 30)

    def answer():
        wait_for_requests(1)
        held.pop().continue_()

    images.fill(str(folder))
    out.fill(str(served[1] / "other"))
    page.route("**/own/list", hold)
    page.get_by_label("Browse for Image folder").locator("visible=true").click()
    answer()
    entries.get_by_text("cats").click()
    page.get_by_label("Filter").press_sequentially(
        "re"
    )  # filters the folder that was entered, not the one that is still shown
    wait_for_requests(3)
    assert [each["folder"] for each in asked[-2:]] == [str(folder / "cats")] * 2
    while held:
        held.pop(0).continue_()
    entries.get_by_text("red").click()
    page.get_by_label("Folder above").click()  # above the one that was entered
    answer()
    wait_for_requests(1)
    assert asked[-1]["folder"] == str(folder / "cats")
    page.get_by_role("button", name="Choose this folder").click()
    page.keyboard.press("Escape")
    page.get_by_label("Browse for Output folder").locator("visible=true").click()
    wait_for_requests(2)
    held.pop().continue_()
    page.get_by_text("This folder contains no folders.").wait_for()
    with page.expect_response("**/own/list"):
        held.pop().continue_()
    page.get_by_role("button", name="Choose this folder").click()
    page.locator("dialog.picker").wait_for(state="hidden")
    assert (images.input_value(), out.input_value()) == (str(folder), str(served[1] / "other"))
    page.unroute_all()
