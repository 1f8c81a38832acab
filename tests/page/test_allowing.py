"""Folders allowed on the page: confirmed once, on this computer only, and never system folders."""

import argparse
import json
import os
import stat
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from benchmarks.online import online
from kohya_gui.form import api
from kohya_gui.server import allowed_folders, hidden, paths
from kohya_gui.server.allowed_folders import AllowedFolders, Roots
from kohya_gui.server.json_api import ApiRequest
from kohya_gui.server.serving import access_of, build_server_parser, is_private
from library.config.problems import ConfigError
from library.runs import registry

PORT = "127.0.0.1:7860"
OWN = {"host": PORT, "origin": f"http://{PORT}"}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "kohya"))
    return tmp_path / "kohya"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(hidden, "OF_WINDOWS", set())  # there temporary folders are below AppData
    for name in ("root", "other/sub", "other/.hidden", "file"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path.resolve()


def allow(roots, folder):
    return AllowedFolders(roots).allow(ApiRequest({"folder": str(folder)}))


def test_folder_permission_is_requested_once_and_survives_a_restart(place):
    roots = Roots([place / "root"], asks=True)
    with pytest.raises(ConfigError) as raised:
        paths.allowed_path(str(place / "other" / "out"), roots, "output_dir")
    assert allowed_folders.asked_folder(raised.value.problems[0]) == str(place / "other")
    allow(roots, place / "other")
    assert paths.allowed_path(str(place / "other" / "out"), roots) == place / "other" / "out"
    assert list(Roots([place / "root"], asks=True)) == [place / "root", place / "other"]
    allow(roots, place / "other")  # the second time changes nothing
    assert json.loads(allowed_folders.allowed_file().read_text())["folders"] == [str(place / "other")]
    with pytest.raises(ConfigError, match="hidden"):
        paths.allowed_path(str(place / "other" / ".hidden" / "x"), roots)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such rights")
def test_the_file_is_for_its_owner_only(place):
    allow(Roots([place / "root"], asks=True), place / "other")
    assert stat.S_IMODE(allowed_folders.allowed_file().stat().st_mode) == 0o600


def test_permission_for_a_file_is_requested_for_its_folder(place):
    (place / "other" / "v1.5").mkdir()
    (place / "other" / "model").write_text("x")
    for text, folder in (
        ("a.safetensors", "other"),
        ("v1.5", "other/v1.5"),
        ("model", "other"),
        ("new", "other/new"),
        ("v2.5", "other/v2.5"),
        ("run.toml", "other"),
    ):
        assert allowed_folders.folder_to_allow(place / "other" / text) == place / folder, text


@pytest.mark.parametrize("what", ["train_data_dir", "pretrained_model_name_or_path", "config file", "image_dir"])
def test_missing_path_is_reported_without_a_permission_request(place, what):
    roots = Roots([place / "root"], asks=True)
    for text, absent in (("gone", "gone"), ("gone/deeper/a.png", "gone/deeper"), ("other/gone", "other/gone")):
        with pytest.raises(ConfigError, match="does not exist") as raised:
            paths.allowed_path(str(place / text), roots, what)
        (problem,) = raised.value.problems
        assert allowed_folders.asked_folder(problem) == "" and problem.arguments == {"path": str(place / absent)}
        with pytest.raises(ConfigError, match="does not exist"):
            allow(roots, place / absent)
    assert not allowed_folders.allowed_file().exists()


def test_permission_for_a_new_output_folder_is_requested_for_its_parent(place):
    roots = Roots([place / "root"], asks=True)
    for is_new, option in ((False, "output_dir"), (False, "logging_dir"), (True, "folder")):
        with pytest.raises(ConfigError) as raised:
            paths.allowed_path(str(place / "other" / "new" / "out"), roots, option, is_new)
        assert allowed_folders.asked_folder(raised.value.problems[0]) == str(place / "other")
    with pytest.raises(ConfigError, match="make it first") as raised:  # its parent holds the homes of all users
        paths.allowed_path(str(Path.home().parent / "nobody-of-this-name" / "out"), roots, "output_dir")
    assert allowed_folders.asked_folder(raised.value.problems[0]) == ""


def bad_places(place):
    anchor = Path(place.anchor)
    places = [
        anchor,
        Path.home(),
        Path.home().parent,
        Path.home() / ".ssh",
        place / "other" / ".hidden",
        place / ".new" / "sub",
        registry.data_folder(),
        registry.data_folder().parent,
        registry.data_folder() / "runs",
        Path(sys.prefix),
    ]
    if os.name != "nt":
        names = "/etc /etc/x /usr /usr/share /bin /proc/self /dev /sys /var /var/lib /boot /ETC /run/x /lib/x"
        places += [Path(name) for name in names.split()]
    return places


def test_unsuitable_place_is_rejected_without_a_permission_request(place):
    roots = Roots([place / "root"], asks=True)
    for folder in bad_places(place):
        if folder != Path.home() or not folder.is_relative_to(place / "root"):
            with pytest.raises(ConfigError):
                allow(roots, folder)
        try:
            paths.allowed_path(str(folder / "x"), roots)
        except ConfigError as error:
            assert allowed_folders.asked_folder(error.problems[0]) not in map(str, bad_places(place)), error
    (place / "root" / "plain").write_text("x")
    inside = [f"{place}/{name}" for name in ("root/../other", "oth\ner", "root/plain/sub", "CON", "a:b", "other/..")]
    for text in ("", ".", "other", "../other", "~", "C:", "\\\\server\\share", "x" * 5000, *inside):
        with pytest.raises(ConfigError):
            allow(roots, text)
    assert list(roots) == [place / "root"] and not allowed_folders.allowed_file().exists()


def test_what_the_system_hides_at_home_is_rejected(place, monkeypatch):
    """As ~/Library on macOS, which holds the keys of other programs."""
    (place / "other" / "Library" / "Keys").mkdir(parents=True)
    marked = (place / "other" / "Library").stat().st_ino
    monkeypatch.setattr(hidden, "is_marked_hidden", lambda status: status.st_ino == marked)
    monkeypatch.setattr(Path, "home", lambda: place / "other")
    for folder in ("Library", "Library/Keys", "Library/new"):
        assert "is hidden" in allowed_folders.refuse_folder(place / "other" / folder)
    assert not allowed_folders.refuse_folder(place / "other" / "sub")


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need rights on Windows")
def test_links_are_checked_by_their_target(place):
    roots = Roots([place / "root"], asks=True)
    (place / "other" / "link").symlink_to("/etc")
    with pytest.raises(ConfigError):
        allow(roots, place / "other" / "link")
    with pytest.raises(ConfigError, match="belongs to the system"):
        paths.allowed_path(str(place / "other" / "link" / "x"), roots)
    allow(roots, place / "other" / "sub")
    (place / "other" / "sub").rmdir()
    (place / "other" / "sub").symlink_to("/etc")  # replaced after it was allowed
    with pytest.raises(ConfigError):
        paths.allowed_path(str(place / "other" / "sub" / "passwd"), roots)


@pytest.mark.skipif(
    os.name == "nt" or not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_a_folder_that_cannot_be_made_is_refused(place):
    (place / "other").chmod(0o500)
    assert "cannot be made" in allowed_folders.refuse_folder(place / "other" / "new")
    assert allowed_folders.refuse_folder(place / "other") == ""


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"folders": 7}',
        '{"folders": [7, null, ["/x"], "relative", "/"]}',
        '{"folders": ["/etc", "/home/../etc", "//x", "~"]}',
    ],
)
def test_whatever_stands_in_the_file_widens_nothing(place, content):
    allowed_folders.allowed_file().parent.mkdir(parents=True, exist_ok=True)
    allowed_folders.allowed_file().write_text(content)
    for path in ("/etc/passwd", "/"):
        with pytest.raises(ConfigError):
            paths.allowed_path(path, Roots([place / "root"], asks=True))


