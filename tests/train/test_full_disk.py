"""The disk fills up, is unplugged or becomes read-only: the training continues, and its result is somewhere."""

import errno
import itertools
import os
import shutil

import pytest
import torch

from library.cli import train as command
from library.config.problems import ConfigError
from library.files import UnwritableError
from library.outputs import paths
from library.runs import reader, registry
from library.train.saving import full_disk, resume_check, state_files
from library.train.saving.full_disk import Writing
from tests.training import config_of, runs_in, train

ERRORS = {
    "full": lambda: UnwritableError("the disk is full"),
    "unplugged": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def config(demo, squares, tmp_path, home):
    def made(**values):
        saving = {"save_every_n_steps": 1, "save_state": True, "max_train_steps": 4, "ema_decay": 0.5}
        where = {"train_data_dir": squares, "output_dir": tmp_path / "out", "output_name": "m"}
        return config_of(demo, "flux_train_network", **where, **saving | values)

    return made


@pytest.fixture(scope="module")
def whole(demo, squares, tmp_path_factory):
    """What a training with enough room learns."""
    values = {"output_dir": tmp_path_factory.mktemp("whole"), "output_name": "m", "ema_decay": 0.5}
    return train(config_of(demo, "flux_train_network", train_data_dir=squares, **values)).tensors()


@pytest.fixture
def fill(monkeypatch, tmp_path):
    """Let files or states fail that a function of their path and number (from 1) chooses."""

    def filled(chosen, error=ERRORS["full"]):
        counts = {"file": itertools.count(1), "state": itertools.count(1)}

        def failing(kind, real, path, *given):
            if chosen(kind, path, next(counts[kind])):
                raise error()
            return real(path, *given)

        write, fill_state = paths.write_result, state_files.State.write
        monkeypatch.setattr(paths, "write_result", lambda path, *given: failing("file", write, path, *given))
        monkeypatch.setattr(
            state_files.State, "write", lambda self, path: failing("state", lambda p: fill_state(self, p), path)
        )

    return filled


def same(file, tensors):
    from safetensors.torch import load_file

    found = load_file(file)
    return found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("kind", ["file", "state"])
@pytest.mark.parametrize("error", ERRORS)
def test_what_is_not_saved_during_the_training_is_one_warning(config, fill, whole, tmp_path, kind, error):
    """Only the first three of a kind fail: for a file, that is the one of step 1, its average, and that of step 2."""
    fill(lambda what, _, number: what == kind and number <= 3, ERRORS[error])
    outcome = train(config())
    assert outcome.facts["state"] == "finished" and same(outcome.file, whole)
    (said,) = (str(event["text"]) for event in outcome.events("warning") if "is not saved" in str(event["text"]))
    assert "m-step00000001" in said and "the training continues" in said
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"m-step00000003.safetensors", "m-step00000004-state", "m-state"} <= names
    assert not any(name.startswith(".") for name in names)


def test_files_that_a_missing_one_would_have_replaced_are_kept(config, fill, tmp_path):
    fill(lambda _kind, path, _: "-step00000002" in path.name or "-step00000003" in path.name)
    train(config(save_last_n_steps=1))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"m-step00000001.safetensors", "m-step00000001-ema.safetensors", "m-step00000001-state"} <= names


@pytest.mark.parametrize("error", ERRORS)
def test_what_does_not_fit_at_the_end_is_saved_elsewhere(config, fill, whole, home, tmp_path, error):
    fill(lambda _kind, path, _: path.parent == tmp_path / "out", ERRORS[error])
    with pytest.raises(ConfigError, match=r"m(-ema)?\.safetensors is saved in .*rescued") as ended:
        train(config())
    run = reader.run_at(next(iter(runs_in(tmp_path / "out"))))
    place = home / "rescued" / run.folder.name
    assert str(place) in str(ended.value) and run.state == "failed" and str(place) in str(run.error)
    assert {path.name for path in place.iterdir()} == {"m.safetensors", "m-ema.safetensors", "m-state"}
    assert same(place / "m.safetensors", whole) and resume_check.problems(place / "m-state") == []
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["runs"]


def test_a_last_state_that_fits_nowhere_does_not_cost_the_result(config, fill, whole):
    fill(lambda kind, _path, _: kind == "state")
    outcome = train(config(save_every_n_steps=None))
    assert same(outcome.file, whole) and outcome.facts["state"] == "finished"
    assert sum("m-state is not saved" in str(event["text"]) for event in outcome.events("warning")) == 1


def test_a_result_that_fits_nowhere_ends_with_the_error_of_the_disk(config, fill, tmp_path):
    fill(lambda kind, _path, _: kind == "file")
    with pytest.raises(ConfigError, match="the disk is full"):
        train(config())
    assert (tmp_path / "out" / "m-state").is_dir()


def test_nan_is_no_matter_of_the_disk(tmp_path):
    def refused(_path):
        raise ConfigError("m.safetensors was not saved: 1 tensor with NaN or infinity")

    writing = Writing(None)
    for write in (writing.during, writing.result, writing.last_state):
        with pytest.raises(ConfigError, match="NaN"):
            write(tmp_path / "m.safetensors", refused)


def test_the_second_folder_is_tried_where_the_first_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "data_folder", lambda: tmp_path / "home")
    monkeypatch.setattr(full_disk.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    tried = []

    def write(path):
        tried.append(path.relative_to(tmp_path).parts[0])
        if len(tried) < 3:
            raise UnwritableError("the disk is full")

    from types import SimpleNamespace

    writing = Writing(SimpleNamespace(record=None))
    writing.result(tmp_path / "out" / "m.safetensors", write)
    assert tried == ["out", "home", "temporary"]
    with pytest.raises(ConfigError, match="temporary"):
        writing.check()


@pytest.mark.skipif(os.name == "nt", reason="Windows deletes no open file")
def test_a_folder_that_turned_into_a_file_hides_no_error(config, monkeypatch, tmp_path):
    """Its lock cannot be removed."""

    def failing(*_):
        shutil.rmtree(tmp_path / "out")
        (tmp_path / "out").touch()
        raise ConfigError("the reason")

    monkeypatch.setattr(command, "run_training", failing)
    with pytest.raises(ConfigError, match="the reason"):
        command.train(config())
