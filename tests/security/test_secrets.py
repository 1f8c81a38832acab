"""Planted secrets: what is typed into a form reaches the training by its environment, and no file but their own."""

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kohya_gui.form import tab as training
from library.check import isolated
from library.config import dataset
from library.config.building import build_config
from library.config.command import SCRIPTS
from library.config.hub_names import about_secret
from library.config.problems import ConfigError
from library.config.schema import options_of
from library.families import config_class
from library.runs import bundle, keys, process, queue, reader, start
from tests.training import wait_for

PLANTED = {"wandb_api_key": "canary-7f3a-of-wandb", "huggingface_token": "canary-91bc-of-the-hub"}
# A training that says what it was given, in a place of its own, and then fails with everything it knows.
TRAINING = """
import json, os, sys
from library.config.formats import read_toml
from library.runs.record import Record
config = read_toml(sys.argv[1])
with open(os.environ["TOLD"], "w") as file:
    json.dump([sys.argv, dict(os.environ)], file)
print("token", os.environ["HF_TOKEN"], flush=True)
with Record.start({**config, "huggingface_token": os.environ["HF_TOKEN"]}, "sdxl_train_network", config["output_dir"],
                  "cat", "SDXL LoRA") as record:
    record.event("warning", text="401 for hf_user:" + os.environ["HF_TOKEN"])
    record.step({"step": 1, "loss": 0.5})
"""


@pytest.fixture
def tab(tmp_path, monkeypatch):
    """The LoRA tab of the page, whose trainings are the one above."""
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TOLD", str(tmp_path / "told.json"))
    monkeypatch.setenv("PYTHONPATH", str(Path(training.__file__).parents[1]), prepend=os.pathsep)
    for variable in keys.ENVIRONMENT.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(
        start, "launch_command", lambda path, script, **how: ([sys.executable, "-c", TRAINING, str(path)], {})
    )
    monkeypatch.setattr(isolated, "check_reading", lambda config, launch: {"findings": [], "fit": None})
    return training.TrainingTab(training.TABS[0], [tmp_path])


@pytest.fixture
def sent(tmp_path):
    """What the browser sends for a form with tokens in it."""
    values = {
        "pretrained_model_name_or_path": f"{tmp_path}/base.safetensors",
        "train_data_dir": f"{tmp_path}/images",
        "output_dir": f"{tmp_path}/out",
        "output_name": "cat",
        "resolution": "1024",
        **PLANTED,
    }
    return json.dumps({"family": "sdxl", "values": values, "launch": {}})


def leaks(text):
    return [name for name, secret in PLANTED.items() if secret in text]


def places(folder, but):
    """Files that hold a secret, without those where it belongs."""
    for path in folder.rglob("*"):
        if path.is_file() and path not in but and leaks(path.read_bytes().decode("utf-8", "replace")):
            yield path


def test_no_secret_leaves_its_place(tab, sent, tmp_path, monkeypatch):
    said = [
        tab.on_print(sent, ""),
        tab.on_save(sent, f"{tmp_path}/cat.toml", ""),
        tab.on_download(sent),
        tab.on_export(sent, "{}"),
        tab.on_check(sent),
    ]
    assert (tmp_path / "cat.toml").is_file()
    monkeypatch.setattr(queue, "RUNNER", [sys.executable, "-c", "pass"])
    said += [tab.on_queue(sent), tab.on_train(sent)]
    wait_for(lambda: reader.runs() and not reader.runs()[0].active and (tmp_path / "told.json").exists(), 60)
    run = reader.runs()[0]
    command_line, environment = json.loads((tmp_path / "told.json").read_text("utf-8"))
    assert environment["HF_TOKEN"] == PLANTED["huggingface_token"]
    assert environment["WANDB_API_KEY"] == PLANTED["wandb_api_key"]
    assert not leaks(" ".join(command_line))  # what stands in the list of processes
    packed = zipfile.ZipFile(io.BytesIO(bundle.bundle_run(run)))
    said += [packed.read(name).decode() for name in packed.namelist()]
    assert not [text for text in said if leaks(str(text))]
    log = run.folder / "log.txt"  # all that a training prints gets there as it is, and ours prints none of its own
    assert list(places(tmp_path, but={keys.keys_file(), tmp_path / "told.json", log})) == []
    assert os.name == "nt" or keys.keys_file().stat().st_mode & 0o077 == 0


def test_the_command_of_a_real_training_holds_no_secret(tab, sent, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    asked = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **how: asked.append((words, how["env"])) or Gone())
    monkeypatch.setattr(process, "identity", lambda pid: {"pid": pid})
    config, _ = tab.form.ready(tab.form.parse_submission(sent))
    start.begin_job(start.job_of_config(config))
    words, environment = asked[0]
    assert str(SCRIPTS) in " ".join(words) and not leaks(" ".join(words))
    assert environment["HF_TOKEN"] == PLANTED["huggingface_token"]


class Gone:
    """A process that has ended."""

    pid = 1

    def wait(self):
        return 0


# Addresses in place of a path, as people paste and mistype them.
ADDRESSES = (
    "https://me:s3cret@x.org/a.safetensors",
    "https://s3cret@x.org/a.safetensors",
    "https://x.org/a.safetensors?token=s3cret",
    "https://x.org/a.safetensors#s3cret",
    "https:/me:s3cret@x.org/a.safetensors",
    "https:me:s3cret@x.org/a.safetensors",
    "HTTPS:\\\\me:s3cret@x.org\\a.safetensors",
    "https:%2f%2fme:s3cret@x.org/a.safetensors",
    "//me:s3cret@x.org/a.safetensors",
    "\\\\me:s3cret@x.org\\a.safetensors",
    "ssh://me:s3cret@x.org/a.safetensors",
    "file://me:s3cret@x.org/a.safetensors",
    ' "https://me:s3cret@x.org/a.safetensors" ',
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_message_repeats_a_password_in_an_address(tmp_path, address):
    for script in ("sdxl_train_network", "flux_train"):
        cls = config_class(script)
        for name, option in options_of(cls).items():
            if option.kind in ("file", "files", "folder"):
                with pytest.raises(ConfigError) as refused:
                    build_config(cls, {name: [address] if option.many else address}, notes=[])
                assert "s3cret" not in str(refused.value) and f"{name}: " in str(refused.value)
    for key in ("image_dir", "conditioning_data_dir", "metadata_file"):
        tables = {"datasets": [{"resolution": 64, "subsets": [{"image_dir": str(tmp_path), key: address}]}]}
        (tmp_path / "data.json").write_text(json.dumps(tables))
        run = build_config(
            config_class("sdxl_train_network"), {"dataset_config": str(tmp_path / "data.json")}, notes=[]
        )
        with pytest.raises(ConfigError) as refused:
            dataset.load_datasets(run)
        assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("path", ["/a:b@c/d", "a/b:c@d", "//server/share/a@b", "C:\\a@b", "\\\\?\\C:\\a@b", "a@b.png"])
def test_a_path_with_such_signs_is_one(path):
    assert about_secret("vae", path) is None
