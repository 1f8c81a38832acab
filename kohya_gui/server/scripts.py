"""The page's own script, which the head of the page's HTML names."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kohya_gui.gradio_host.assets import App, Scope
from kohya_gui.server.bundle import bundle_modules
from library.config.json_types import JsonObject

PAGE_FOLDER = Path(__file__).parents[1]


def _addressed() -> tuple[str, bytes]:
    script = bundle_modules(PAGE_FOLDER, "main.js").encode()
    return f"/scripts/{hashlib.sha256(script).hexdigest()[:16]}/main.js", script


ADDRESS, SCRIPT = _addressed()
SCRIPT_FILES = {ADDRESS: SCRIPT}

# Relative, so that it works below a proxy's path. The preload comes before everything that Gradio needs.
TAGS = f'<link rel="modulepreload" href=".{ADDRESS}"><script type="module" src=".{ADDRESS}"></script>'


# Why: docs/decisions/2026-11-22-scripts-are-modules.md
class ScriptTags:
    """Name the script in the page's HTML.

    Gradio's own `head` is only inserted long after its script has started. Modules run in the order of the HTML, and
    Gradio calls functions of main.js: so our tags come first.
    """

    def __init__(self, app: App, also: str = "", last: str = "", now: Callable[[], str] = str) -> None:
        # `also` follows the script in the head, and `last` ends it: of two style sheets, the later one wins.
        # `now` returns what to add there in each response.
        self.app, self.tags, self.last, self.now = app, (TAGS + also).encode(), last.encode(), now

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
            if message["type"] != "http.response.body":  # extra messages for Starlette's test client
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                whole = body.replace(b"<head>", b"<head>" + self.tags, 1)
                whole = whole.replace(b"</head>", self.last + self.now().encode() + b"</head>", 1)
                headers = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
                await send({**start, "headers": [*headers, (b"content-length", str(len(whole)).encode())]})
                await send({"type": "http.response.body", "body": whole})

        await self.app(scope, receive, put_in)