def test_a_page_for_others_neither_asks_nor_counts_what_was_allowed(place):
    allow(Roots([place / "root"], asks=True), place / "other")
    for roots in (Roots([place / "root"]), [place / "root"]):
        with pytest.raises(ConfigError, match="--root FOLDER"):
            paths.allowed_path(str(place / "other"), roots)
        with pytest.raises(ConfigError, match="--root FOLDER"):
            allow(roots, place / "file")


@pytest.mark.parametrize(
    ("words", "private"),
    [
        ("", True),
        ("--host localhost", True),
        ("--host ::1", True),
        ("--root .", True),
        ("--host 0.0.0.0", False),
        ("--host 192.168.0.7", False),
        ("--allowed-host train.example", False),
        ("--root_path /trainer", False),
        ("--root_path https://train.example/x", False),
        ("--user anna", False),
    ],
)
def test_only_a_page_that_is_open_to_nobody_else_asks(words, private, monkeypatch):
    monkeypatch.setenv("KOHYA_PASSWORD", "a long password")
    monkeypatch.delenv("KOHYA_TOKEN", raising=False)
    arguments: argparse.Namespace = build_server_parser().parse_args(words.split())
    assert is_private(access_of(arguments), arguments.root_path) is private
    monkeypatch.setenv("KOHYA_TOKEN", "a-token-of-some-length-01")
    assert not is_private(access_of(arguments), arguments.root_path)


