"""What the machine does to a command: a reader that leaves, memory that is used up, numbers beyond all bounds."""

import errno
import os
import sys

import pytest

from library.cli import main, train_script
from library.config import environment
from library.config.building import build_config
from library.config.problems import ConfigError, Message
from library.families import config_class
from library.families.shared import weights
from library.train import errors


@pytest.fixture
def closed(monkeypatch):
    """Standard output is a pipe whose reader has left."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        yield stream


@pytest.mark.parametrize("argv", [["--help"], ["tools", "--help"], ["train", "--help"], ["diff"]], ids=" ".join)
def test_who_reads_the_help_may_leave(closed, argv):
    try:
        assert main.main(argv) in (0, 2, None)
    except SystemExit as ended:
        assert ended.code in (0, 2)
    print("more", flush=True)  # as at Python's end


def test_who_reads_the_help_of_a_script_may_leave(closed):
    with pytest.raises(SystemExit) as ended:
        train_script.read_command_line(config_class("flux_train_network"), ["--help"])
    assert ended.value.code == 0


LACKS = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("unable to mmap 100 bytes from file <a>: Cannot allocate memory (12)"),
    RuntimeError("can't start new thread"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
]


@pytest.mark.parametrize("error", LACKS, ids=lambda error: str(error)[:30] or "MemoryError")
def test_memory_that_cannot_be_had_is_reported_wherever_it_shows(error, monkeypatch, capsys):
    config = build_config(config_class("flux_train_network"), {}, notes=[])
    said = errors.explain_error(error, config, Message("loading the model"), {})
    assert isinstance(said, ConfigError) and "the computer ran out of CPU memory (loading the model)" in str(said)

    def failing():
        raise error

    monkeypatch.setattr(environment, "check_cache_variables", failing)  # before the training itself
    with pytest.raises(SystemExit):
        train_script.main(type(config), ["--learning_rate", "1"])
    shown = capsys.readouterr().err
    assert "reached a limit on it" in shown or "is not set" in shown and "Traceback" not in shown


def test_a_file_that_finds_no_memory_is_not_called_damaged(tmp_path, monkeypatch):
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from torch import ones

    save_file({"a": ones(2)}, tmp_path / "a.safetensors")

    def full(*given, **how):
        raise SafetensorError("Error while mapping: Cannot allocate memory (os error 12)")

    monkeypatch.setattr(weights, "safe_open", full)
    with pytest.raises(MemoryError):
        weights.open_weights(tmp_path / "a.safetensors")


@pytest.mark.parametrize("script", ["flux_train_network", "sdxl_train_control_net_lllite"])
def test_a_rank_that_no_layer_has_is_refused_by_the_options(script):
    with pytest.raises(ConfigError, match="network_dim must be at most 1,000,000"):
        build_config(config_class(script), {"network_dim": 10**9}, notes=[])


def test_other_errors_are_no_lack_of_memory():
    assert not environment.lacks_memory(RuntimeError("CUDA out of memory"))
