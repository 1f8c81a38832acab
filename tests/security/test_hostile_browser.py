"""Whatever a browser, or a program that plays one, sends: refused or harmless, on every route and in every field."""

import functools
import itertools
import json
import random
import re
import subprocess
from pathlib import Path

import gradio.routes
import pytest
from starlette.testclient import TestClient

from kohya_gui.server import paths, scripts
from kohya_gui.server.json_api import ApiRequest
from library.config.problems import ConfigError
from tests import source
from tests.training import listing

SECRET = "canary of a file that lies outside"
JSON = {"content-type": "application/json"}
OWN = {"host": "127.0.0.1:7860", "origin": "http://127.0.0.1:7860"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """`root` may be used; `outside` may not, and links lead there."""
    folder = tmp_path_factory.mktemp("place").resolve()
    root, outside = folder / "root", folder / "outside"
    for path in (root / "sets" / "1_cat", outside / "1_dog", root / ".ssh"):
        path.mkdir(parents=True)
    for name in ("secret.toml", "secret.json", "secret.safetensors", "secret.txt", "1_dog/a.png", "1_dog/a.txt"):
        (outside / name).write_text(SECRET)
    (root / ".ssh" / "key.toml").write_text(SECRET)
    (root / "own.toml").write_text("max_train_steps = 7\n")
    (root / "link").symlink_to(outside, target_is_directory=True)
    (root / "link.toml").symlink_to(outside / "secret.toml")
    return folder


@pytest.fixture(scope="module")
def page(place):
    """The page itself, without a server: what is asked goes straight into the application."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HOME", str(place / "root"))
    patch.setenv("KOHYA_HOME", str(place / "home"))
    patch.chdir(place / "root")
    patch.setattr(subprocess, "Popen", Processes)
    from kohya_gui.app import build_page

    yield build_page([place / "root"])
    patch.undo()


class Processes:
    """Nothing that is sent here may start one."""

    started: list = []
    __class_getitem__ = classmethod(lambda cls, _: cls)

    def __init__(self, arguments, *rest, **how):
        self.started.append(arguments)
        raise OSError("no process is started here")


@pytest.fixture(scope="module")
def client(page):
    from kohya_gui.app import application

    app = application(page, {"host": "127.0.0.1"})
    with TestClient(app, "http://127.0.0.1:7860", raise_server_exceptions=False, headers=OWN) as session:
        yield session


def routes():
    """Every path that Gradio and the page know, with something in the place of what varies."""
    text = Path(gradio.routes.__file__).read_text("utf-8")
    paths = {f"/gradio_api{path}" for path in re.findall(r'@router\.\w+\(\s*"(/[^"]*)"', text)}
    paths |= set(re.findall(r'@app\.\w+\(\s*"(/[^"]*)"', text))
    own = {
        "/tensorboard/",
        "/tensorboard/start",
        "/assets/x.js",
        scripts.ADDRESS,
        "/own/list",
        "/own/x",
        "/font-roboto/x",
        "/nowhere",
    }
    return sorted(re.sub(r"\{[^}]*\}", "x", path) for path in paths | own)


def test_every_route_asks_for_name_origin_and_token(client, page):
    from kohya_gui.app import application

    addresses = routes()
    assert len(addresses) > 60
    with TestClient(
        application(page, {"host": "0.0.0.0", "token": "the-token"}), "http://10.0.0.1", headers={"host": "10.0.0.1"}
    ) as guarded:
        for path, method in itertools.product(addresses, ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")):
            assert client.request(method, path, headers={"host": "evil.test"}).status_code == 403, (method, path)
            assert client.request(method, path, headers={"origin": "https://evil.test"}).status_code == 403
            answer = guarded.request(method, path, follow_redirects=False)
            assert answer.status_code == 401 and len(answer.content) < 200, (method, path)


def test_a_form_on_another_site_cannot_post(client):
    for path in ("/own/list", "/gradio_api/run/predict", "/gradio_api/upload", "/tensorboard/start"):
        for cross in ({"origin": "https://evil.test"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
            for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"):
                assert client.post(path, content=b"a=1", headers={**cross, "content-type": kind}).status_code == 403


def test_reading_changes_nothing(client, page, place):
    before = listing(place)
    for path in routes():
        answer = client.get(path) if "heartbeat" not in path and "queue/data" not in path else None
        assert answer is None or answer.status_code < 500, path
    for name in page.service.image_handlers:
        for value in HOSTILE:
            answer = client.get(f"/own/{name}", params={field: ascii(value)[:40] for field in fields()})
            assert answer.status_code < 500 and SECRET not in answer.text, (name, value)
    assert listing(place) == before and not Processes.started


HOSTILE = [
    "",
    None,
    True,
    -1,
    10**30,
    1.5,
    [],
    {},
    ["x"],
    {"a": {"b": [None]}},
    "x" * 5000,
    "\0",
    "a\nb",
    "\ud800",
    "\u202e",
    "/etc/passwd",
    "/",
    "~",
    "~root",
    "..",
    "../outside",
    "../outside/secret.toml",
    "link",
    "link/secret.toml",
    "link.toml",
    ".ssh/key.toml",
    "sets/../../outside/1_dog",
    "\\\\host\\share",
    "C:\\x",
    "file:///etc/passwd",
    "NUL",
    "http://127.0.0.1:1/",
    "--help",
    "-rf",
    "$(touch x)",
    "; touch x",
    "a.toml\0.png",
    "%2e%2e/outside",
]


def values(place):
    """What is sent as a value: hostile things, and with them the paths that they mean."""
    for value in HOSTILE:
        yield value
        if isinstance(value, str) and value and not value.startswith(("/", "~")):
            yield f"{place}/root/{value}"
    yield from (
        f"{place}/outside",
        f"{place}/outside/secret.toml",
        f"{place}/outside/1_dog/a.png",
        f"{place}/outside/x",
    )


@functools.cache
def fields():
    """The names of all fields that the page's scripts send."""
    texts = "".join(path.read_text("utf-8") for path in (source.ROOT / "kohya_gui").rglob("*.py"))
    names = set(re.findall(r"""\b(?:request|query)\.(?:text|texts|number|flag|values|get)\(\s*"(\w+)\"""", texts))
    return sorted(names | {"path", "folder", "file", "name", "id", "run"})


def test_the_pages_own_questions_survive_everything(client, page, place, monkeypatch):
    names, asked = fields(), set()
    for reader in ("text", "flag", "number", "texts", "values"):
        read = getattr(ApiRequest, reader)
        noting = lambda request, name, *rest, read=read: (asked.add(name), read(request, name, *rest))[1]  # noqa: E731
        monkeypatch.setattr(ApiRequest, reader, noting)
    assert len(page.service.handlers) >= 1
    before = listing(place / "outside")
    chance, everything, wrong = random.Random(0), list(values(place)), []
    for name in page.service.handlers:
        for value in chance.sample(everything, 16):
            sent = chance.choice([lambda v: v, lambda v: v, lambda v: [v], lambda v: {"x": v}])
            answer = client.post(
                f"/own/{name}", content=json.dumps({n: sent(value) for n in {*names, *asked}}), headers=JSON
            )
            if answer.status_code >= 500 or SECRET in answer.text:
                wrong.append((name, value, answer.status_code))
        for body in (b"", b"[]", b"null", b"{", b"[" * 10**5, b'{"a":' * 10**4, b"\xff", b'"x"', b"1e999"):
            answer = client.post(f"/own/{name}", content=body, headers=JSON)
            if answer.status_code >= 500:
                wrong.append((name, body[:20], answer.status_code))
    assert not wrong, wrong[:20]
    assert len(asked & {*names}) > 20, "the names of the fields are read from the source as it is written today"
    assert listing(place / "outside") == before and not Processes.started


def test_the_page_has_no_events_of_gradio(client, page):
    """Each would be a handler of its own that a browser may send anything to."""
    assert not page.fns
    assert client.post("/gradio_api/run/predict", content='{"data": []}', headers=JSON).status_code == 404


ACTS = ("first", "print", "save", "load", "upload", "download", "export")  # the others start a process that checks


def test_the_buttons_of_a_form_survive_everything(client, place):
    """With a form that is one, each with what else it may be sent."""
    before, chance, everything = listing(place), random.Random(0), [v for v in values(place) if isinstance(v, str)]
    for act, _ in itertools.product(ACTS, range(12)):
        paths = {"train_data_dir": chance.choice(everything), "output_dir": f"{place}/outside"}  # or it would be saved
        sent = json.dumps({"family": "sdxl", "values": paths, "launch": {}})
        others = {name: chance.choice(everything) for name in ("path", "opened", "name", "text", "base")}
        asked = {**others, "tab": "lora", "act": act, "sent": sent} | ({"path": "/etc/x"} if act == "save" else {})
        answer = client.post("/own/press", content=json.dumps(asked), headers=JSON)
        assert answer.status_code == 200 and SECRET not in answer.text, (act, asked)
    assert listing(place) == before and not Processes.started


def test_a_file_is_not_fetched_for_a_browser(client, place):
    for path in ("outside/secret.toml", "root/own.toml", "root/../outside/secret.txt", "root/link.toml"):
        for route in ("/gradio_api/file=", "/gradio_api/file/", "/static/", "/assets/", "/svelte/"):
            answer = client.get(f"{route}{place}/{path}")
            assert answer.status_code in (403, 404) and SECRET not in answer.text


def test_ten_thousand_hostile_paths_through_every_guard(place):
    """Each function of the one guard gives a place inside, or refuses."""
    chance, allowed = random.Random(1), [place / "root"]
    parts = [
        "..",
        ".",
        "",
        "~",
        "/",
        "\\",
        "\\\\host\\share",
        "//host/share",
        "C:",
        "c:\\",
        "CON",
        "nul.toml",
        "com1",
        "a",
        ".ssh",
        "key.toml",
        "%2e%2e",
        "..%2f",
        "%00",
        "\0",
        "\n",
        "\u202e",
        "\ud800",
        "\u2025",
        "\uff0e\uff0e",
        "outside",
        "secret.toml",
        "secret.safetensors",
        "link",
        "link.toml",
        "own.toml",
        "sets",
        "1_cat",
        "file:",
        "$HOME",
        "*",
        "?",
        "|",
        "<",
        '"',
        "a.toml:stream",
        "::$DATA",
        "...",
        " ",
        "\t",
        str(place),
        str(place / "root"),
        "\\\\?\\C:\\",
        "/proc/self/environ",
        "/dev/stdin",
        "x" * 300,
    ]
    endings, passed = (".toml", ".safetensors"), 0
    for _ in range(10_000):
        text = chance.choice(["/", "", "\\", "//"]).join(chance.choices(parts, k=chance.randint(1, 7)))
        text += chance.choice(["", "", ".toml", "/own.toml"])
        for guard in (paths.allowed_path, paths.existing_folder, lambda *a: paths.file(*a, endings), paths.readable):
            try:
                found = guard(text, allowed)
            except ConfigError:
                continue
            passed += 1
            below = found.relative_to(place / "root")
            assert found == found.resolve() and not any(part.startswith(".") for part in below.parts)
    assert passed > 50  # 82 alone, more after tests that write into the folder