@pytest.fixture(scope="module")
def application(tmp_path_factory):
    from kohya_gui.app import application, build_page

    root = tmp_path_factory.mktemp("asking").resolve()
    return application(build_page(Roots([root], asks=True)), {"host": "127.0.0.1"})


HOSTILE = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "https://127.0.0.1:7860"},
    {"origin": ""},
    {"host": "train.example", "origin": "http://train.example"},
    {"x-forwarded-for": "203.0.113.5"},
    {"x-forwarded-for": "127.0.0.1"},
    {"forwarded": "for=203.0.113.5"},
    {"x-real-ip": "203.0.113.5"},
    {"via": "1.1 proxy"},
    {"x-forwarded-host": "train.example"},
    {"x-forwarded-proto": "https"},
    {"cf-connecting-ip": "203.0.113.5"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "http://localhost:7860"},
    {"origin": "http://127.0.0.1:9999"},
    {"content-type": "text/plain"},
]


@pytest.mark.parametrize("headers", HOSTILE)
def test_a_browser_elsewhere_a_proxy_or_another_site_cannot_widen_the_roots(application, place, headers):
    client = TestClient(application, f"http://{PORT}", headers=OWN, client=("127.0.0.1", 5000))
    body = json.dumps({"folder": str(place / "other")})
    answer = client.post("/own/allow", content=body, headers={"content-type": "application/json", **headers})
    assert answer.status_code in (403, 415) and not allowed_folders.allowed_file().exists()


def test_a_browser_here_can_and_others_cannot_by_any_way(application, place):
    body = {"folder": str(place / "other")}
    for peer in ("192.168.0.9", "203.0.113.5", "testclient", "fe80::1"):
        away = TestClient(application, f"http://{PORT}", headers=OWN, client=(peer, 5000))
        assert away.post("/own/allow", json=body).status_code == 403
    client = TestClient(application, f"http://{PORT}", headers=OWN, client=("127.0.0.1", 5000))
    assert client.get("/own/allow", params=body).status_code == 404
    bare = TestClient(application, f"http://{PORT}", headers={"host": PORT}, client=("127.0.0.1", 5000))
    assert bare.post("/own/allow", json=body).status_code == 403 and not allowed_folders.allowed_file().exists()
    assert "Allow" in client.post("/own/list", json=body).json()["error"]
    assert client.post("/own/allow", json=body).json()["said"] == f"Allowed: {place / 'other'}"
    assert client.post("/own/list", json=body).json()["folder"] == str(place / "other")


