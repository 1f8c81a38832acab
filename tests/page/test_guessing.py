"""Without the secret, each guess takes longer, no connection stays open, and no wider root is found."""

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvicorn

from kohya_gui.gradio_host.routes import is_open
from kohya_gui.server import guessing, paths, serving
from kohya_gui.server.auth import AuthGate, new_token
from tests.page.test_access import ask, page, waited
from tests.source import ROOT

__all__ = ["waited"]  # a fixture of another file


def test_each_wrong_guess_makes_the_next_one_slower_whatever_it_is(waited):
    guarded = AuthGate(page, "0.0.0.0", "the-token")
    for credentials in (
        {"query": "token=x"},
        {"authorization": "Bearer x"},
        {"cookie": f"{guarded.cookie}=x"},
        {"query": "token=y"},
    ):
        assert ask(guarded, **credentials)[0] == 401
    assert waited == [0.5, 1.0, 2.0, 4.0]
    assert ask(guarded)[0] == 401 and len(waited) == 4  # a request without a secret is no guess
    for _ in range(20):
        ask(guarded, query="token=z")
    assert max(waited) == waited[-1] == guessing.MAX_DELAY
    assert ask(guarded, authorization="Bearer the-token")[0] == 200
    ask(guarded, query="token=z")
    assert waited[-1] == 0.5  # a right guess resets the delay


def test_too_many_guesses_at_once_are_refused():
    guarded = AuthGate(page, "0.0.0.0", login="anna:long password")
    guarded.guesses.wrong("")
    guarded.guesses._waiting[""] = guessing.MAX_WAITING
    assert ask(guarded, authorization="Basic eA==")[0] == 429


@pytest.mark.parametrize(
    ("token", "enough"),
    [
        ("abcdefgh", False),
        ("a" * 100, False),
        ("0123456789" * 3, False),
        ("correct-horse-battery", False),
        ("f3b1c2d4e5a697887766554433221100", True),
        ("kXb3-9Qz_7LmP0sVtR2wYa", True),
    ],
)
def test_a_token_has_128_bits(token, enough):
    assert (guessing.bits(token) >= guessing.MIN_TOKEN_BITS) is enough
    assert guessing.bits(new_token()) >= guessing.MIN_TOKEN_BITS


def test_half_sent_headers_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(serving, "HEADER_TIMEOUT", 0.2)

    async def app(scope, receive, send):
        await page(scope, receive, send)

    async def tried():
        config = uvicorn.Config(app, http=serving.PatientProtocol, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        server_socket = serving.bind("127.0.0.1", 0)
        await server.startup(sockets=[server_socket])
        try:
            port = server_socket.getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n")
            assert await reader.read() == b""  # closed by the server
            monkeypatch.setattr(serving, "HEADER_TIMEOUT", 60)  # a busy machine takes its time to send a request
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for timeout in (60, 0.2):  # complete requests are answered, one after the other
                monkeypatch.setattr(serving, "HEADER_TIMEOUT", timeout)
                writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
                while await reader.readline() != b"\r\n":
                    pass
                await reader.read(1000)
            assert await reader.read() == b""
        finally:
            await server.shutdown(sockets=[server_socket])

    with ThreadPoolExecutor(1) as thread:  # this thread may have a running loop, of another test's browser
        thread.submit(asyncio.run, tried()).result()


def test_gradios_own_upload_does_not_exist():
    for method in ("GET", "POST"):
        assert not is_open(method, "/gradio_api/upload") and not is_open(method, "/gradio_api/upload_progress")


def test_a_folder_that_holds_the_home_is_no_root(tmp_path, monkeypatch):
    home = tmp_path / "people" / "anna"
    home.mkdir(parents=True)
    monkeypatch.setattr(Path, "home", lambda: home)
    for here, counts in (("/", False), (tmp_path / "people", False), (tmp_path, False), (tmp_path / "other", True)):
        Path(here).mkdir(exist_ok=True)
        monkeypatch.chdir(here)
        assert (Path(here).resolve() in paths.find_roots()) is counts
    monkeypatch.chdir(home)
    assert home.resolve() in paths.find_roots()


def test_the_page_ends_though_an_answer_is_still_worked_on(tmp_path):
    """In a separate process, as the page ends its process."""
    script = """
import asyncio, threading, uvicorn
from starlette.concurrency import run_in_threadpool
from kohya_gui.server import serving

begun = threading.Event()
serving.SHUTDOWN_TIMEOUT = 0.2

async def app(scope, receive, send):
    await run_in_threadpool(lambda: (begun.set(), threading.Event().wait()))  # for ever

bound = serving.bind("127.0.0.1", 0)
config = uvicorn.Config(app, lifespan="off", log_level="error", timeout_graceful_shutdown=1)
server = serving.QuietServer(config)
server.is_process = True

def visit():
    import socket
    with socket.create_connection(bound.getsockname()) as one:
        one.sendall(b"GET / HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
        begun.wait()
        server.should_exit = True
        one.recv(1)

threading.Thread(target=visit, daemon=True).start()
server.run(sockets=[bound])
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=100, check=False, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
