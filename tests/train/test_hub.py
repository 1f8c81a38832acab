"""Uploads to Hugging Face and states from there, against a stand-in of its client: the network is never asked."""

import shutil
import time
from pathlib import Path

import huggingface_hub
import pytest

from library.config.problems import ConfigError
from library.outputs import hub
from library.runs import reader
from tests.training import config_of, listing, problems_and_remarks, runs_in, train

TOKEN = "hf_canary_of_the_token"


class Hub:
    """What the client was asked for, and what it holds: place -> {file: hash}."""

    def __init__(self):
        self.made, self.held, self.tokens, self.fails, self.pause = [], {}, [], (), 0.0

    def client(self, token=None):
        self.tokens.append(token)
        return self

    def create_repo(self, repo_id, **how):
        if "create" in self.fails:
            raise OSError("401 Client Error.  (Request ID: abc)\nInvalid credentials")
        self.made.append((repo_id, how))

    def upload_file(self, path_or_fileobj, **where):
        self._take(Path(path_or_fileobj), where)

    def upload_folder(self, folder_path, **where):
        self._take(Path(folder_path), where)

    def _take(self, path, where):
        if path.name in self.fails:
            raise OSError("the wire is cut")
        time.sleep(self.pause)
        self.held[where["path_in_repo"]] = listing(path) if path.is_dir() else path.stat().st_size
        assert (where["repo_id"], where["repo_type"]) == ("me/cats", "model")

    def list_repo_files(self, repo, **where):
        return [f"kept/m-state/{name}" for name in listing(self.folder)] + ["other/file"]

    def snapshot_download(self, repo, allow_patterns, **where):
        self.asked = repo, where
        for name in allow_patterns:
            target = self.cache / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.folder / Path(name).name, target)
        return str(self.cache)


@pytest.fixture
def there(monkeypatch, tmp_path):
    stub = Hub()
    stub.cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub, "HfApi", stub.client)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stub.snapshot_download)
    return stub


@pytest.fixture
def config(demo, squares, tmp_path):
    def make(**values):
        base = {"output_dir": tmp_path / "out", "output_name": "m", "max_train_steps": 4, "save_every_n_steps": 1}
        base |= {"huggingface_repo_id": "me/cats", "huggingface_token": TOKEN, "huggingface_repo_type": "model"}
        return config_of(demo, "flux_train_network", train_data_dir=squares, **base | values)

    return make


def test_everything_that_is_saved_is_sent(there, config, tmp_path):
    values = {"save_state": True, "save_every_n_steps": 3, "save_state_to_huggingface": True}
    outcome = train(config(huggingface_path_in_repo="runs/one", **values))
    names = {"m-step00000003.safetensors", "m-step00000003-state", "m.safetensors", "m-state"}
    assert there.held.keys() == {f"runs/one/{name}" for name in names}
    assert there.held["runs/one/m.safetensors"] == outcome.file.stat().st_size
    assert there.held["runs/one/m-state"] == listing(tmp_path / "out" / "m-state")
    assert there.made == [("me/cats", {"repo_type": "model", "private": True, "exist_ok": True})]
    assert {event["place"] for event in outcome.events("uploaded")} == there.held.keys()
    assert there.tokens == [TOKEN]
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert TOKEN.encode() not in path.read_bytes(), path


def test_in_the_background_a_file_stays_until_it_is_sent(there, config, tmp_path):
    there.pause = 0.2
    outcome = train(
        config(async_upload=True, save_last_n_steps=1, save_state=True, huggingface_repo_visibility="Public")
    )
    assert not [event["text"] for event in outcome.events("warning") if "upload" in event["text"]]
    assert set(there.held) == {f"m{step}.safetensors" for step in ("", *(f"-step0000000{n}" for n in (1, 2, 3, 4)))}
    assert not (tmp_path / "out" / "m-step00000001.safetensors").exists()
    assert there.made[0][1]["private"] is False


@pytest.mark.parametrize("background", [False, True])
def test_what_cannot_be_sent_is_reported_and_ends_nothing(there, config, background):
    there.fails = ("m-step00000002.safetensors",)
    outcome = train(config(save_every_n_steps=2, async_upload=background))
    (said,) = [event["text"] for event in outcome.events("warning") if "upload" in str(event["text"])]
    assert said.startswith("m-step00000002.safetensors could not be uploaded (the wire is cut); it is in ")
    assert outcome.facts["state"] == "finished" and "m.safetensors" in there.held


def test_a_repository_that_cannot_be_had_is_known_before_the_model_is_loaded(there, config, tmp_path):
    there.fails = ("create",)
    with pytest.raises(ConfigError, match=r"me/cats can be neither found nor made \(401 Client Error\); check"):
        train(config())
    (folder,) = runs_in(tmp_path / "out")
    facts = reader.run_at(folder).facts
    assert facts["state"] == "failed"
    assert not [event for event in reader.read_events(folder) if event["kind"] == "phase"]


def test_missing_token_is_reported_at_once(config, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    (said,) = (p for p in problems_and_remarks(config(huggingface_token=None))[0] if "token" in str(p))
    assert "HF_TOKEN" in str(said)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: TOKEN)
    assert not list(hub.find_upload_problems(config(huggingface_token=None)))


def test_a_state_on_the_hub_is_gone_on_with(there, config, tmp_path):
    values = {"huggingface_repo_id": None, "save_every_n_steps": 2, "save_state": True}
    straight = train(config(**values))
    there.folder = tmp_path / "out" / "m-step00000002-state"
    again = config(
        **values, output_dir=tmp_path / "again", resume="me/cats/kept/m-state:v1", resume_from_huggingface=True
    )
    assert not list(problems_and_remarks(again)[0])
    assert there.cache.exists() is False
    assert train(again).losses == straight.losses[2:]
    assert there.asked == ("me/cats", {"revision": "v1", "repo_type": None, "token": TOKEN})


@pytest.mark.parametrize(
    ("place", "words"), [("me/cats/gone", "has no folder gone"), ("me/cats/kept/m-state", "could not be downloaded")]
)
def test_a_state_that_is_not_there_is_one_sentence(there, config, place, words, tmp_path):
    there.folder = tmp_path
    (tmp_path / "model.safetensors").write_bytes(b"x")
    there.snapshot_download = None
    if "downloaded" in words:
        there.list_repo_files = lambda *_, **__: 1 / 0
    asked = config(resume=place, resume_from_huggingface=True)
    with pytest.raises(ConfigError, match=words):
        hub.fetched(asked)
    assert not runs_in(tmp_path / "out")
