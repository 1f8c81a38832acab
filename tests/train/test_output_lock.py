"""Two trainings that start in the same moment do not write into one file."""

import pytest

from library.cli import train
from library.cli import train as command
from library.config.problems import ConfigError
from tests.training import config_of

BUSY = "output_name: a training that writes these files is running; stop it, or choose another name"


@pytest.fixture
def config(demo, squares, tmp_path):
    def made(**values):
        options = {"train_data_dir": squares, "output_dir": tmp_path / "out", "output_name": "m"}
        return config_of(demo, "flux_train_network", **options | values)

    return made


def test_a_second_training_of_the_name_is_refused_after_both_were_checked(config, monkeypatch, tmp_path):
    """The check of each has found no other training, as neither has written its record."""
    started = []

    def running(trained, *_):
        started.append(trained.save.output_name)
        if len(started) == 1:
            with pytest.raises(ConfigError) as refused:
                command.train(config(save_model_as="ckpt"))  # its states have the same names
            assert str(refused.value) == BUSY and refused.value.problems[0].fix == {"output_name": "m-2"}
            command.train(config(output_name="other"))
            command.train(config(output_dir=tmp_path / "elsewhere"))
        return tmp_path

    monkeypatch.setattr(command, "run_training", running)
    command.train(config())
    assert started == ["m", "other", "m"]
    assert not [path for path in tmp_path.rglob("*.lock")]


def test_the_lock_ends_with_the_training_however_it_ends(config, monkeypatch, tmp_path):
    def failing(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(command, "run_training", failing)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            command.train(config())
    (tmp_path / "out" / ".m.lock").touch()  # as one that was killed leaves it
    with pytest.raises(RuntimeError, match="broken"):
        command.train(config())


def test_files_that_another_has_written_since_the_check_are_not_overwritten(config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "m.safetensors").touch()
    with pytest.raises(ConfigError, match="would be overwritten"), train.hold_output_name(config()):
        pass
    assert not (tmp_path / "out" / ".m.lock").exists()


def test_a_disk_without_locks_is_trained_on(config, monkeypatch):
    def without(*_):
        raise NotImplementedError

    monkeypatch.setattr("library.runs.locking.FileLock.acquire", without)
    with train.hold_output_name(config()):
        pass
