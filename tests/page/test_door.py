"""The door: names, origins and tokens, for every route and method alike."""

import contextlib
import gzip

import pytest

from kohya_gui import app
from kohya_gui.assets import FOLDER, Assets
from kohya_gui.door import Door, is_loopback, new_token


def knock(door, method="GET", path="/", query="", kind="http", **headers):
    """Status, headers and body of the answer; 200 from the page behind the door."""
    heads = {"host": "127.0.0.1:7860", **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {"type": kind, "method": method, "path": path, "query_string": query.encode(),
             "headers": [(k.encode(), v.encode()) for k, v in heads.items()]}  # fmt: skip
    sent = []

    async def send(message):
        sent.append(message)

    answering = door(scope, None, send)
    with contextlib.suppress(StopIteration):  # nothing in it really waits, so no event loop is needed
        answering.send(None)
    first = sent[0]
    answer = {k.decode(): v.decode() for k, v in first.get("headers", [])}
    return first.get("status", first.get("code")), answer, b"".join(m.get("body", b"") for m in sent)


async def page(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"page"})


@pytest.fixture
def door():
    return Door(page, "127.0.0.1")


@pytest.fixture
def guarded():
    return Door(page, "0.0.0.0", "the-token", ["train.example"])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:7860", "localhost:7860", "LOCALHOST", "[::1]:7860"])
def test_the_page_answers_to_its_own_names(door, host):
    assert knock(door, host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.test", "evil.test:7860", "", "127.0.0.1.evil.test", "10.0.0.5", "localhost.evil.test"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_other_name_may_be_pointed_here(door, host, method):
    status, _, body = knock(door, method, host=host)
    assert status == 403 and body != b"page"


def test_the_answer_says_how_to_allow_a_name(door):
    assert b"--allowed-host evil.test" in knock(door, host="evil.test", accept="text/html")[2]


@pytest.mark.parametrize("origin", ["https://evil.test", "null", "http://127.0.0.1:9999", "", "file://"])
def test_other_sites_cannot_press_buttons(door, origin):
    assert knock(door, "POST", origin=origin)[0] == 403


def test_the_page_itself_may(door):
    assert knock(door, "POST", origin="http://127.0.0.1:7860", sec_fetch_site="same-origin")[0] == 200


def test_a_proxy_may_change_the_host(guarded):
    shown = {"authorization": "Bearer the-token", "host": "127.0.0.1:7860"}
    assert knock(guarded, "POST", origin="https://train.example", **shown)[0] == 200
    assert knock(guarded, "POST", origin="https://other.example", **shown)[0] == 403


def test_a_link_from_elsewhere_may_open_the_page_but_not_more(door):
    assert knock(door, sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 200
    assert knock(door, sec_fetch_site="cross-site", sec_fetch_mode="no-cors")[0] == 403
    assert knock(door, "POST", sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 403


@pytest.mark.parametrize(
    "path", ["/", "/config", "/assets/x.js", "/gradio_api/run/predict", "/gradio_api/file=/etc/passwd"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE"])
def test_without_the_token_nothing_is_served(guarded, path, method):
    assert knock(guarded, method, path)[0] == 401
    assert knock(guarded, method, path, cookie="kohya_token=wrong", authorization="Bearer wrong")[0] == 401


def test_a_socket_is_closed_without_the_token(guarded):
    assert knock(guarded, kind="websocket")[0] == 1008


def test_the_token_moves_from_the_address_into_a_cookie(guarded):
    status, headers, _ = knock(guarded, path="/", query="token=the-token&view=x", accept="text/html")
    assert status == 303 and headers["location"] == "/?view=x"
    assert "HttpOnly" in headers["set-cookie"] and "SameSite=Strict" in headers["set-cookie"]
    cookie = headers["set-cookie"].split(";")[0]
    assert knock(guarded, "POST", cookie=f"other=1; {cookie}")[0] == 200
    assert knock(guarded, authorization="Bearer the-token")[0] == 200


def test_the_way_on_stays_on_this_page(guarded):
    for path in ("//evil.test", "/\\evil.test", "\\\\evil.test"):
        location = knock(guarded, path=path, query="token=the-token")[1]["location"]
        assert location.startswith("/") and not location.startswith(("//", "/\\"))


def test_a_wrong_token_is_asked_again(guarded):
    status, _, body = knock(guarded, query="token=no", accept="text/html")
    assert status == 401 and b"Wrong token" in body and b"the-token" not in body


def test_with_a_token_any_address_of_the_machine_will_do_but_no_strange_name(guarded):
    for host in ("10.0.0.5:7860", "train.example", "127.0.0.1"):
        assert knock(guarded, host=host, authorization="Bearer the-token")[0] == 200
    assert knock(guarded, host="evil.test", authorization="Bearer the-token")[0] == 403


def test_scripts_come_from_memory_and_may_be_kept():
    assets = Assets(page)
    name = next(name for name in sorted(assets.names) if name.endswith(".js"))
    status, headers, body = knock(assets, path=f"/assets/{name}", accept_encoding="gzip, br")
    assert (
        status == 200
        and "immutable" in headers["cache-control"]
        and headers["content-type"].startswith("text/javascript")
    )
    assert gzip.decompress(body) == knock(assets, path=f"/assets/{name}")[2] == (FOLDER / name).read_bytes()


@pytest.mark.parametrize(
    "path", ["/assets/../index.html", "/assets/", "/assets", "/assets/none.js", "/", "//assets/x.js"]
)
def test_only_known_names_are_read_from_the_folder(path):
    assert knock(Assets(page), path=path)[2] == b"page"
    assert knock(Assets(page), "POST", path=path)[2] == b"page"


def test_which_addresses_are_this_computer_only():
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "127.9.9.9", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))
    assert len(new_token()) > 30 and new_token() != new_token()


def test_another_address_gets_a_token_that_is_printed(monkeypatch, capsys):
    seen = {}
    monkeypatch.setattr(app, "build", lambda roots: None)
    monkeypatch.setattr(app, "application", lambda page, door, root_path: seen.update(door))
    monkeypatch.setattr(app, "serve", lambda made, bound: bound.close())
    assert app.main(["--host", "0.0.0.0", "--no-browser"]) == 0
    assert len(seen["token"]) > 30 and f"?token={seen['token']}" in capsys.readouterr().out
    assert app.main(["--no-browser"]) == 0 and seen["token"] == "" and seen["host"] == "127.0.0.1"


def test_a_port_in_use_is_said_in_a_sentence(capsys):
    held = app.bind("127.0.0.1", 0)
    assert app.main(["--port", str(held.getsockname()[1]), "--no-browser"]) == 2
    held.close()
    assert "--port" in capsys.readouterr().err
