"""The webhook: what it is told and when, what it is not told, and that it harms no run."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from library.config.problems import ConfigError
from library.runs import bundle, keys, layout, reader, registry, watching, webhook
from library.runs.record import Record


class Listener(BaseHTTPRequestHandler):
    def do_POST(self):  # noqa: N802 - of the standard library
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((self.path, json.loads(body)))
        self.send_response(302 if self.path == "/elsewhere" else 204)
        if self.path == "/elsewhere":
            self.send_header("Location", "/moved")
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def listener(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    server = HTTPServer(("127.0.0.1", 0), Listener)
    server.got = []
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_an_end_is_reported_once_without_paths_and_the_address_is_in_no_record(listener, tmp_path):
    address = f"http://127.0.0.1:{listener.server_port}/key-of-mine"
    webhook.store_address(f" {address} ")
    with pytest.raises(RuntimeError), Record.start({}, "flux_train_network", tmp_path, "cat") as record:
        record.plan(10)
        record.step({"step": 3, "loss": 0.5, "avr_loss": 0.25})
        raise RuntimeError("cannot read /home/me/pictures/secret.png")
    webhook.tell_end(record.folder, reader.run_at(record.folder).facts)  # as the queue does, too
    ((path, told),) = listener.got
    assert path == "/key-of-mine" and told["event"] == "failed" and told["name"] == "cat"
    assert (told["steps_done"], told["steps_total"], told["loss"]) == (3, 10, 0.25)
    assert told["error"] == "RuntimeError: cannot read <path>" and "secret" not in json.dumps(told)
    (record.folder / "log.txt").write_text(f"told {address}\n")
    for file in record.folder.iterdir():
        assert "key-of-mine" not in file.read_text() or file.name == "log.txt"
    assert b"key-of-mine" not in bundle.bundle_run(reader.run_at(record.folder))
    assert keys.webhook_file().stat().st_mode & 0o077 == 0 or registry.os.name == "nt"


def test_a_clock_that_was_set_back_gives_no_time():
    facts = {"state": "finished", "output_name": "cat", "started": 100.0}
    assert webhook.end_of_run({**facts, "ended": 102.5})["seconds"] == 2.5
    assert webhook.end_of_run({**facts, "ended": 40.0})["seconds"] is None


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_no_number_is_sent_as_json_has_it(loss):
    facts = {"state": "failed", "output_name": "cat", "latest": {"avr_loss": loss}, "started": 1.0, "ended": loss}
    event = webhook.end_of_run(facts)
    assert event["loss"] is None and event["seconds"] is None and json.dumps(event, allow_nan=False)


def test_a_killed_run_is_reported_once_by_who_watches_it(listener, tmp_path, monkeypatch):
    webhook.store_address(f"http://127.0.0.1:{listener.server_port}/")
    watches = watching.RunWatch(), watching.RunWatch()
    start = time.time()
    with Record.start({}, "flux_train_network", tmp_path, "cat") as record:
        record.plan(10)
        for watch in watches:
            watch.look()
        gone = {"process_start": 1.0, "since_boot": 1.0, "heartbeat": start - 60}
        monkeypatch.setattr(record, "_write", lambda: None)
        layout.store(record.folder / layout.RUN, record.facts | gone)
        for watch in watches:
            watch.look()
        watching.tell_ends_since(start)
        ((_, told),) = listener.got
        assert told["event"] == "interrupted" and told["name"] == "cat"


def test_redirects_and_other_addresses_are_refused_and_a_dead_one_harms_nothing(listener, tmp_path):
    here = f"http://127.0.0.1:{listener.server_port}"
    with pytest.raises(ConfigError, match="which is not followed"):
        webhook.send(f"{here}/elsewhere", webhook.trial_event())
    assert [path for path, _ in listener.got] == ["/elsewhere"]
    for text in ("file:///etc/passwd", "ftp://host/", "https://", "me@host", "https://a b/", "https://u:p@host/", "x"):
        with pytest.raises(ConfigError):
            webhook.store_address(text)
    webhook.store_address("http://127.0.0.1:9/gone")
    with Record.start({}, "flux_train_network", tmp_path, "cat") as record:
        record.plan(1)
    assert reader.run_at(record.folder).state == "finished"
    webhook.store_address("")
    assert keys.stored_webhook() == ""
