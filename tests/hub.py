"""A stand-in for the Hugging Face Hub on loopback: facts of repositories, their files, and faults on demand."""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class StandInHub:
    """Repositories with their files; a test's changes take effect with the next request."""

    address: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: dict[str, str] = field(default_factory=dict)  # repository -> the token that may read it
    told: dict[str, str] = field(default_factory=dict)  # path -> a wrong SHA-256 to report
    redirects: dict[str, str] = field(default_factory=dict)  # path -> the address to which its requests are sent on
    cut: dict[str, int] = field(default_factory=dict)  # path -> number of bytes after which each connection is cut
    slow: threading.Event | None = None  # what follows the first block is sent once this is set
    requests: list[tuple[str, str]] = field(default_factory=list)  # path and Range of each request for a file
    tokens: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of downloads as huggingface.co does."""

    protocol_version = "HTTP/1.1"
    hub: StandInHub

    def log_message(self, *_):
        """Nothing is logged."""

    def do_GET(self):
        """Facts of a repository, whether it may be read, or bytes of a file."""
        parts = urlsplit(self.path).path.strip("/").split("/")
        self.hub.tokens.append(self.headers.get("authorization", ""))
        if parts[:2] == ["api", "models"]:
            self.facts("/".join(parts[2:4]), parts[4:])
        elif parts[2:3] == ["resolve"]:
            self.bytes_of("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self.answer(404, b"")

    def facts(self, name, more):
        files = self.hub.repositories.get(name)
        if files is None:
            self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif more == ["auth-check"]:
            self.answer(*((200, b"{}") if self.may(name) else (403, b"{}", {"X-Error-Code": "GatedRepo"})))
        else:
            siblings = [
                {
                    "rfilename": path,
                    "size": len(content),
                    "blobId": "0" * 40,
                    "lfs": {
                        "sha256": self.hub.told.get(path) or hashlib.sha256(content).hexdigest(),
                        "size": len(content),
                        "pointerSize": 130,
                    },
                }
                for path, content in files.items()
            ]
            facts = {
                "id": name,
                "sha": COMMIT,
                "gated": "auto" if name in self.hub.gated else False,
                "siblings": siblings,
            }
            self.answer(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})

    def may(self, name):
        return name not in self.hub.gated or self.headers.get("authorization") == f"Bearer {self.hub.gated[name]}"

    def bytes_of(self, name, path):
        byte_range = self.headers.get("Range", "")
        self.hub.requests.append((path, byte_range))
        if not self.may(name):
            self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
            return
        if path in self.hub.redirects:
            self.answer(302, b"", {"Location": self.hub.redirects[path]})
            return
        content = self.hub.repositories[name][path]
        start = int(byte_range.removeprefix("bytes=").rstrip("-")) if byte_range else 0
        self.send_response(206 if byte_range else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if byte_range:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        end = min(len(content), self.hub.cut.get(path, len(content)))
        first = min(end, start + 1000)
        self.wfile.write(content[start:first])
        self.wfile.flush()
        if self.hub.slow:
            self.hub.slow.wait(20)
        self.wfile.write(content[first:end])
        self.close_connection = True

    def answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def serve():
    """Start a hub; returns it and a function that stops it."""
    hub = StandInHub()
    handler = type("Handler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return hub, lambda: (server.shutdown(), server.server_close())
