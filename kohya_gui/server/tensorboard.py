"""TensorBoard as a process of the page: on loopback, refusing requests without the page's secret.

A port on loopback is open to every program and, by a name that points to it, to web sites; so only the page knows the
secret. The process watches the page's end of the pipe, and ends with the page.
"""

import hmac
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from library.config.json_types import JsonObject

HEADER = "HTTP_X_KOHYA_SECRET"


def main() -> None:
    """Serve until standard input ends. Its first line is JSON: secret, prefix, and the folders of curves."""
    settings = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_page, daemon=True).start()
    from tensorboard import program

    class GuardedServer(program.WerkzeugServer):
        def __init__(self, app: Any, flags: Any) -> None:
            super().__init__(guarded(app, settings["secret"]), flags)

    board = program.TensorBoard(server_class=GuardedServer)
    board.configure(
        host="127.0.0.1",
        port=0,
        path_prefix=settings["prefix"],
        logdir_spec=settings["folders"],
        reload_interval=5.0,
        load_fast="false",
        window_title="Curves",
    )
    address = board.launch()
    print(json.dumps({"address": address}), flush=True)
    threading.Event().wait()


def guarded(app: Callable[..., Iterable[bytes]], secret: str) -> Callable[..., Iterable[bytes]]:
    """Return a WSGI application that refuses requests without the secret."""

    def answer(environ: JsonObject, start: Callable[..., Any]) -> Iterable[bytes]:
        if hmac.compare_digest(environ.get(HEADER, "").encode("latin-1"), secret.encode()):
            return app(environ, start)
        start("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"Open TensorBoard from the page."]

    return answer


def _end_with_the_page() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
