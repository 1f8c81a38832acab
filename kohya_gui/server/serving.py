"""Command line options of the page, its address and secrets, and the server."""

import argparse
import contextlib
import errno
import getpass
import logging
import os
import re
import socket
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kohya_gui.server.auth import MIN_PASSWORD_LENGTH, host_name, is_loopback, new_token
from kohya_gui.server.guessing import MIN_TOKEN_BITS, bits
from library.config.arguments import Arguments
from library.config.json_types import JsonObject
from library.config.problems import ConfigError

FIRST_PORT, TRIED = 7860, 20
SHUTDOWN_TIMEOUT = 2.0  # seconds for unfinished answers when the page ends
HEADER_TIMEOUT = 20.0  # seconds for the headers of a request
IN_USE, NOT_HERE = "in use", "this is not an address of this computer; 127.0.0.1 is, and 0.0.0.0 means all that it has"
WINDOWS_IN_USE = 10048  # EADDRINUSE on Windows
HOST_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?|[0-9a-f:.]*:[0-9a-f:.]*")
PATH_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~%!$&'()*+,;=:@-]+")
# Options of kohya_ss's page that do not exist here, each with what to do instead.
REFUSED = {
    "--share": "there is no public link: use ssh -L, or a proxy with TLS (docs/remote.md)",
    "--password": "others can read the command line: set KOHYA_PASSWORD, or type it when prompted",
}


class _Refusing(argparse.Action):
    """An option of another program, refused with a reason."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        name = self.option_strings[0]
        parser.error(f"{name}: {REFUSED[name]}")


def build_server_parser() -> argparse.ArgumentParser:
    """Return the options of the page's command."""
    parser = Arguments(prog="kohya gui", description="Open the page in your browser.")
    parser.add_argument(
        "--host",
        "--listen",
        default="127.0.0.1",
        help="address to listen at; if other computers can reach it, visitors need a token",
    )
    parser.add_argument(
        "--port",
        "--server_port",
        type=int,
        default=0,
        help=f"port (default: the first free one from {FIRST_PORT} on)",
    )
    parser.add_argument(
        "--root",
        action="append",
        default=[],
        metavar="FOLDER",
        help="additional folder for files, besides your home and the current folder",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="file with the token, created if missing (default: KOHYA_TOKEN, or a new token)",
    )
    parser.add_argument(
        "--user",
        "--username",
        metavar="NAME",
        help="require this name and a password (KOHYA_PASSWORD, or typed) instead of a token",
    )
    parser.add_argument(
        "--allowed-host",
        type=allowed_host,
        action="append",
        default=[],
        metavar="NAME",
        help="additional host name of the page, such as a proxy's; *.example means all below",
    )
    parser.add_argument(
        "--root_path",
        type=proxy_path,
        default="",
        metavar="PATH",
        help="path, or whole address, under which a proxy shows the page",
    )
    parser.add_argument("--no-browser", "--headless", action="store_true", help="do not open the browser")
    for name in ("--inbrowser", "--do_not_share"):  # passed by kohya_ss's start scripts, and the default here
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    for name in REFUSED:
        parser.add_argument(name, nargs="?", action=_Refusing, help=argparse.SUPPRESS)
    return parser


def allowed_host(text: str) -> str:
    """Return the host name in an address as a browser shows it, without scheme and port; `*.` may stand before it.

    Raises ArgumentTypeError, with a sentence, for anything else.
    """
    address = text.strip().partition("://")[2] or text.strip()
    address = address.removesuffix("/")
    with contextlib.suppress(UnicodeError):
        name = host_name(f"[{address}]" if address.count(":") > 1 and "[" not in address else address)
        name = name.encode("idna").decode("ascii")  # as browsers send it
        if "/" not in address and HOST_NAME.fullmatch(name):
            return name
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a host name: write it as the browser shows it, such as train.example or *.train.example, "
        "and a path as --root_path"
    )


def proxy_path(text: str) -> str:
    """Return the path or address under which a proxy shows the page. Raises ArgumentTypeError, with a sentence, for
    what no address can hold."""
    address = text.strip()
    with contextlib.suppress(ValueError):
        parts = urlsplit(address) if "://" in address else urlsplit(f"http://proxy/{address}")
        names = [name for name in parts.path.split("/") if name]
        has_more = parts.query or parts.fragment or any(map(str.isspace, address))  # urlsplit leaves out line ends
        if parts.hostname and not has_more and all(PATH_NAME.fullmatch(name) for name in names):
            return address
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a path of an address: write it as /trainer or https://train.example/trainer"
    )


def root_prefix(root_path: str) -> str:
    path = urlsplit(root_path).path if "://" in root_path else root_path
    return f"/{path.strip('/')}" if path.strip("/") else ""


def access_of(arguments: argparse.Namespace) -> JsonObject:
    """Return the arguments of AuthGate. Raises ConfigError for an unusable secret."""
    names = [
        *arguments.allowed_host,
        *filter(None, [urlsplit(arguments.root_path).hostname if "://" in arguments.root_path else ""]),
    ]
    access: JsonObject = {"host": arguments.host, "also": names, "token": os.environ.get("KOHYA_TOKEN", "")}
    if arguments.token_file:
        access["token"] = token_in(Path(os.path.expanduser(arguments.token_file)))
    if arguments.user:
        access["login"] = f"{arguments.user}:{password()}"
    elif not access["token"] and not is_loopback(arguments.host):
        access["token"] = new_token()
    if access["token"] and bits(access["token"]) < MIN_TOKEN_BITS:
        raise ConfigError(
            "the token must have {bits} bits, as {count} letters and digits drawn at random have: "
            "leave it out, and one is made",
            bits=MIN_TOKEN_BITS,
            count=22,
        )
    if access["token"] or arguments.user:
        access["ticket"] = new_token()
    return access


