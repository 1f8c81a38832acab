"""Scripts and styles served from memory: sixty small files of Gradio that every visit loads, and the page's own."""

import gzip
import mimetypes
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import gradio
from starlette.types import Receive, Send

ASSETS_FOLDER = Path(gradio.__file__).parent / "templates" / "frontend" / "assets"
ASSETS_ADDRESS = "/assets/"
TEXT_SUFFIXES = (".js", ".css", ".svg", ".json")
# Gradio counts the seconds of an event in every frame, and those of the loader forever, even after it has gone. The
# page does not show them. A version of Gradio in which this code differs is served unchanged.
_STOPWATCH = re.compile(rb"function ([\w$]+)\(\)\{[\w$]+\(\(\)=>\{[^{}]*performance\.now\(\)[^{}]*&&\1\(\)\}\)\}")

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class Assets:
    """Serve these files before Gradio does.

    Gradio reads and compresses each file again for every visitor, one after the other, which is a third of the time of
    a first visit. Their addresses contain a hash of their contents, so browsers may keep them forever.
    """

    def __init__(self, app: App, page_files: Mapping[str, Path | bytes]) -> None:
        """`page_files` are the page's own texts by address."""
        self.app = app
        gradio_files = ASSETS_FOLDER.iterdir() if ASSETS_FOLDER.is_dir() else ()
        self.files: dict[str, Path | bytes] = {
            ASSETS_ADDRESS + file.name: file for file in gradio_files if file.is_file()
        }
        self.files |= page_files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an ASGI request."""
        path = scope.get("path", "")
        file = self.files.get(path)
        if file is None or scope["type"] != "http" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        accepted = dict(scope["headers"]).get(b"accept-encoding", b"")
        packed = path.endswith(TEXT_SUFFIXES) and b"gzip" in accepted
        body = contents(file, packed)
        headers = [
            (b"content-type", content_type(path).encode()),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"public, max-age=31536000, immutable"),
            (b"vary", b"accept-encoding"),
            *([(b"content-encoding", b"gzip")] if packed else []),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@lru_cache(maxsize=512)
def contents(file: Path | bytes, packed: bool) -> bytes:
    """Return a file or text as sent. It is read once, so that it matches the hash in its address."""
    if packed:
        return gzip.compress(contents(file, False), 6)
    if not isinstance(file, Path):
        return file
    text = file.read_bytes()
    return _STOPWATCH.sub(rb"function \1(){}", text) if file.name.startswith("statustracker-") else text


def content_type(name: str) -> str:
    """Return the content type of a file. For .js Windows looks into its registry, which any program may have
    changed."""
    types = {
        ".js": "text/javascript; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".svg": "image/svg+xml",
        ".woff2": "font/woff2",
    }
    return types.get(Path(name).suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
