"""One process is started without accelerate's launcher, with what that would have set; everything else by it."""

import os
import sys

import pytest

from library.config.command import training_command
from library.config.environment import DIRECT
from library.runs.launcher import launch_command

PLAIN = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "mixed_precision": "bf16",
    "debug": False,
    "machine_rank": 0,
    "num_machines": 1,
    "num_processes": 1,
    "use_cpu": False,
}


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    """Accelerate's config file, which is not there."""
    import accelerate.commands.launch as launch

    path = tmp_path / "accelerate" / "default_config.yaml"
    path.parent.mkdir()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "default_config_file", str(path))
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(path))
    return path


def written(path, **values):
    path.write_text("".join(f"{name}: {value!r}\n" for name, value in values.items()), encoding="utf-8")


@pytest.mark.parametrize("with_config", [False, True])
@pytest.mark.parametrize("threads", [None, "3"])
@pytest.mark.parametrize(
    "how",
    [{}, {"cpu": True}, {"gpu_ids": "1", "mixed_precision": "bf16"}, {"num_cpu_threads_per_process": 2, "cpu": True}],
)
def test_the_script_gets_what_accelerate_sets(config, monkeypatch, how, threads, with_config):
    from accelerate.commands import launch

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    if with_config:
        written(config, **PLAIN)
    arguments, variables = launch_command("run.toml", "flux_train", **how)
    asked = launch.launch_command_parser().parse_args(training_command("run.toml", "flux_train", **how)[3:])
    expected, environment = launch.prepare_simple_launcher_cmd_env(launch._validate_launch_command(asked)[0])
    assert arguments == expected
    assert {**os.environ, **variables} == environment | {DIRECT: "1"}


@pytest.mark.parametrize(
    "how",
    [
        {"num_processes": 2},
        {"num_machines": 2},
        {"num_processes": 2, "extra_accelerate_launch_args": "--debug"},
        {"extra_accelerate_launch_args": "--debug"},
    ],
)
def test_more_than_a_process_is_for_accelerate(how):
    assert launch_command("run.toml", "flux_train", **how) == (training_command("run.toml", "flux_train", **how), {})


@pytest.mark.parametrize(
    "values",
    [
        {"distributed_type": "MULTI_GPU"},
        {"distributed_type": "FSDP"},
        {"debug": True},
        {"gpu_ids": "1"},
        {"enable_cpu_affinity": True},
        {"use_cpu": True},
        {"unreadable": 1},
        {"compute_environment": "AMAZON_SAGEMAKER"},
    ],
)
def test_so_is_what_its_config_asks_for(config, values):
    written(config, **PLAIN | values)
    assert launch_command("run.toml", "flux_train") == (training_command("run.toml", "flux_train"), {})
    script = launch_command("run.toml", "flux_train", cpu=True)[0]  # for which accelerate does not read its config
    assert script[0] == sys.executable and script == [sys.executable, *training_command("run.toml", "flux_train")[-3:]]


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "num_processes: 1"])
def test_what_cannot_be_read_is_left_to_accelerate(config, text):
    config.write_text(text, encoding="utf-8")
    assert launch_command("run.toml", "flux_train")[1] == {}
