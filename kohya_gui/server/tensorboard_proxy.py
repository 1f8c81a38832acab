"""TensorBoard below /tensorboard/, behind the page's access checks: started on demand, with the runs' curves."""

import asyncio
import contextlib
import html
import json
import os
import secrets
import subprocess
import sys
import threading
from pathlib import Path

from starlette.types import Receive, Send

from kohya_gui.server.auth import App, Scope, respond, send_all
from library.config.environment import OUTPUT_IN_UTF_8
from library.config.problems import Message
from library.runs import layout, reader

TENSORBOARD_ADDRESS = "/tensorboard"
FONTS = "/font-roboto/"  # TensorBoard requests these at the root, whatever its own path is
MAX_RUNS = 50  # newest runs whose curves are shown
START_TIMEOUT = 60.0  # seconds it may take to start
MAX_REQUEST_BYTES = 4_000_000  # bytes of a request to TensorBoard
REQUEST_HEADERS = (b"accept", b"content-type", b"content-encoding")  # headers passed on from a request
RESPONSE_HEADERS = ("content-type", "content-encoding", "cache-control", "expires")  # and from a response


class TensorboardProxy:
    """Forward requests below /tensorboard/ to a TensorBoard on loopback, and all others to the page."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.server = TensorboardServer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an ASGI request."""
        path = scope.get("path", "")
        if path.startswith(FONTS) and self.server.running:
            path = TENSORBOARD_ADDRESS + path
            scope = {**scope, "path": path}
        if scope["type"] != "http" or not (path == TENSORBOARD_ADDRESS or path.startswith(f"{TENSORBOARD_ADDRESS}/")):
            await self.app(scope, receive, send)
        elif path == TENSORBOARD_ADDRESS:
            await send_all(send, 308, b"", [(b"location", b"." + TENSORBOARD_ADDRESS.encode() + b"/")])
        elif path == f"{TENSORBOARD_ADDRESS}/start" and scope["method"] == "POST":
            await self._start(scope, send)
        elif path == f"{TENSORBOARD_ADDRESS}/" and not self.server.shows(curve_folders()):
            await respond(scope, send, 200, *self._offer())
        elif self.server.running:
            await self._pass_on(scope, receive, send)
        else:
            await respond(scope, send, 404, "TensorBoard does not run.")

    def _offer(self) -> tuple[str, list[tuple[bytes, bytes]], str]:
        """Return the page with the button that starts TensorBoard: opening a page starts nothing."""
        folders = curve_folders()
        if not folders:
            return "No training has written curves for TensorBoard yet. Set its logging folder (logging_dir).", [], ""
        places = "".join(f"<li><code>{html.escape(str(folder))}</code></li>" for folder in folders)
        form = f'<form method="post" action="start"><button>Start TensorBoard</button></form><ul>{places}</ul>'
        return "TensorBoard shows the curves in these folders.", [], form

    async def _start(self, scope: Scope, send: Send) -> None:
        try:
            await asyncio.to_thread(self.server.start, curve_folders())
        except OSError as error:
            await respond(scope, send, 500, Message("TensorBoard could not be started: {error}", error=error))
            return
        await send_all(send, 303, b"", [(b"location", b"./")])

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        import httpx  # installed with gradio

        body = await _body(receive)
        if body is None:
            await respond(scope, send, 413, "This is too much for TensorBoard.")
            return
        headers_to_send = [(name, value) for name, value in scope["headers"] if name.lower() in REQUEST_HEADERS]
        query = scope.get("query_string", b"").decode("latin-1")
        target = self.server.address + scope["path"] + (f"?{query}" if query else "")
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
                request = client.build_request(
                    scope["method"],
                    target,
                    content=body,
                    headers=[*headers_to_send, (b"x-kohya-secret", self.server.secret)],
                )
                response = await client.send(request, stream=True)
                data = b"".join([part async for part in response.aiter_raw()])
                await response.aclose()
        except httpx.HTTPError as error:
            await respond(scope, send, 502, Message("TensorBoard does not answer: {error}", error=error))
            return
        headers = [
            (name.encode(), response.headers[name].encode()) for name in RESPONSE_HEADERS if name in response.headers
        ]
        await send_all(send, response.status_code, data, headers)


class TensorboardServer:
    """The TensorBoard process, which ends with this process."""

    def __init__(self) -> None:
        self.secret = secrets.token_urlsafe(24).encode()
        self.address = ""  # scheme, host and port
        self.folders: list[Path] = []
        self.process: subprocess.Popen[str] | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def shows(self, folders: list[Path]) -> bool:
        return self.running and set(folders) <= set(self.folders)

    def start(self, folders: list[Path]) -> None:
        """Start it, or restart it, on these folders. Raises OSError if it does not start."""
        self.stop()
        code = [sys.executable, "-m", "kohya_gui.server.tensorboard"]
        root = Path(__file__).resolve().parents[2]
        process = subprocess.Popen(
            code,
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, **OUTPUT_IN_UTF_8},
        )
        if not process.stdin or not process.stdout:
            raise OSError("it has no pipes")
        late = threading.Timer(START_TIMEOUT, process.kill)
        late.start()
        settings = {
            "secret": self.secret.decode(),
            "prefix": TENSORBOARD_ADDRESS,
            "folders": ",".join(map(str, folders)),
        }
        process.stdin.write(json.dumps(settings) + "\n")
        process.stdin.flush()
        try:
            started = json.loads(process.stdout.readline())
        except ValueError:
            raise OSError("it ended at once; `kohya doctor` checks the installation") from None
        finally:
            late.cancel()
        self.address = str(started["address"]).removesuffix(f"{TENSORBOARD_ADDRESS}/")
        self.folders, self.process = folders, process

    def stop(self) -> None:
        """Stop it, if it is running."""
        if self.process and self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        self.process = None


def curve_folders() -> list[Path]:
    """Return the folders of curves of this user's runs."""
    folders: dict[Path, None] = {}
    for run in reader.runs()[:MAX_RUNS]:
        config = run.facts.get("config") or {}
        logging_dir = (layout.facts_section(run.facts, "log") or config).get("logging_dir")
        # A comma would end the folder's name in TensorBoard's list.
        if isinstance(logging_dir, str) and logging_dir and "," not in logging_dir and os.path.isdir(logging_dir):
            folders[Path(os.path.expanduser(logging_dir)).resolve()] = None
    return sorted(folders)


async def _body(receive: Receive) -> bytes | None:
    """Return the body of a request, or None if it is too large."""
    parts, size = [], 0
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_REQUEST_BYTES:
            return None
        if not message.get("more_body"):
            return b"".join(parts)
