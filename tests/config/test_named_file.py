"""`kohya check SCRIPT FILE`, and the like: a file behind a script is the one that --config_file names."""

from types import SimpleNamespace

import pytest

from library.bench import probe
from library.check import preflight
from library.cli import check, launch, train_script
from library.config.problems import ConfigError, Problem
from library.outputs import paths

SCRIPT = "sdxl_train_network"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("seed = 7\nnetwork_dim = 24\n", encoding="utf-8")
    return path


def test_check_and_train_take_a_script_and_a_file(file, monkeypatch):
    about, reading, _ = check.read_check_request([SCRIPT, str(file), "--seed", "8"])
    assert about == f"{file} ({SCRIPT})"
    assert (reading.config.steps.seed, reading.config.network.network_dim) == (8, 24)
    asked = []

    def stop(config, flags, more):
        asked.append(flags)
        raise ConfigError("enough")

    monkeypatch.setattr(train_script, "read_command_line", stop)
    for argv in ([SCRIPT, str(file), "--seed", "8"], [SCRIPT, "--config_file", str(file), "--seed", "8"]):
        with pytest.raises(ConfigError, match="enough"):
            launch.launch_training(argv)
    assert asked[0] == asked[1]
    assert launch.with_config(["stray"]) == ["stray"]  # which is told to follow a flag


def test_probe_takes_a_script_and_a_file(file, monkeypatch):
    asked = []
    result = SimpleNamespace(sentence=lambda: "fits", best=None)
    monkeypatch.setattr(probe, "run_probe", lambda config, how, work: asked.append(config) or result)
    for argv in ([SCRIPT, str(file)], ["--script", SCRIPT, str(file)]):
        assert probe.main(argv, lambda path: "flux_train_network") == 1
    assert asked[0] == asked[1] and asked[0].script == SCRIPT


def test_a_probe_does_not_mind_what_a_training_has_left(monkeypatch):
    """It keeps nothing where the results go."""
    there = Problem("output_name", ": cat.safetensors would be overwritten", code=paths.THERE)
    monkeypatch.setattr(probe.data, "check_data", lambda config, grid: None)
    monkeypatch.setattr(preflight, "evaluate", lambda config, images: ([there], []))
    monkeypatch.setattr(probe.reader, "active", lambda: SimpleNamespace(name="other", state="running"))
    with pytest.raises(ConfigError, match="other is still running"):
        probe.run_probe(SimpleNamespace(grid=None), {}, None)
    other = Problem("output_name", "is wrong")
    monkeypatch.setattr(preflight, "evaluate", lambda config, images: ([there, other], []))
    with pytest.raises(ConfigError, match="is wrong"):
        probe.run_probe(SimpleNamespace(grid=None), {}, None)
