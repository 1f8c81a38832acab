"""Allow only those of Gradio's routes that the page needs, and send security headers.

Gradio comes with some eighty routes: a proxy, a code editor, run histories, links that store what is on screen when
they are read. The page needs a dozen; what is not listed here does not exist.
"""

import re
from typing import Any

from starlette.types import Receive, Send

from kohya_gui.server.auth import App, Scope, respond

API = "/gradio_api/"
ROUTES_TO_READ = re.compile(r"(info|theme\.css|startup-events|app_id|heartbeat/\w+|queue/data|file=(?!\w\w+:).+)/?")
ROUTES_TO_END = re.compile(r"(run/\w+|queue/join|cancel|reset|component_server)/?")
NEVER = re.compile(r"/(monitoring|login|logout|pwa_icon)(/.*)?")

# Nothing from elsewhere is loaded, nothing is sent elsewhere, and no other site may show the page in a frame.
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
        """ASGI."""

        async def protected(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = list(message.get("headers", ()))
                own = {name.lower() for name, _ in given}
                message = {**message, "headers": [*given, *(pair for pair in HEADERS if pair[0] not in own)]}
            await send(message)

        await self.app(scope, receive, protected)


class Routes:
    """Respond with 404 to all routes that the page does not need."""

    def __init__(self, app: App, prefix: str = "") -> None:
        """`prefix` is the path under which a proxy shows the page; a proxy may leave it in the path or cut it off."""
        self.app, self.prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
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
    """Whether a browser navigates to this address, and does not load a part of the page."""
    wants = dict(scope["headers"]).get(b"accept", b"")
    return b"text/html" in wants and not path.startswith((API, "/own/", "/tensorboard/"))


def explained(scope: Scope, send: Send) -> Send:
    """A `send` that replaces 404 by how to start the page: most often a proxy serves it under a path that it was not
    started with."""
    missing = False

    async def tell(message: Any) -> None:
        nonlocal missing
        if message["type"] == "http.response.start" and message["status"] == 404:
            missing, path = True, scope["path"].rstrip("/")
            said = f"There is nothing at {path}. If a proxy shows the page there, start it with --root_path {path}."
            await respond(scope, send, 404, said)
        elif not missing:
            await send(message)

    return tell


def is_open(method: str, path: str) -> bool:
    """Whether the page needs this route. Gradio reads with GET and acts with POST; other methods are refused."""
    if NEVER.fullmatch(path):
        return False
    if not path.startswith(API):
        return method in ("GET", "HEAD", "POST")
    asked = path.removeprefix(API)
    if method in ("GET", "HEAD"):
        return ROUTES_TO_READ.fullmatch(asked) is not None
    return method == "POST" and ROUTES_TO_END.fullmatch(asked) is not None
