"""Access to the page: names, origins and tokens, for every route and method alike."""

import asyncio
import base64
import contextlib
import gzip
import io
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import uvicorn

from kohya_gui import app
from kohya_gui.gradio_host.assets import Assets
from kohya_gui.gradio_host.routes import Protected, Routes, is_open
from kohya_gui.server import guessing, scripts, serving
from kohya_gui.server.auth import AuthGate, is_loopback, new_token


def ask(gate, method="GET", path="/", query="", kind="http", **headers):
    """Status, headers and body of the response; the page behind the gate responds with 200."""
    heads = {"host": "127.0.0.1:7860", **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(k.encode(), v.encode()) for k, v in heads.items()],
    }
    sent = []

    async def send(message):
        sent.append(message)

    answering = gate(scope, None, send)
    with contextlib.suppress(StopIteration):  # it never really waits, so it needs no event loop
        answering.send(None)
    first = sent[0]
    answer = {k.decode(): v.decode() for k, v in first.get("headers", [])}
    return first.get("status", first.get("code")), answer, b"".join(m.get("body", b"") for m in sent)


async def page(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"page"})


@pytest.fixture
def gate():
    return AuthGate(page, "127.0.0.1")


@pytest.fixture
def guarded():
    return AuthGate(page, "0.0.0.0", "the-token", ["train.example"])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:7860", "localhost:7860", "LOCALHOST", "[::1]:7860"])
