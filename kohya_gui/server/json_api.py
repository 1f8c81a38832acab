"""The API of the page's own scripts: JSON requests by POST, and images by GET.

Requests pass the same checks as all others (Host, Origin, token). Their content type is JSON: a form on another site
cannot send that without a preflight request of the browser, which is refused.
"""

import json
from collections.abc import Callable, Container, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kohya_gui.server.auth import LOCAL_KEY
from library.config.json_types import JsonObject
from library.config.problems import ConfigError
from library.config.stored_messages import how_made

API_ADDRESS = "/own/"
MAX_REQUEST_BYTES = 4_500_000  # bytes of a request, or of a piece of a file
PIECE_TYPE = "application/octet-stream"  # a form on another site cannot send it without a preflight request either
NO_SUCH_CHOICE = "There is no such choice: load the page again."
NOT_OF_THE_PAGE = "This is not what the page sends: load it again."


class ApiRequest:
    """The fields of a request, each read with its type, since a browser may send anything."""

    def __init__(self, fields: Any, is_here: bool = False) -> None:
        """`is_here` is true if a browser on this computer has sent them."""
        if not isinstance(fields, dict):
            raise ConfigError(NOT_OF_THE_PAGE)
        self.fields: JsonObject = fields
        self.is_here = is_here

    def text(self, name: str, default: str = "") -> str:
        value = self.fields.get(name, default)
        return value if isinstance(value, str) and _encodes(value) else self._wrong(name, "a text")

    def choice(self, name: str, choices: Container[str], default: str = "") -> str:
        """Return a text that is one of the choices."""
        if (value := self.text(name, default)) not in choices:
            raise ConfigError(NO_SUCH_CHOICE)
        return value

    def flag(self, name: str) -> bool:
        value = self.fields.get(name, False)
        return value if isinstance(value, bool) else self._wrong(name, "true or false")

    def number(self, name: str, default: int = 0, largest: int = 10**9) -> int:
        """Return a whole number from 0 to `largest`."""
        value = self.fields.get(name, default)
        good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= largest
        return value if good else self._wrong(name, f"a whole number from 0 to {largest}")

    def texts(self, name: str) -> list[str]:
        """Return a list of texts; empty if it was not sent."""
        value = self.fields.get(name, [])
        good = isinstance(value, list) and all(isinstance(text, str) and _encodes(text) for text in value)
        return value if good else self._wrong(name, "a list of texts")

    def values(self, name: str) -> JsonObject:
        """Names with texts, booleans or numbers; empty if it was not sent."""
        sent_values = self.fields.get(name, {})
        good = isinstance(sent_values, dict) and all(
            value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and _encodes(value))
            for value in sent_values.values()
        )
        return sent_values if good else self._wrong(name, "names with values")

    def _wrong(self, name: str, expected: str) -> Any:
        raise ConfigError("{name}: this must be {wanted}; load the page again", name=name, wanted=expected)


Handler = Callable[[ApiRequest], JsonObject]
ImageHandler = Callable[[Mapping[str, str]], Response]
PieceHandler = Callable[[Mapping[str, str], bytes], JsonObject]  # the query, and a piece of a file


# Why: docs/decisions/2026-11-22-page-asks-by-post.md
class JsonApi:
    """Handlers of requests by name. They return a dict; a mistake of the user becomes `{"error": sentence}`.

    A file comes in pieces, each a POST of its bytes.
    """

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.image_handlers: dict[str, ImageHandler] = {}
        self.piece_handlers: dict[str, PieceHandler] = {}
        self.here_only: set[str] = set()  # requests that only a browser on this computer may send

    def add(
        self,
        handlers: Mapping[str, Handler],
        images: Mapping[str, ImageHandler] | None = None,
        pieces: Mapping[str, PieceHandler] | None = None,
    ) -> None:
        """Add handlers of JSON (POST), of images (GET, which may change nothing) and of pieces of files (POST)."""
        self.handlers.update(handlers)
        self.image_handlers.update(images or {})
        self.piece_handlers.update(pieces or {})

    def attach(self, app: FastAPI) -> None:
        app.add_api_route(API_ADDRESS + "{name}", self._post, methods=["POST"], include_in_schema=False)
        app.add_api_route(API_ADDRESS + "{name}", self._get, methods=["GET"], include_in_schema=False)

    async def _post(self, name: str, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        handler, take = self.handlers.get(name), self.piece_handlers.get(name)
        if handler is None and take is None:
            return JSONResponse({"error": "there is no such question"}, 404)
        if kind == PIECE_TYPE and take is not None:
            handle = lambda: take(request.query_params, body)  # noqa: E731
        elif kind == "application/json" and handler is not None:
            handle = lambda: handler(ApiRequest(json.loads(body), is_here))  # noqa: E731
        else:
            return JSONResponse({"error": "questions are JSON"}, 415)
        is_here = request.scope.get(LOCAL_KEY) is True
        if name in self.here_only and not is_here:
            return JSONResponse({"error": "This can be done on the computer itself only."}, 403)
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_REQUEST_BYTES:
                return JSONResponse({"error": "this is too much at once"}, 413)
        # Mistakes of the user get status 200, as a browser logs every other status as an error in its console.
        return _json(await run_in_threadpool(_handled, handle))

    async def _get(self, name: str, request: Request) -> Response:
        show = self.image_handlers.get(name)
        if show is None:
            return Response("There is nothing here.", 404)
        try:
            return await run_in_threadpool(show, dict(request.query_params))
        except ConfigError as error:
            return Response(str(error), 404, media_type="text/plain")


def refused(error: ConfigError) -> JsonObject:
    folders = {str(problem): problem.arguments["folder"] for problem in error.problems if problem.code == "allow"}
    return {"error": str(error), "texts": list(how_made(error.problems))} | ({"allow": folders} if folders else {})


def _handled(handle: Callable[[], JsonObject]) -> JsonObject:
    try:
        return handle()
    except ConfigError as error:
        return refused(error)
    except (ValueError, RecursionError):
        return {"error": NOT_OF_THE_PAGE}


def _json(answer: JsonObject) -> Response:
    answer = {**answer, "texts": [*answer.get("texts", ()), *how_made(answer)]}
    # File names may contain bytes that are not text; JSON escapes preserve them.
    return Response(json.dumps(answer, separators=(",", ":"), default=str), media_type="application/json")


def _encodes(text: str) -> bool:
    """Return whether a text can be stored in a file: half a surrogate pair, which JSON can carry, cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
