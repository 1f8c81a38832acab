"""The page as a whole, and the server that shows it."""

import argparse
import contextlib
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported

import gradio as gr
import uvicorn
from fastapi import FastAPI
from starlette.middleware.gzip import GZipMiddleware

from kohya_gui import paths
from kohya_gui.assets import Assets
from kohya_gui.door import Door, is_loopback, new_token
from kohya_gui.monitor import Monitor
from kohya_gui.theme import HEAD, THEME
from kohya_gui.training import TABS, Training

TITLE = "Kohya Trainer"
FIRST_PORT, TRIED = 7860, 20


def build(roots: Sequence[Path] = ()) -> gr.Blocks:
    """The page. `roots` are the folders below which configs may be read and written."""
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_width=True, delete_cache=(3600, 3600)) as page:
        gr.HTML(
            f"<header><h1>{TITLE}</h1><p>LoRA and fine-tuning for SDXL and FLUX.1</p></header>",
            elem_id="top",
            apply_default_css=False,
        )
        with gr.Row(elem_id="page", equal_height=False):
            with gr.Column(scale=3, min_width=0, elem_id="work"), gr.Tabs():
                for tab in TABS:
                    with gr.Tab(tab.title, id=tab.id):
                        Training(tab, roots or paths.roots())
            with gr.Column(scale=2, min_width=0, elem_id="side"):
                monitor = Monitor()
        monitor.greet(page)
    return page


def application(page: gr.Blocks, door: dict[str, Any], root_path: str = "") -> Any:
    """The page as an ASGI application, behind its door and compressed on the wire."""
    # Mounted and not launched: launch() asks the network for its own address, obeys a dozen environment variables, and
    # may open a public link in notebooks.
    inner = gr.mount_gradio_app(
        FastAPI(docs_url=None, redoc_url=None, openapi_url=None), page, path="/", theme=THEME, head=HEAD,
        footer_links=[], run_history=False, enable_monitoring=False, ssr_mode=False, pwa=False, show_error=True,
        max_file_size="1mb", root_path=root_path or None,
    )  # fmt: skip
    return Door(Assets(GZipMiddleware(inner, minimum_size=2000, compresslevel=4)), **door)


def main(argv: Sequence[str] | None = None) -> int:
    """Show the page until Ctrl+C. The exit code: 0, or 2 when the page cannot be shown as asked."""
    given = parser().parse_args(argv)
    token = given.token or os.environ.get("KOHYA_TOKEN", "")
    if not token and not is_loopback(given.host):
        token = new_token()
    bound = bind(given.host, given.port)
    if bound is None:
        where = f"port {given.port}" if given.port else f"any port from {FIRST_PORT} on"
        print(f"error: {given.host} cannot be used on {where}; choose another with --port or --host", file=sys.stderr)
        return 2
    door = {"host": given.host, "token": token, "also": given.allowed_host}
    app = application(build(paths.roots(given.root)), door, given.root_path)
    address = url(given.host, bound.getsockname()[1], token)
    print(f"{TITLE} is at {address}  (Ctrl+C ends it; trainings go on)", flush=True)
    if not given.no_browser:
        threading.Timer(0.5, _open, [address]).start()
    serve(app, bound)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options of the page's own command."""
    made = argparse.ArgumentParser(prog="kohya gui", description="Show the training page in your browser.")
    made.add_argument("--host", default="127.0.0.1",
                      help="address to listen at; any but this computer's own asks visitors for a token")  # fmt: skip
    made.add_argument("--port", type=int, default=0, help=f"port; the first free one from {FIRST_PORT} on if not given")
    made.add_argument("--root", action="append", default=[], metavar="FOLDER",
                      help="a further folder for configs, besides your home and the current folder")  # fmt: skip
    made.add_argument("--token", default="", help="the token to ask for, instead of a new one (or KOHYA_TOKEN)")
    made.add_argument("--allowed-host", action="append", default=[], metavar="NAME",
                      help="a further name the page is reached by, such as a proxy's")  # fmt: skip
    made.add_argument("--root_path", default="", help="path under which a proxy shows the page")
    made.add_argument("--no-browser", action="store_true", help="do not open the browser")
    return made


def bind(host: str, port: int) -> socket.socket | None:
    """A listening socket, or None. Held from here to the server, so that nobody takes the port in between."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in [port] if port else range(FIRST_PORT, FIRST_PORT + TRIED):
        made = socket.socket(kind, socket.SOCK_STREAM)
        if os.name != "nt":  # on Windows this would share a port that is in use
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host.strip("[]"), candidate))
            made.listen()
            return made
        except OSError:
            made.close()
    return None


def serve(app: Any, bound: socket.socket) -> None:
    """Answer requests until the process is told to end."""
    config = uvicorn.Config(app, log_level="warning", server_header=False, timeout_graceful_shutdown=1)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[bound])


def url(host: str, port: int, token: str) -> str:
    """What to open: a listener on all addresses is reached here under this computer's own."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def _open(address: str) -> None:
    with contextlib.suppress(Exception):  # a server without a screen has no browser, and needs none
        webbrowser.open(address)
