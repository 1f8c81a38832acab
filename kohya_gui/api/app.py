"""The API as an ASGI layer of the page: built when it is first asked for something."""

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import Message, Receive, Send

from kohya_gui.api import answers, queue_routes
from kohya_gui.server.auth import App, Scope, send_all
from kohya_gui.server.json_api import MAX_REQUEST_BYTES
from library.config.problems import ConfigError

PREFIX = "/api/v1"
ABOUT = (
    "Runs, queue, checks and data of this trainer. Times are seconds since 1970, durations are seconds, memory is in "
    "GiB, null is unknown. A page that other computers can reach wants its token: Authorization: Bearer TOKEN."
)


class ApiV1:
    """Answer requests below /api/v1, and pass all others on."""

    def __init__(self, app: App, routers: Callable[[], Sequence[Any]], root_path: str = "") -> None:
        """`routers` returns what is answered; `root_path` is the path under which a proxy shows the page."""
        self.app, self.routers, self.root_path = app, routers, root_path

    # Built late, as the models of all requests take a tenth of a second of the page's start.
    @cached_property
    def api(self) -> App:
        """The application with all routes."""
        return GZipMiddleware(build_api(self.routers(), self.root_path), minimum_size=2000, compresslevel=4)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or not (scope["path"] == PREFIX or scope["path"].startswith(f"{PREFIX}/")):
            await self.app(scope, receive, send)
            return
        api = await run_in_threadpool(lambda: self.api)
        if scope["method"] != "POST":
            await api(scope, receive, send)
        elif problem := wrong_kind(scope):
            await _refuse(send, 415, problem)
        elif (body := await _read_body(receive)) is None:
            await _refuse(send, 413, f"The body is too large: at most {MAX_REQUEST_BYTES:,} bytes are read.")
        else:
            await api(scope, _given_again(body, receive), send)


def build_api(routers: Sequence[Any], root_path: str = "") -> FastAPI:
    """Return the application of these routers."""
    api = FastAPI(
        title="Kohya Trainer",
        version="1",
        description=ABOUT,
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{PREFIX}/openapi.json",
        servers=[{"url": root_path}] if root_path else None,
        responses=answers.REFUSALS,
    )
    for router in routers:
        api.include_router(router, prefix=PREFIX)
    api.add_exception_handler(ConfigError, answers.on_config_error)
    api.add_exception_handler(RequestValidationError, answers.on_invalid)
    api.add_exception_handler(HTTPException, answers.on_http_error)
    return api


def wrong_kind(scope: Scope) -> str:
    """Why a POST is refused by its content type, or "": a form on another site could send any other without asking."""
    kind = dict(scope["headers"]).get(b"content-type", b"").partition(b";")[0].strip().lower()
    return "" if kind == b"application/json" else "Send JSON, with Content-Type: application/json."


async def _read_body(receive: Receive) -> bytes | None:
    """The body of a request; None if it is too large."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > MAX_REQUEST_BYTES:
            return None
    return body


def _given_again(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns a body that was read already, and then what else comes."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again


async def _refuse(send: Send, status: int, sentence: str) -> None:
    content = {"error": sentence, "field": "", "problems": [], "texts": []}
    await send_all(send, status, json.dumps(content).encode(), [(b"content-type", b"application/json")])


def page_routers() -> list[Any]:
    """The routers of the page's API."""
    return [queue_routes.router()]
