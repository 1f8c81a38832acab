"""A stand-in for the Hugging Face Hub on loopback: what it says of repositories, their files, and faults on demand."""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class StandInHub:
    """Repositories with their files; what a test changes counts from the next request on."""

    address: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: dict[str, str] = field(default_factory=dict)  # repository -> the token that may read it
    told: dict[str, str] = field(default_factory=dict)  # path -> a SHA-256 that is not the file's
    redirects: dict[str, str] = field(default_factory=dict)  # path -> where its bytes are said to be
    cut: dict[str, int] = field(default_factory=dict)  # path -> bytes after which the connection ends, each time
    slow: threading.Event | None = None  # bytes behind the first block wait for it
    requests: list[tuple[str, str]] = field(default_factory=list)  # path and Range of each request for a file
    tokens: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    """Answers as huggingface.co does, as far as downloads ask."""

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
            said = {
                "id": name,
                "sha": COMMIT,
                "gated": "auto" if name in self.hub.gated else False,
                "siblings": siblings,
            }
            self.answer(200, json.dumps(said).encode(), {"Content-Type": "application/json"})

    def may(self, name):
        return name not in self.hub.gated or self.headers.get("authorization") == f"Bearer {self.hub.gated[name]}"

    def bytes_of(self, name, path):
        asked = self.headers.get("Range", "")
        self.hub.requests.append((path, asked))
        if not self.may(name):
            self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
            return
        if path in self.hub.redirects:
            self.answer(302, b"", {"Location": self.hub.redirects[path]})
            return
        content = self.hub.repositories[name][path]
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if asked:
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
    """A hub that listens: it, and what ends it."""
    hub = StandInHub()
    handler = type("Handler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return hub, lambda: (server.shutdown(), server.server_close())
