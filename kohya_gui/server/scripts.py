"""The page's own scripts: modules that the browser loads by their addresses, named in the head of the page's HTML."""

import hashlib
from pathlib import Path
from typing import Any

from kohya_gui.server.assets import App, Scope, contents
from library.config.json_types import JsonObject

PAGE = Path(__file__).parents[1]


def _addressed() -> tuple[str, dict[str, Path]]:
    """The folder of the modules' addresses, and each one's address. They import each other by relative paths, so one
    hash of all of them stands in front."""
    files = {file.relative_to(PAGE).as_posix(): file for file in sorted(PAGE.rglob("*.js"))}
    state = hashlib.sha256(b"".join(name.encode() + contents(file, False) for name, file in files.items()))
    folder = f"/scripts/{state.hexdigest()[:16]}/"
    return folder, {folder + name: file for name, file in files.items()}


ADDRESS, FILES = _addressed()

# Relative, so that they hold below any path of a proxy. All modules are named, so that the browser asks for them at
# once, and not for one after it has read the other.
TAGS = "".join(f'<link rel="modulepreload" href=".{address}">' for address in FILES)
TAGS += f'<script type="module" src=".{ADDRESS}main.js"></script>'


# Why: docs/decisions/2026-11-22-scripts-are-modules.md
class ScriptTags:
    """Name the scripts in the page's HTML.

    What is given to Gradio for the head only comes there long after Gradio's own script has begun. Modules run in the
    order of the HTML, and Gradio calls what main.js provides: so they stand in front.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] != "/":
            await self.app(scope, receive, send)
            return
        start: JsonObject = {}
        body = b""

        async def put_in(message: Any) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = message
                return
            if message["type"] != "http.response.body":  # what Starlette tells its test client besides
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                whole = body.replace(b"<head>", b"<head>" + TAGS.encode(), 1)
                headers = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
                await send({**start, "headers": [*headers, (b"content-length", str(len(whole)).encode())]})
                await send({"type": "http.response.body", "body": whole})

        await self.app(scope, receive, put_in)
