"""Allow only those of Gradio's routes that the page needs, and send security headers.

Gradio has some eighty routes: a proxy, a code editor, run histories, links that store what is on screen when they are
read. The page uses its components and none of its events, so nothing below /gradio_api/ is open.
"""

import re
from typing import Any

from starlette.types import Receive, Send

from kohya_gui.server.auth import App, Scope, respond

# Why: docs/decisions/2026-11-27-gradio-is-the-host.md
API = "/gradio_api/"
NEVER = re.compile(r"/(monitoring|login|logout|pwa_icon)(/.*)?")

# The page loads nothing from other sites, sends nothing to them, and may not be shown in their frames.
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "media-src 'self' data: blob:",
        "connect-src 'self' data: blob:",
        "worker-src 'self' blob:",
        "frame-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'self'",
    )
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"SAMEORIGIN"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


class Protected:
    """Send every response with security headers."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an ASGI request, or pass it on."""

        async def protected(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                header_names = {name.lower() for name, _ in headers}
                message = {**message, "headers": [*headers, *(pair for pair in HEADERS if pair[0] not in header_names)]}
            await send(message)

        await self.app(scope, receive, protected)


class Routes:
    """Respond with 404 to all routes that the page does not need."""

    def __init__(self, app: App, prefix: str = "") -> None:
        # A proxy that shows the page under `prefix` may leave it in the path or cut it off.
        self.app, self.prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an ASGI request, or pass it on."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        if self.prefix and (path == self.prefix or path.startswith(f"{self.prefix}/")):
            path = path.removeprefix(self.prefix) or "/"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        if scope["type"] == "http" and is_open(scope["method"], path):
            await self.app(scope, receive, explained(scope, send) if is_visited(scope, path) else send)
        else:
            await respond(scope, send, 404, "There is nothing here.")


def is_visited(scope: Scope, path: str) -> bool:
    wants = dict(scope["headers"]).get(b"accept", b"")
    return b"text/html" in wants and not path.startswith((API, "/own/", "/api/", "/tensorboard/"))


def explained(scope: Scope, send: Send) -> Send:
    """Return a `send` that replaces 404 by advice for starting the page: usually a proxy serves it under a path that it
    was not started with."""
    missing = False

    async def tell(message: Any) -> None:
        nonlocal missing
        if message["type"] == "http.response.start" and message["status"] == 404:
            missing, path = True, scope["path"].rstrip("/")
            explanation = (
                f"There is nothing at {path}. If a proxy shows the page there, start it with --root_path {path}."
            )
            await respond(scope, send, 404, explanation)
        elif not missing:
            await send(message)

    return tell


def is_open(method: str, path: str) -> bool:
    # The page reads with GET and acts with POST; all other methods are refused.
    return method in ("GET", "HEAD", "POST") and not path.startswith(API) and not NEVER.fullmatch(path)