# ---- in a browser


@pytest.fixture(scope="module")
def asking(tmp_path_factory):
    """A page that offers to allow folders, with a single root."""
    from kohya_gui.app import application, build_page

    root = tmp_path_factory.mktemp("page").resolve()
    with online(application(build_page(Roots([root], asks=True)), {"host": "127.0.0.1"})) as address:
        yield address


@pytest.fixture
def visitor(chromium, windows, asking, stand_ins, monkeypatch):
    """One visit; trainings are stand-ins, but paths in a form are checked as usual."""
    from tests.page.conftest import begun, ended

    monkeypatch.setattr(paths, "_outside", OUTSIDE)
    visit = begun(windows, chromium, asking)
    yield visit
    from library.runs import reader, stop

    for run in reader.runs():
        stop.request(run.id, "now")
    assert ended(windows, visit)[0] == []


OUTSIDE = paths._outside


@pytest.mark.browser
def test_train_asks_for_each_folder_and_then_starts(visitor, place):
    model, results = place / "other" / "base.safetensors", place / "out" / "new"
    (place / "out").mkdir()
    visitor.fill(
        pretrained_model_name_or_path=model,
        train_data_dir=place / "file",
        resolution="1024",
        output_name="cat",
        max_train_steps="20",
        output_dir=results,
    )
    held = []

    def hold(route):
        if held or route.request.post_data_json["act"] != "train":
            route.continue_()
        else:
            held.append(route)

    visitor.page.route("**/own/press", hold)
    visitor.click("Train")
    visitor.until("3 problems to fix").until("Looking for more problems", ".bar .doing")
    held[0].continue_()
    visitor.has_none("[...document.querySelectorAll('.bar .doing')].filter((line) => line.textContent)")
    buttons = visitor.page.locator(".message:visible .allow")
    assert buttons.count() == 3 and not results.exists()
    for left in (2, 1):
        buttons.first.click()
        visitor.page.wait_for_function(f"document.querySelectorAll('.message .allow').length === {left}")
    buttons.first.click()
    visitor.state("finished")
    visitor.page.unroute_all()
    assert set(allowed_folders.allowed_folders()) == {place / "other", place / "file", place / "out"}


@pytest.mark.browser
def test_folder_allowed_during_a_request_is_not_requested_again(visitor, place):
    """The form's own problems come first; the full check, which takes longer, may still ask for the folder."""
    held = []

    def hold(route):
        if held or route.request.post_data_json["act"] != "train":
            route.continue_()
        else:
            held.append((route, route.fetch()))

    (place / "out").mkdir()
    visitor.page.route("**/own/press", hold)
    visitor.fill(
        pretrained_model_name_or_path=place / "other" / "base.safetensors",
        train_data_dir=place / "file",
        resolution="1024",
        output_name="cat",
        max_train_steps="20",
        output_dir=place / "out",
    )
    visitor.click("Train")
    visitor.until("3 problems to fix")
    for left in (2, 1, 0):
        visitor.page.locator(".message:visible .allow").first.click()
        visitor.page.wait_for_function(f"document.querySelectorAll('.message .allow').length === {left}")
    (route, answer) = held[0]
    route.fulfill(response=answer)
    visitor.state("finished")
    visitor.page.unroute_all()