def is_private(access: JsonObject, root_path: str) -> bool:
    # No other address, no other name, no token or password.
    return is_loopback(access["host"]) and not (access["token"] or access.get("login") or access["also"] or root_path)


def token_in(path: Path) -> str:
    """Return the token in a file; if there is no such file, a new one is written, readable by this user only."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(f"{new_token()}\n")
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError("--token-file: {path} cannot be used ({error})", path=path, error=error) from None


def password() -> str:
    """Return the password from KOHYA_PASSWORD, or typed at the terminal; never from the command line, which everyone
    can read."""
    secret = os.environ.get("KOHYA_PASSWORD", "")
    if not secret and sys.stdin is not None and sys.stdin.isatty():
        secret = getpass.getpass("Password for the page: ")
    if len(secret) < MIN_PASSWORD_LENGTH:
        raise ConfigError(
            "--user needs a password of {count} characters or more, in KOHYA_PASSWORD", count=MIN_PASSWORD_LENGTH
        )
    return secret


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. It stays open until the server uses it, so that no other program takes the port.

    Raises OSError, with a sentence, if the address or the port is not available.
    """
    why = ""
    for candidate in [port] if port else range(FIRST_PORT, FIRST_PORT + TRIED):
        server_socket, why = _bind_socket(host, candidate)
        if server_socket:
            return server_socket
    if why == IN_USE and port:
        free = _free_port(host, port)
        other = f"take another one, such as --port {free}, which is free" if free else "take another one with --port"
        raise OSError(f"port {port} is in use by another program, or by this page already; {other}")
    if why == IN_USE:
        raise OSError(f"the ports {FIRST_PORT} to {FIRST_PORT + TRIED - 1} are all in use; name another with --port")
    raise OSError(f"--port {port}: {why}" if port and why != NOT_HERE else f"--host {host}: {why}")


def _bind_socket(host: str, port: int) -> tuple[socket.socket | None, str]:
    """Return a listening socket, or the error."""
    # asyncio only disables Nagle's algorithm for sockets created with IPPROTO_TCP. Otherwise the second half of each
    # response waits 40 ms for the browser to acknowledge the first, which has the headers.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server_socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if os.name != "nt":  # on Windows this would share a port in use
        server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server_socket.bind((host.strip("[]"), port))
        server_socket.listen()
        return server_socket, ""
    except OverflowError:
        why = "a port is a number from 1 to 65535"
    except PermissionError:
        why = "this computer reserves this port; use one from 1024 on, such as 7860"
    except OSError as error:
        why = IN_USE if error.errno in (errno.EADDRINUSE, WINDOWS_IN_USE) else NOT_HERE
    server_socket.close()
    return None, why


def _free_port(host: str, after: int) -> int:
    """Return the next free port; 0 if none of the following ones is free."""
    for port in range(after + 1, min(after + 1 + TRIED, 65536)):
        server_socket, _ = _bind_socket(host, port)
        if server_socket:
            server_socket.close()
            return port
    return 0


def announce(arguments: argparse.Namespace, port: int, access: JsonObject) -> None:
    """Print the page's address, and open it in a browser if there is a screen."""
    token = "" if arguments.user else access["token"]
    print(f"Kohya Trainer is at {url(arguments.host, port, token)}  (Ctrl+C ends it; trainings continue)", flush=True)
    if arguments.user:
        print(f"It asks for the password of {arguments.user}.", flush=True)
    if "SSH_CONNECTION" in os.environ and is_loopback(arguments.host):
        machine = os.environ["SSH_CONNECTION"].split()[2:3] or ["this-machine"]
        print(
            f"From your own computer: ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{machine[0]}, "
            f"then open http://localhost:{port}/",
            flush=True,
        )
    elif not arguments.no_browser and has_screen():
        # Other users can read the browser's command line, so its ticket works only once. The delay lets the server
        # start before the browser requests the page.
        threading.Timer(0.5, _open, [url(arguments.host, port, access.get("ticket", ""))]).start()


def has_screen() -> bool:
    """Return whether a browser window can be opened: over SSH and on servers a browser would take over the terminal."""
    if sys.platform in ("win32", "darwin"):
        return "SSH_CONNECTION" not in os.environ
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


class PatientProtocol(H11Protocol):
    """Close a connection if the headers of a request do not arrive in time: otherwise one client could use up all
    connections."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Stop the timer when the headers are complete."""
        super().data_received(data)
        if self.cycle is not self.answered:
            self.limit.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self.limit.cancel()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self.answered = self.cycle
        self.limit = self.loop.call_later(HEADER_TIMEOUT, self._close)

    def _close(self) -> None:
        if self.transport.get_protocol() is self and not self.transport.is_closing():
            self.transport.close()


class QuietServer(uvicorn.Server):
    """A uvicorn server that shuts down without an error for each connected browser, and ends the process if it owns
    it."""

    is_process = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the remaining connections."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)
        # Threads cannot be interrupted, and the process would wait for each that still computes an answer. Nobody
        # receives that answer any more, and files are written completely or not at all.
        if self.is_process:
            last = threading.Timer(SHUTDOWN_TIMEOUT, os._exit, (0,))
            last.daemon = True
            last.start()


def serve(app: Any, server_socket: socket.socket) -> None:
    """Serve requests until the process is stopped."""
    config = uvicorn.Config(
        app, http=PatientProtocol, log_level="warning", server_header=False, timeout_graceful_shutdown=1
    )
    server = QuietServer(config)
    server.is_process = True
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[server_socket])


def url(host: str, port: int, token: str) -> str:
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def _open(address: str) -> None:
    with contextlib.suppress(Exception):  # a server without a screen has no browser
        webbrowser.open(address)
