"""Access checks: an ASGI layer around the whole page, so that no route can be forgotten.

Three checks, in this order. Is the Host a name of the page (else another site may have pointed its name here: DNS
rebinding)? Is the Origin the page itself (else another site makes the browser send requests: CSRF)? And, when the page
is open to other machines: does the request carry the token, or user and password?
"""

import base64
import binascii
import hashlib
import hmac
import html
import ipaddress
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from starlette.types import Receive, Send

from kohya_gui.server.guessing import Guesses
from library.config.problems import MessageLike

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

LOOPBACK = ("localhost", "127.0.0.1", "::1")
FORWARDED = b"x-forwarded-host"
LOCAL_KEY = "kohya.here"  # in the scope: whether the request comes from a browser on this computer
# Headers that proxies and tunnels add to forwarded requests.
PASSED_ON = (
    "forwarded",
    "via",
    "x-real-ip",
    "x-client-ip",
    "x-cluster-client-ip",
    "x-original-host",
    "cf-ray",
    "x-original-forwarded-for",
    "true-client-ip",
    "fastly-client-ip",
    "cf-connecting-ip",
)
FRAMES = ("iframe", "frame", "object", "embed")
MIN_PASSWORD_LENGTH = 8  # characters of a password for a page that others can reach


def is_loopback(host: str) -> bool:
    """Return whether an address can only be reached from this computer."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_local_request(scope: Scope) -> bool:
    """Return whether a request comes from a browser on this computer, through no proxy and under no other name."""
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    host, origin = headers.get("host", []), headers.get("origin", [])
    passed_on = any(name in PASSED_ON or name.startswith("x-forwarded") for name in headers)
    if passed_on or len(host) != 1 or len(origin) != 1 or not is_loopback(str((scope.get("client") or ("",))[0])):
        return False
    is_same_origin = origin[0].lower() == f"http://{host[0].lower()}" and host_name(host[0]) in LOOPBACK
    return is_same_origin and headers.get("sec-fetch-site", ["same-origin"]) == ["same-origin"]


def new_token() -> str:
    return secrets.token_urlsafe(24)


# Why: docs/decisions/2026-11-22-own-host-check.md
class AuthGate:
    """Let a request through to the page, or refuse it."""

    def __init__(
        self, app: App, host: str, token: str = "", also: Iterable[str] = (), login: str = "", ticket: str = ""
    ) -> None:
        """`host` is the address the page listens at, `token` the secret of visitors ("": none), `also` further
        names of the page, such as that of a proxy; "*.example" stands for all names below it. `login` is user:password,
        which admits a visitor as the token does, and `ticket` does so once."""
        self.app, self.ticket = app, ticket
        # User and password admit a visitor; the token is then only the cookie's value.
        self.token, self.login = token or (new_token() if login else ""), login
        self.also = {name.lower() for name in also}
        self.names = {*LOOPBACK, *self.also, host.strip("[]").lower()}
        # Unlike a name, an address cannot be re-pointed, so with a token any address of this machine is accepted.
        self.any_address = not is_loopback(host)
        if self.any_address:
            self.names.add(socket.gethostname().lower())
        # Cookies are shared by all ports of a host: two pages on one machine must not take each other's.
        self.cookie = f"kohya_{hashlib.sha256(self.token.encode()).hexdigest()[:12]}"
        self.guesses = Guesses()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check an ASGI request, and pass it on."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if reason := self.refusal(scope, headers):
            await respond(scope, send, 403, reason)
        elif self.token and not await self._known(scope, headers, send):
            pass  # already answered by `_known`
        else:
            # A foreign name must not get into the addresses that the page uses.
            headers = [pair for pair in scope["headers"] if pair[0].lower() != FORWARDED or self._is_ours_all(pair[1])]
            await self.app({**scope, "headers": headers, LOCAL_KEY: is_local_request(scope)}, receive, send)

    async def _known(self, scope: Scope, headers: dict[str, str], send: Send) -> bool:
        """Return whether a request may pass. If not, it is answered here, with a delay that grows with wrong
        guesses."""
        address, guess = str((scope.get("client") or ("",))[0]), self._is_guess(scope, headers)
        # A password may be short, so for an address that has guessed wrong, none is compared before the pause.
        if guess and self.guesses.suspect(address) and not await self.guesses.wait(address):
            await respond(scope, send, 429, "Too many wrong guesses: wait a minute.")
            return False
        if self.known(headers):
            self.guesses.right(address)
            return True
        if guess and not self._opens(offered_token(scope), use=False):
            if not self.guesses.suspect(address):
                await self.guesses.wait(address)
            self.guesses.wrong(address)
        elif guess:
            self.guesses.right(address)
        await self._ask(scope, send)
        return False

    def _is_guess(self, scope: Scope, headers: dict[str, str]) -> bool:
        cookie = any(part.strip().startswith(f"{self.cookie}=") for part in headers.get("cookie", "").split(";"))
        return cookie or "authorization" in headers or bool(offered_token(scope))

    def refusal(self, scope: Scope, headers: dict[str, str]) -> str:
        """Return why a request is refused by its Host or Origin, or ""."""
        name = host_name(headers.get("host", ""))
        if not self._is_ours(name) or sum(key.lower() == b"host" for key, _ in scope["headers"]) > 1:
            return (
                f"This page is not known as {name!r}. If that is its name, such as behind a proxy, "
                f"start it with --allowed-host {name}."
            )
        origin = headers.get("origin")
        if origin is not None and not self._same(origin, headers):
            return "This request comes from another web site."
        opening = scope.get("method") in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
        opening = opening and headers.get("sec-fetch-dest") not in FRAMES  # a frame, where clicks could be hijacked
        if headers.get("sec-fetch-site") == "cross-site" and not opening:
            return "This request comes from another web site."
        return ""

    def known(self, headers: dict[str, str]) -> bool:
        """Return whether a request carries the token, in the cookie or as a bearer, or user and password."""
        tokens = [
            part.strip().partition("=")[2]
            for part in headers.get("cookie", "").split(";")
            if part.strip().startswith(f"{self.cookie}=")
        ]
        kind, _, credentials = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            tokens.append(credentials)
        if kind.lower() == "basic" and self.login and secrets_equal(decode_credentials(credentials), self.login):
            return True
        return any(secrets_equal(token, self.token) for token in tokens)

    def _is_ours(self, name: str) -> bool:
        if name in self.names or self._is_allowed(name):
            return True
        try:
            return self.any_address and bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _is_allowed(self, name: str) -> bool:
        return name in self.also or any(
            pattern.startswith("*.") and name.endswith(pattern[1:]) for pattern in self.also
        )

    def _is_ours_all(self, hosts: bytes) -> bool:
        return all(self._is_ours(host_name(host.strip())) for host in hosts.decode("latin-1").split(","))

    def _same(self, origin: str, headers: dict[str, str]) -> bool:
        """Return whether an Origin names this page: its own Host, or an allowed name, since proxies change the Host."""
        if not origin.startswith(("http://", "https://")):
            return False
        sent = origin.partition("://")[2].lower()
        forwarded = headers.get(FORWARDED.decode(), "")  # no web site can send this header
        own_names = [
            headers.get("host", "").lower(),
            *([forwarded.lower()] if self._is_ours(host_name(forwarded)) else []),
        ]
        return sent in own_names or (host_name(sent) not in LOOPBACK and self._is_allowed(host_name(sent)))

    async def _ask(self, scope: Scope, send: Send) -> None:
        """Move the token from the address into a cookie; without a token, show the form for it."""
        challenge = [(b"www-authenticate", b'Basic realm="Kohya Trainer", charset="UTF-8"')] if self.login else []
        missing = "Name or password is missing or wrong: load the page again." if self.login else ""
        if scope["type"] != "http" or scope.get("method") not in ("GET", "HEAD"):
            await respond(scope, send, 401, missing, challenge)
            return
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        offered = query.pop("token", [""])[0]
        if not self._opens(offered):
            ask = None if self.login else FORM
            await respond(scope, send, 401, "Wrong token." if offered and not self.login else missing, challenge, ask)
            return
        left = urlencode(query, doseq=True)
        # Relative, so that it stays on this page, whatever the path and a proxy's prefix are.
        here = quote(scope["path"].replace("\\", "/").rpartition("/")[2])
        where = f"./{here}" + (f"?{left}" if left else "")
        secure = "; Secure" if scope.get("scheme") == "https" else ""
        cookie = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict; Max-Age=2592000{secure}"
        await send_all(send, 303, b"", [(b"location", where.encode()), (b"set-cookie", cookie.encode())])

    def _opens(self, offered: str, use: bool = True) -> bool:
        """Return whether this is the token or the ticket, which is valid only once."""
        if self.ticket and secrets_equal(offered, self.ticket):
            self.ticket = "" if use else self.ticket
            return True
        return secrets_equal(offered, self.token)


def offered_token(scope: Scope) -> str:
    return parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]


def secrets_equal(first: str, second: str) -> bool:
    # Digests have the same length, so the comparison does not reveal the secret's; and any text has one.
    digests = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (first, second)]
    return hmac.compare_digest(*digests)


def decode_credentials(credentials: str) -> str:
    """Return the user:password of a Basic authorization, or ""."""
    try:
        return base64.b64decode(credentials, validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return ""


def host_name(host: str) -> str:
    """Return the name in a Host header, without its port and in lower case; "" if it is invalid."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


FORM = (
    '<form><label>Token <input name="token" type="password" autofocus autocomplete="current-password"></label> '
    "<button>Open</button></form><p>It was printed when the page was started.</p>"
)


async def respond(
    scope: Scope,
    send: Send,
    status: int,
    text: MessageLike,
    headers: Iterable[tuple[bytes, bytes]] = (),
    form: str | None = None,
) -> None:
    """Send a short page, or JSON if the client does not accept HTML; close a websocket."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    wants = dict(scope["headers"]).get(b"accept", b"")
    if b"text/html" not in wants:
        body = json.dumps({"error": str(text) or "The token is missing."}).encode()
        await send_all(send, status, body, [*headers, (b"content-type", b"application/json")])
        return
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<title>Kohya Trainer</title><style>body{font:16px/1.5 system-ui,sans-serif;max-width:32rem;margin:15vh auto;"
        "padding:0 1rem;color-scheme:light dark}input,button{font:inherit;padding:.4rem .6rem}</style>"
        f"<h1>Kohya Trainer</h1><p>{html.escape(str(text))}</p>{form or ''}"
    )
    await send_all(send, status, page.encode(), [*headers, (b"content-type", b"text/html; charset=utf-8")])


async def send_all(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Send a whole response at once."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})
