"""A server of the page, and the browser for tests and benchmarks."""

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def find_chromium() -> str | None:
    """Return the browser named by CHROMIUM, or else the first one on the PATH."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


@contextlib.contextmanager
def online(app: Any) -> Iterator[str]:
    """Serve an application within the context; yield its address."""
    import uvicorn

    from kohya_gui.server.serving import bind

    server_socket = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [server_socket]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server_socket.getsockname()[1]}/"
    server.should_exit = True
    thread.join(timeout=5)


@contextlib.contextmanager
def page_online(root: Path) -> Iterator[str]:
    """Serve the page for files in this folder within the context; yield its address."""
    from kohya_gui.app import application, build_page

    with online(application(build_page([root]), {"host": "127.0.0.1"})) as address:
        yield address
