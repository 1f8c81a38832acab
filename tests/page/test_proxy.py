"""The page behind a reverse proxy, under a path, with user and password, and TensorBoard behind the same checks."""

import time

import pytest

from benchmarks.online import online
from tests.page.conftest import Visit

pytestmark = pytest.mark.browser
NAME, PASSWORD = "anna", "long enough"


class Proxy:
    """What nginx does with `location /trainer/ { proxy_pass http://127.0.0.1:7860/; }`: the path is cut, the Host is
    another, and the scheme and name that the browser sees go into headers."""

    def __init__(self, app):
        self.app, self.cut = app, True

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if not scope["path"].startswith("/trainer"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"another program of this server, or its icon"})
            return
        host = dict(scope["headers"])[b"host"]
        other_headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
        headers = [*other_headers, (b"host", b"train.internal:7860"), (b"x-forwarded-host", host)]
        path = scope["path"].removeprefix("/trainer") if self.cut else scope["path"]
        await self.app({**scope, "headers": headers, "path": path, "raw_path": path.encode()}, receive, send)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    """The page behind a proxy, started for the name that the proxy gives it."""
    from kohya_gui.app import application, build_page

    door = {"host": "0.0.0.0", "also": ["train.internal", "127.0.0.1"], "login": f"{NAME}:{PASSWORD}"}
    behind_proxy = Proxy(application(build_page([tmp_path_factory.mktemp("root")]), door, "/trainer"))
    with online(behind_proxy) as address:
        behind_proxy.address = f"{address}trainer/"
        yield behind_proxy
    board(behind_proxy).stop()


def board(proxy):
    return proxy.app.app.app.app.app.server  # Protected, AuthGate, Routes, ApiV1, TensorboardProxy


@pytest.fixture
def visitor(chromium, proxy, monkeypatch, tmp_path, stand_ins):  # `stand_ins` spares a process that loads torch
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    visit = Visit(chromium, proxy.address, http_credentials={"username": NAME, "password": PASSWORD})
    yield visit
    visit.context.close()
    assert visit.complaints == []
    fonts = proxy.address.replace("trainer/", "font-roboto/")  # TensorBoard requests its fonts at the root
    assert [url for url in visit.requests if not url.startswith((proxy.address, fonts, "data:", "blob:"))] == []


@pytest.mark.parametrize("cut", [True, False], ids=["path cut", "path kept"])
def test_under_a_path_of_a_proxy_everything_works(visitor, proxy, cut):
    proxy.cut = cut
    visitor.open()
    visitor.click("Train")  # a request to the server and its answer
    visitor.until("problems to fix")
    visitor.tab("Finetune")
    visitor.family("FLUX.1")
    visitor.click("More")
    with visitor.page.expect_download():
        visitor.click("Download")


def test_tensorboard_is_started_on_demand_behind_the_door(visitor, tmp_path, proxy):
    import httpx
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    from library.runs.record import Record

    curves = f"{visitor.address}tensorboard/"
    visitor.page.goto(curves)
    assert "No training has written curves" in visitor.page.content()
    writer = EventFileWriter(str(tmp_path / "logs" / "cat" / "network_train"))  # torch's own writer would load torch
    for step in range(5):
        point = Summary.Value(tag="loss/average", simple_value=1 / (1 + step))
        writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[point])))
    writer.close()
    config = {"log": {"logging_dir": str(tmp_path / "logs")}}
    with Record.start(config, "sdxl_train_network", tmp_path / "out", "cat", "SDXL LoRA"):
        pass
    visitor.page.goto(curves.rstrip("/"))
    assert str(tmp_path / "logs") in visitor.page.content()
    assert httpx.get(curves + "data/runs", auth=(NAME, PASSWORD)).status_code == 404  # opening the page starts nothing
    visitor.page.get_by_role("button", name="Start TensorBoard").click()
    visitor.page.get_by_text("loss/average").first.wait_for()

    assert httpx.get(curves + "data/runs", auth=(NAME, PASSWORD)).json() == ["cat/network_train"]
    assert httpx.get(curves + "data/runs").status_code == 401
    assert httpx.post(curves + "start").status_code == 401
    inner = board(proxy).address
    fonts = "/font-roboto/oMMgfZMQthOryQo9n22dcuvvDin1pK8aKteLpeZ5c0A.woff2"
    assert httpx.get(f"{visitor.address.rstrip('/')}{fonts}", auth=(NAME, PASSWORD)).content[:4] == b"wOF2"
    assert inner.startswith("http://127.0.0.1:")
    assert httpx.get(inner + "/tensorboard/data/runs").status_code == 403