def test_the_page_answers_to_its_own_names(gate, host):
    assert ask(gate, host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.test", "evil.test:7860", "", "127.0.0.1.evil.test", "10.0.0.5", "localhost.evil.test"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_other_name_may_be_pointed_here(gate, host, method):
    status, _, body = ask(gate, method, host=host)
    assert status == 403 and body != b"page"


def test_the_answer_says_how_to_allow_a_name(gate):
    assert b"--allowed-host evil.test" in ask(gate, host="evil.test", accept="text/html")[2]


@pytest.mark.parametrize("origin", ["https://evil.test", "null", "http://127.0.0.1:9999", "", "file://"])
def test_other_sites_cannot_press_buttons(gate, origin):
    assert ask(gate, "POST", origin=origin)[0] == 403


def test_the_page_itself_may(gate):
    assert ask(gate, "POST", origin="http://127.0.0.1:7860", sec_fetch_site="same-origin")[0] == 200


def test_a_proxy_may_change_the_host(guarded):
    shown = {"authorization": "Bearer the-token", "host": "127.0.0.1:7860"}
    assert ask(guarded, "POST", origin="https://train.example", **shown)[0] == 200
    assert ask(guarded, "POST", origin="https://other.example", **shown)[0] == 403


def test_a_link_from_elsewhere_may_open_the_page_but_not_more(gate):
    assert ask(gate, sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 200
    assert ask(gate, sec_fetch_site="cross-site", sec_fetch_mode="no-cors")[0] == 403
    assert ask(gate, "POST", sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 403


@pytest.mark.parametrize(
    "path", ["/", "/config", "/assets/x.js", "/gradio_api/run/predict", "/gradio_api/file=/etc/passwd"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE"])
def test_without_the_token_nothing_is_served(guarded, path, method):
    assert ask(guarded, method, path)[0] == 401
    assert ask(guarded, method, path, cookie=f"{guarded.cookie}=wrong", authorization="Bearer wrong")[0] == 401


def test_a_socket_is_closed_without_the_token(guarded):
    assert ask(guarded, kind="websocket")[0] == 1008


@pytest.fixture(autouse=True)
def waited(monkeypatch):
    """The delays, in seconds, that guesses would have had."""
    seconds_waited = []

    async def sleep(seconds):
        seconds_waited.append(seconds)

    # Replaced in this module only: other pages in this process have to continue sleeping.
    monkeypatch.setattr(guessing, "asyncio", SimpleNamespace(sleep=sleep, Lock=asyncio.Lock))
    return seconds_waited


def test_user_and_password_open_the_door_and_guessing_is_slow(waited):
    guarded = AuthGate(page, "0.0.0.0", login="anna:long passwörd")
    shown = base64.b64encode("anna:long passwörd".encode()).decode()
    assert ask(guarded, "POST", authorization=f"Basic {shown}")[0] == 200 and not waited
    for wrong in ("anna:long", "anna:", ":", "long passwörd", "\udcff"):
        code = base64.b64encode(wrong.encode("utf-8", "surrogatepass")).decode()
        status, headers, body = ask(guarded, authorization=f"Basic {code}", accept="text/html")
        assert status == 401 and headers["www-authenticate"].startswith("Basic") and b"<form" not in body
        assert b"password" in body and b"oken" not in body
    for broken in ("Basic", "Basic !!!", "Basic " + "A" * 9999, "Bearer", "Bearer ", "Digest x"):
        assert ask(guarded, authorization=broken)[0] == 401
    assert len(waited) == 5 + 6


def test_a_ticket_opens_once(guarded):
    guarded.ticket = "ticket"
    assert ask(guarded, query="token=ticket")[0] == 303 and ask(guarded, query="token=ticket")[0] == 401
    assert ask(guarded, query="token=")[0] == 401


def test_two_pages_on_one_machine_keep_their_cookies_apart():
    first, second = AuthGate(page, "0.0.0.0", "the-token"), AuthGate(page, "0.0.0.0", "another-token")
    assert first.cookie != second.cookie
    cookies = f"{first.cookie}=the-token; {second.cookie}=another-token"
    assert ask(first, cookie=cookies)[0] == ask(second, cookie=cookies)[0] == 200


@pytest.mark.parametrize("host", ["[::1", "[", "a b", "127.0.0.1:99999", "@127.0.0.1", "127.0.0.1@evil.test", "\xff"])
def test_what_is_no_name_is_refused_and_breaks_nothing(gate, host):
    assert ask(gate, host=host)[0] in ((200,) if host.endswith(("99999", "@127.0.0.1")) else (403,))
    assert ask(gate, "POST", origin=f"http://{host}")[0] == 403


def test_a_name_for_all_below_it_and_what_a_proxy_says():
    passed_scope = {}

    async def behind(scope, receive, send):
        passed_scope.update(scope)
        await page(scope, receive, send)

    gate = AuthGate(behind, "127.0.0.1", also=["*.proxy.example"])
    assert ask(gate, "POST", host="pod-7860.proxy.example", origin="https://pod-7860.proxy.example")[0] == 200
    assert ask(gate, host="proxy.example.evil.test")[0] == ask(gate, host="evilproxy.example")[0] == 403
    for forwarded_host, is_kept in (
        ("evil.test", False),
        ("a.proxy.example", True),
        ("a.proxy.example, evil.test", False),
    ):
        assert ask(gate, x_forwarded_host=forwarded_host, x_forwarded_for="127.0.0.1")[0] == 200
        assert (b"x-forwarded-host" in dict(passed_scope["headers"])) == is_kept


def test_no_other_site_may_show_the_page_in_a_frame(gate):
    opened = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert ask(gate, sec_fetch_dest="document", **opened)[0] == 200
    assert ask(gate, sec_fetch_dest="iframe", **opened)[0] == 403
    headers = ask(Protected(gate))[1]
    assert "frame-ancestors 'self'" in headers["content-security-policy"] and headers["x-frame-options"]


def test_the_token_moves_from_the_address_into_a_cookie(guarded):
    status, headers, _ = ask(guarded, path="/", query="token=the-token&view=x", accept="text/html")
    assert status == 303 and headers["location"] == "./?view=x"
    assert "HttpOnly" in headers["set-cookie"] and "SameSite=Strict" in headers["set-cookie"]
    cookie = headers["set-cookie"].split(";")[0]
    assert ask(guarded, "POST", cookie=f"other=1; {cookie}")[0] == 200
    assert ask(guarded, authorization="Bearer the-token")[0] == 200


def test_the_way_on_stays_on_this_page(guarded):
    for path in ("//evil.test", "/\\evil.test", "\\\\evil.test"):
        location = ask(guarded, path=path, query="token=the-token")[1]["location"]
        assert location == "./evil.test"


def test_wrong_token_is_requested_again(guarded):
    status, _, body = ask(guarded, query="token=no", accept="text/html")
    assert status == 401 and b"Wrong token" in body and b"the-token" not in body


def test_with_a_token_any_address_of_the_machine_will_do_but_no_strange_name(guarded):
    for host in ("10.0.0.5:7860", "train.example", "127.0.0.1"):
        assert ask(guarded, host=host, authorization="Bearer the-token")[0] == 200
    assert ask(guarded, host="evil.test", authorization="Bearer the-token")[0] == 403


def test_the_halves_of_an_answer_do_not_wait_for_each_other():
    # asyncio disables Nagle's algorithm only for sockets with IPPROTO_TCP, and accepted sockets inherit it from ours.
    with contextlib.closing(serving.bind("127.0.0.1", 0)) as bound:
        assert bound.proto == socket.IPPROTO_TCP


def test_scripts_come_from_memory_and_may_be_kept():
    assets = Assets(page, scripts.SCRIPT_FILES)
    gradio = next(path for path in sorted(assets.files) if path.startswith("/assets/") and path.endswith(".js"))
    for path in (gradio, *scripts.SCRIPT_FILES):
        status, headers, body = ask(assets, path=path, accept_encoding="gzip, br")
        assert status == 200 and "immutable" in headers["cache-control"]
        assert headers["content-type"].startswith("text/javascript")
        assert gzip.decompress(body) == ask(assets, path=path)[2]


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../index.html",
        "/assets/",
        "/assets",
        "/assets/none.js",
        "/",
        "//assets/x.js",
        "/scripts/main.js",
        scripts.ADDRESS.removesuffix("main.js"),
        scripts.ADDRESS.replace("main.js", "server/auth.py"),
        scripts.ADDRESS.replace("main.js", "../main.js"),
    ],
)
def test_only_known_names_are_read_from_the_folder(path):
    assert ask(Assets(page, scripts.SCRIPT_FILES), path=path)[2] == b"page"
    assert ask(Assets(page, scripts.SCRIPT_FILES), "POST", path=path)[2] == b"page"


def test_which_addresses_are_this_computer_only():
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "127.9.9.9", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))
    assert len(new_token()) > 30 and new_token() != new_token()


@pytest.fixture
def started(monkeypatch):
    """Start the page with arguments; returns the arguments of its access checks, or the exit code."""
    access = {}
    monkeypatch.setattr(app, "build_page", lambda roots: None)
    monkeypatch.setattr(app, "prepare_responses", lambda page: None)
    monkeypatch.setattr(app, "application", lambda page, gate, root_path: access.update(gate))
    monkeypatch.setattr(app, "serve", lambda page_app, bound: (access.update(bound=bound.getsockname()), bound.close()))
    monkeypatch.delenv("SSH_CONNECTION", raising=False)

    def start(*arguments):
        access.clear()
        code = app.main([*arguments, "--no-browser"])
        return code if code else {"login": "", "token": "", **access}

    return start


def test_alone_it_listens_to_this_computer_only(started, capsys):
    access = started()
    assert access["host"] == "127.0.0.1" == access["bound"][0] and access["token"] == ""
    assert "http://127.0.0.1:" in capsys.readouterr().out


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_another_address_gets_a_token_that_is_printed_once(started, capsys, host):
    access = started("--host", host)
    output = capsys.readouterr()
    assert (
        len(access["token"]) > 30
        and output.out.count(access["token"]) == 1
        and f"?token={access['token']}" in output.out
    )
    assert access["ticket"] not in output.out and not output.err


def test_starters_of_kohya_ss_work_and_what_is_unsafe_in_them_is_refused(started, monkeypatch, capsys):
    monkeypatch.setenv("KOHYA_PASSWORD", "long enough")
    access = started("--listen", "0.0.0.0", "--server_port", "0", "--username", "anna", "--headless", "--inbrowser")
    assert access["host"] == "0.0.0.0" and access["login"] == "anna:long enough"
    for option, words in (("--share", "no public link"), ("--password=hunter22", "KOHYA_PASSWORD")):
        with pytest.raises(SystemExit):
            started(option)
        output = capsys.readouterr().err
        assert words in output and "hunter22" not in output


@pytest.mark.parametrize(
    "written, name",
    [
        ("train.example", "train.example"),
        ("https://Train.Example:8443/", "train.example"),
        ("*.proxy.example", "*.proxy.example"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("10.0.0.7:7860", "10.0.0.7"),
        ("[fd00::7]:7860", "fd00::7"),
        ("fd00::7", "fd00::7"),
    ],
)
def test_an_allowed_host_may_be_written_as_the_browser_shows_it(started, written, name):
    assert started("--allowed-host", written)["also"] == [name]


@pytest.mark.parametrize(
    "written", ["/srv/files", "train.example/trainer", "*", "", "a b", "https://", "[::1", "é" * 99]
)
def test_what_is_no_host_name_is_refused_at_the_start(started, written, capsys):
    with pytest.raises(SystemExit):
        started("--allowed-host", written)
    assert "is not a host name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "written", ["https://[x", "https://", "a?b", "/a#b", "../x", "/a/../b", "/tr ainer", "/a\nb", "https:///x"]
)
def test_what_is_no_path_of_a_proxy_is_refused_at_the_start(started, written, capsys):
    with pytest.raises(SystemExit):
        started("--root_path", written)
    assert "is not a path of an address" in capsys.readouterr().err


@pytest.mark.parametrize("written", ["", "/", "trainer", "/trainer/", "https://Train.example:8443/a%20b/c"])
def test_a_path_of_a_proxy_may_be_an_address(started, written):
    assert started("--root_path", written)["also"] == ["train.example"] * ("://" in written)


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_a_root_that_is_not_there_is_named_at_the_start(started, tmp_path, monkeypatch, capsys, way):
    gone = str(tmp_path / "gone")
    for folder, notes in ((str(tmp_path), 0), (gone, 1)):
        if way == "variable":
            monkeypatch.setenv("KOHYA_ROOTS", folder)
        assert started(*(["--root", folder] if way == "flag" else []))["host"] == "127.0.0.1"
        assert capsys.readouterr().err.count(f"there is no folder {folder} now") == notes


def test_tokens_and_passwords_come_from_where_only_the_user_looks(started, tmp_path, monkeypatch, capsys):
    access = started("--host", "0.0.0.0", "--token-file", str(tmp_path / "new" / "token"))
    assert (tmp_path / "new" / "token").read_text().strip() == access["token"]
    assert os.name == "nt" or (tmp_path / "new" / "token").stat().st_mode & 0o077 == 0
    assert started("--token-file", str(tmp_path / "new" / "token"))["token"] == access["token"]
    (tmp_path / "short").write_text("abc")
    assert started("--token-file", str(tmp_path / "short")) == 2 and "128 bits" in capsys.readouterr().err
    assert started("--token-file", str(tmp_path)) == 2 and "--token-file" in capsys.readouterr().err
    monkeypatch.setenv("KOHYA_TOKEN", "from-the-environment-0123")
    assert started()["token"] == "from-the-environment-0123"
    monkeypatch.delenv("KOHYA_TOKEN")
    monkeypatch.setattr("sys.stdin", None)
    assert started("--host", "0.0.0.0", "--user", "anna") == 2 and "KOHYA_PASSWORD" in capsys.readouterr().err
    monkeypatch.setenv("KOHYA_PASSWORD", "long enough")
    access = started("--host", "0.0.0.0", "--user", "anna")
    assert access["login"] == "anna:long enough" and access["token"] == ""
    assert "long enough" not in capsys.readouterr().out


def test_over_ssh_the_tunnel_command_is_printed_and_no_browser_opens(started, monkeypatch, capsys):
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 50000 10.0.0.2 22")
    access = started()
    port = access["bound"][1]
    assert f"ssh -L {port}:127.0.0.1:{port} " in capsys.readouterr().out
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not serving.has_screen()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert serving.has_screen()


def test_a_page_that_is_open_when_the_server_ends_is_no_error(caplog, monkeypatch):
    """Gradio's pages keep a request open while they are."""

    async def held(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await asyncio.sleep(60)

    level = logging.getLogger("uvicorn.error").level
    server_socket = serving.bind("127.0.0.1", 0)
    config = uvicorn.Config(held, lifespan="off", log_config=None, timeout_graceful_shutdown=0.1)
    server = serving.QuietServer(config)
    working = threading.Thread(target=server.run, kwargs={"sockets": [server_socket]}, daemon=True)
    working.start()
    with socket.create_connection(server_socket.getsockname(), 10) as visitor:
        visitor.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert visitor.recv(1000)
        server.should_exit = True
        working.join(10)
    logging.getLogger("uvicorn.error").setLevel(level)
    assert not working.is_alive() and not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_console_that_lacks_the_letters_of_a_name_does_not_keep_the_page_from_starting(monkeypatch, capsys):
    with contextlib.closing(serving.bind("127.0.0.1", 0)) as held:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="cp1252"))
        assert app.main(["--port", str(held.getsockname()[1]), "--no-browser"]) == 2
    serving.announce(serving.build_server_parser().parse_args(["--user", "李", "--no-browser"]), 7860, {})
    sys.stdout.flush()
    assert b"password of \\u674e" in sys.stdout.buffer.getvalue()


