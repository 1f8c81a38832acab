"""Who may come in: an ASGI layer around the whole page, so that no route can be forgotten.

Three questions, in this order. Is the page asked for under a name of its own (else another site may have pointed its
name here: DNS rebinding)? Does the request come from the page itself (else another site lets the browser press
buttons here)? And, when the page is open to other machines: does the visitor know the token?
"""

import hmac
import html
import ipaddress
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

COOKIE = "kohya_token"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this computer."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_urlsafe(24)


class Door:
    """Let a request through to the page, or answer it at the door."""

    def __init__(self, app: App, host: str, token: str = "", also: Iterable[str] = ()) -> None:
        """`host` is the address the page listens at, `token` what visitors must know ("": nothing), `also` further
        names under which it may be asked for, such as that of a proxy."""
        self.app, self.token = app, token
        self.also = {name.lower() for name in also}
        self.names = {*LOOPBACK, *self.also, host.strip("[]").lower()}
        # An address cannot be re-pointed as a name can, so with a token any address of this machine will do.
        self.any_address = not is_loopback(host)
        if self.any_address:
            self.names.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if reason := self.refusal(scope, headers):
            await answer(scope, send, 403, reason)
        elif self.token and not self.known(headers):
            await self._ask(scope, send)
        else:
            await self.app(scope, receive, send)

    def refusal(self, scope: Scope, headers: dict[str, str]) -> str:
        """Why a request is turned away whoever sent it, or ""."""
        asked = urlsplit(f"//{headers.get('host', '')}")
        if not self._is_ours(asked.hostname or ""):
            return (
                f"This page is not known as {asked.hostname!r}. If that is its name, such as behind a proxy, "
                f"start it with --allowed-host {asked.hostname}."
            )
        origin = headers.get("origin")
        if origin is not None and not self._same(origin, headers.get("host", "")):
            return "This request comes from another web site."
        reading = scope.get("method") in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") == "cross-site" and not reading:
            return "This request comes from another web site."
        return ""

    def known(self, headers: dict[str, str]) -> bool:
        """Whether the visitor shows the token, in the cookie or as a bearer."""
        shown = [part.strip().partition("=")[2] for part in headers.get("cookie", "").split(";")
                 if part.strip().startswith(f"{COOKIE}=")]  # fmt: skip
        shown.append(headers.get("authorization", "").removeprefix("Bearer "))
        return any(self._right(token) for token in shown)

    def _right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())

    def _is_ours(self, name: str) -> bool:
        if name.lower() in self.names:
            return True
        try:
            return self.any_address and bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _same(self, origin: str, host: str) -> bool:
        """Whether an Origin names this page: its own Host, or an allowed name, since proxies change the Host."""
        sent = urlsplit(origin)
        same = sent.netloc.lower() == host.lower() or (sent.hostname or "") in self.also
        return sent.scheme in ("http", "https") and same

    async def _ask(self, scope: Scope, send: Any) -> None:
        """Take the token from the address into a cookie, so that it does not stay in the address; else ask for it."""
        if scope["type"] != "http" or scope.get("method") not in ("GET", "HEAD"):
            await answer(scope, send, 401, "The token is missing.")
            return
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        offered = query.pop("token", [""])[0]
        if not self._right(offered):
            await answer(scope, send, 401, "Wrong token." if offered else "", ask=True)
            return
        left = urlencode(query, doseq=True)
        target = scope["path"] + (f"?{left}" if left else "")
        safe = "/" + target.lstrip("/\\")  # never "//elsewhere"
        cookie = f"{COOKIE}={self.token}; Path=/; HttpOnly; SameSite=Strict; Max-Age=2592000"
        await _send(
            send, 303, b"", [(b"location", safe.encode("latin-1", "replace")), (b"set-cookie", cookie.encode())]
        )


async def answer(scope: Scope, send: Any, status: int, text: str, ask: bool = False) -> None:
    """A short page, or JSON for what is no page view; a socket is closed."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    wants = dict(scope["headers"]).get(b"accept", b"")
    if b"text/html" not in wants:
        body = json.dumps({"error": text or "The token is missing."}).encode()
        await _send(send, status, body, [(b"content-type", b"application/json")])
        return
    form = (
        '<form><label>Token <input name="token" type="password" autofocus autocomplete="current-password"></label> '
        "<button>Open</button></form><p>It was printed when the page was started.</p>"
    )
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<title>Kohya Trainer</title><style>body{font:16px/1.5 system-ui,sans-serif;max-width:32rem;margin:15vh auto;"
        "padding:0 1rem;color-scheme:light dark}input,button{font:inherit;padding:.4rem .6rem}</style>"
        f"<h1>Kohya Trainer</h1><p>{html.escape(text)}</p>{form if ask else ''}"
    )
    await _send(send, status, page.encode(), [(b"content-type", b"text/html; charset=utf-8")])


async def _send(send: Any, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})
