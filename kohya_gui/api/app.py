"""The API as an ASGI layer of the page: requests below /api/v1, with limits on their bodies."""

import json
from collections.abc import Callable
from functools import cached_property

from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import Message, Receive, Send

from kohya_gui.server.auth import App, Scope, send_all
from kohya_gui.server.json_api import MAX_REQUEST_BYTES
from library.config.outside_files import check_values
from library.config.problems import ConfigError

PREFIX = "/api/v1"


class ApiV1:
    """Answer requests below /api/v1, and pass all others on."""

    def __init__(self, app: App, build: Callable[[], App]) -> None:
        self.app, self.build = app, build

    # Built when first used, as the models of all requests would take a tenth of a second of the page's start.
    @cached_property
    def api(self) -> App:
        """The application with all routes."""
        return GZipMiddleware(self.build(), minimum_size=2000, compresslevel=4)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an ASGI request."""
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
        elif problem := await run_in_threadpool(beyond_limits, body):
            await _refuse(send, 422, problem)
        else:
            await api(scope, _given_again(body, receive), send)


def wrong_kind(scope: Scope) -> str:
    """Return why a POST is refused by its content type, or "". Forms on other sites could send any other type without a
    preflight request."""
    kind = dict(scope["headers"]).get(b"content-type", b"").partition(b";")[0].strip().lower()
    return "" if kind == b"application/json" else "Send JSON, with Content-Type: application/json."


def beyond_limits(body: bytes) -> str:
    """Return why the values of a body are refused, or "": half surrogate pairs fit into no answer and no file. Invalid
    JSON is answered by its parser.
    """
    try:
        check_values(json.loads(body), "The body")
    except ConfigError as error:
        return str(error)
    except (ValueError, RecursionError):
        return ""
    return ""


async def _read_body(receive: Receive) -> bytes | None:
    """Return the body of a request; None if it is too large."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > MAX_REQUEST_BYTES:
            return None
    return body


def _given_again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns a body that was read already, and then further messages."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again


async def _refuse(send: Send, status: int, sentence: str) -> None:
    content = {"error": sentence, "field": "", "problems": [], "texts": []}
    await send_all(send, status, json.dumps(content).encode(), [(b"content-type", b"application/json")])