def test_a_port_in_use_is_reported_in_a_sentence(capsys):
    held = serving.bind("127.0.0.1", 0)
    taken = held.getsockname()[1]
    assert app.main(["--port", str(taken), "--no-browser"]) == 2
    output = capsys.readouterr().err
    assert f"port {taken} is in use" in output and output.count("\n") == 1
    free = int(re.search(r"--port (\d+), which is free", output)[1])
    serving.bind("127.0.0.1", free).close()
    held.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid: this is not an address of this computer"),
        (["--host", "192.0.2.7", "--port", "7999"], "--host 192.0.2.7: this is not an address of this computer"),
        (["--port", "99999"], "--port 99999: a port is a number from 1 to 65535"),
        (["--port", "-1"], "--port -1: a port is a number from 1 to 65535"),
    ],
)
def test_an_address_that_cannot_be_had_says_which_half_of_it_is_wrong(capsys, arguments, words):
    assert app.main([*arguments, "--no-browser"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "path", "open_"),
    [
        ("GET", "/", True),
        ("GET", "/config", True),
        ("POST", "/own/panel", True),
        ("GET", "/gradio_api/info", False),
        ("POST", "/gradio_api/run/predict", False),
        ("POST", "/gradio_api/queue/join", False),
        ("GET", "/gradio_api/file=/tmp/x.png", False),
        ("GET", "/gradio_api/proxy=http://x.hf.space/", False),
        ("GET", "/gradio_api/deep_link", False),
        ("GET", "/monitoring", False),
        ("GET", "/monitoring/summary", False),
        ("GET", "/logout", False),
        ("POST", "/gradio_api/vibe-edit/", False),
        ("POST", "/gradio_api/run-history/connect", False),
        ("PUT", "/", False),
        ("DELETE", "/own/x", False),
        ("OPTIONS", "/own/panel", False),
    ],
)
def test_only_the_routes_that_the_page_needs_are_open(method, path, open_):
    assert is_open(method, path) is open_
    assert ask(Routes(page), method, path)[0] == (200 if open_ else 404)


async def nowhere(scope, receive, send):
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b"Not Found"})


def test_a_path_that_the_page_was_not_started_with_says_how_to_start_it():
    status, _, body = ask(Routes(nowhere), path="/trainer/", accept="text/html,*/*")
    assert status == 404 and b"start it with --root_path /trainer." in body and b"Not Found" not in body
    assert ask(Routes(nowhere), path="/tensorboard/x", accept="text/html")[2] == b"Not Found"
    assert ask(Routes(nowhere), path="/scripts/x.js", accept="*/*")[2] == b"Not Found"
    assert ask(Routes(page), path="/", accept="text/html")[2] == b"page"


def test_gradios_own_switches_do_not_count(monkeypatch):
    code = "import kohya_gui, os; print([n for n in os.environ if n.startswith('GRADIO_')])"
    environment = {**os.environ, "GRADIO_SHARE": "True", "GRADIO_ALLOWED_PATHS": "/", "GRADIO_VIBE_MODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['GRADIO_ANALYTICS_ENABLED']"
