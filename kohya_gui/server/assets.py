"""Gradio's scripts and styles, straight from memory: sixty small files that every visit asks for."""

import gzip
import mimetypes
from collections.abc import Awaitable, Callable, MutableMapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import gradio

FOLDER = Path(gradio.__file__).parent / "templates" / "frontend" / "assets"
PREFIX = "/assets/"
TEXT = (".js", ".css", ".svg", ".json")

Scope = MutableMapping[str, Any]


class Assets:
    """Answer for these files before Gradio does.

    Gradio reads and compresses each one anew for every visitor, one after the other, which is a third of the time that
    a first look at the page takes. Their names contain a hash of what is in them, so a browser may keep them for good.
    """

    def __init__(self, app: Callable[[Scope, Any, Any], Awaitable[None]]) -> None:
        self.app = app
        self.names = {file.name for file in FOLDER.iterdir() if file.is_file()} if FOLDER.is_dir() else set()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """ASGI."""
        path = scope.get("path", "")
        name = path.removeprefix(PREFIX)
        asked = scope["type"] == "http" and scope["method"] == "GET" and path == PREFIX + name
        if not asked or name not in self.names:
            await self.app(scope, receive, send)
            return
        accepted = dict(scope["headers"]).get(b"accept-encoding", b"")
        packed = name.endswith(TEXT) and b"gzip" in accepted
        body = contents(name, packed)
        headers = [
            (b"content-type", kind(name).encode()),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"public, max-age=31536000, immutable"),
            (b"vary", b"accept-encoding"),
            *([(b"content-encoding", b"gzip")] if packed else []),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@lru_cache(maxsize=512)
def contents(name: str, packed: bool) -> bytes:
    """One file, as it goes over the wire."""
    data = (FOLDER / name).read_bytes()
    return gzip.compress(data, 6) if packed else data


def kind(name: str) -> str:
    """The content type of a file. For .js Windows asks its registry, which any program may have changed."""
    own = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
    return own.get(Path(name).suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