@pytest.mark.browser
def test_the_picker_the_configs_the_data_set_and_the_tools_ask_too(visitor, place):
    page = visitor.page
    (place / "other" / "a.toml").write_text("max_train_steps = 77\n")
    field = page.get_by_placeholder("Config file").locator("visible=true")
    field.fill(str(place / "other" / "a.toml"))
    visitor.click("Load config")
    page.locator(".message:visible .allow").click()
    visitor.until("Loaded a.toml")
    assert page.locator("#lora-max_train_steps").input_value() == "77"
    visitor.fill(output_dir=place / "file")
    page.get_by_label("Browse for Output folder").locator("visible=true").click()
    page.locator("dialog.picker .allow").click()
    page.wait_for_function("document.querySelector('dialog.picker .where').value.endsWith('/file')")
    page.get_by_role("button", name="Choose this folder").click()
    from tests.data import make

    make.folder(place / "sets", "cats")
    page.get_by_role("tab", name="Data", exact=True).click()
    page.locator("#images-folder").fill(str(place / "sets" / "cats"))
    page.get_by_role("button", name="Open folder", exact=True).locator("visible=true").click()
    page.locator(".message:visible .allow").click()
    page.get_by_text("Images used", exact=True).wait_for()
    page.get_by_role("tab", name="Tools", exact=True).click()
    page.locator("#tools-merge-loras-first").fill(str(place / "tools" / "x.safetensors"))
    page.locator("#tools-merge-out").fill(str(place / "root" / "y.safetensors"))
    page.locator(".tools [data-go]").click()
    page.get_by_text(f"{place / 'tools'} does not exist").wait_for()
    assert page.locator(f'.allow[data-allow="{place / "tools"}"]').count() == 0
    (place / "tools").mkdir()
    page.locator(".tools [data-go]").click()
    page.locator(f'.allow[data-allow="{place / "tools"}"]').wait_for()
    page.locator(".message:visible .allow").first.click()
    page.get_by_text("does not exist").wait_for()  # the page checks the file again at once
    assert place / "tools" in allowed_folders.allowed_folders()


@pytest.mark.browser
def test_what_may_not_be_allowed_has_no_button(visitor):
    visitor.page.get_by_placeholder("Config file").locator("visible=true").fill("/etc/a.toml")
    visitor.click("Load config")
    visitor.until("belongs to the system")
    assert visitor.page.locator(".allow").count() == 0


@pytest.mark.browser
def test_below_a_field_a_folder_that_is_not_there_has_no_button_and_one_that_is_there_has_one(visitor, place):
    help_of = visitor.page.locator("#lora-train_data_dir-help")
    visitor.fill(train_data_dir=place / "gone" / "images")
    visitor.page.locator("#lora-train_data_dir").blur()
    help_of.get_by_text("does not exist").wait_for()
    assert visitor.page.locator(".allow").count() == 0
    visitor.fill(train_data_dir=place / "file")
    visitor.page.locator("#lora-train_data_dir").blur()
    help_of.locator(".allow").click()
    help_of.locator(".allow").wait_for(state="detached")  # the sentence about it is soon replaced by the field's
    assert allowed_folders.allowed_folders() == (place / "file",)


@pytest.mark.browser
def test_save_and_probe_ask_and_then_go_on_by_themselves(visitor, place, monkeypatch):

    started, probe_result = [], {"state": "finished", "doing": "", "tries": [], "best": {}, "text": "Nothing fits."}
    monkeypatch.setattr(api, "start_probe", lambda config, launch: started.append(config.save.output_dir) or "probe")
    monkeypatch.setattr(api, "probe_state", lambda probe_id: probe_result)
    page = visitor.page
    page.get_by_placeholder("Config file").locator("visible=true").fill(str(place / "other" / "new.toml"))
    visitor.click("Save config")
    page.locator(".message:visible .allow").click()
    visitor.until("Saved")
    assert (place / "other" / "new.toml").exists()
    visitor.fill(
        pretrained_model_name_or_path=place / "other" / "m.safetensors",
        train_data_dir=place / "other",
        resolution="1024",
        output_dir=place / "other",
    )
    visitor.click("Check")
    visitor.until("No problems found")
    (place / "out").mkdir()
    visitor.fill(output_dir=place / "out")
    visitor.click("Probe")
    page.locator(".message:visible .allow").click()
    visitor.until("Nothing fits.")
    assert started == [str(place / "out")]
