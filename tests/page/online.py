"""A server of the page that a test's browser visits."""

import contextlib
import threading
import time


@contextlib.contextmanager
def online(app):
    """Serve an application within the context; yields its address."""
    import uvicorn

    from kohya_gui.server.serving import bind

    server_socket = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [server_socket]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server_socket.getsockname()[1]}/"
    server.should_exit = True
    thread.join(timeout=5)
