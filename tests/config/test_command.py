"""The command that trains: a pure list of arguments that accelerate accepts."""

import sys
from pathlib import Path

import pytest

from library import families
from library.config import command as subject
from library.config.command import quote_command, training_command
from library.config.problems import ConfigError


def test_one_process_is_launched_by_accelerate():
    arguments = training_command(Path("a b") / "run.toml", "flux_train_network")
    assert arguments[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    assert arguments[-2:] == ["--config_file", str(Path("a b") / "run.toml")]
    assert Path(arguments[-3]).is_file()
    how = "--num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
    assert arguments[3:-3] == how.split()


@pytest.mark.parametrize("script", families.RUNS)
def test_every_run_has_its_script(script):
    assert Path(training_command("run.toml", script)[-3]).is_file()
    assert training_command("run.toml", script) == training_command("run.toml", f"{script}.py")


def test_several_processes_and_devices():
    arguments = training_command("run.toml", "sdxl_train", num_processes=2, gpu_ids="0,1", main_process_port=29501)
    assert "--multi_gpu" in arguments
    assert arguments[arguments.index("--gpu_ids") + 1] == "0,1"
    assert arguments[arguments.index("--main_process_port") + 1] == "29501"
    assert "--cpu" in training_command("run.toml", "sdxl_train", cpu=True)


def test_what_a_form_leaves_empty_is_left_out():
    assert training_command(
        "r", "sdxl_train", gpu_ids="", main_process_port=0, num_cpu_threads_per_process=None
    ) == training_command("r", "sdxl_train")


def test_extra_arguments_come_before_the_script():
    arguments = training_command("r", "sdxl_train", extra_accelerate_launch_args="--debug --log_dir 'a b'")
    assert arguments[-6:-3] == ["--debug", "--log_dir", "a b"]


def test_all_mistakes_at_once():
    with pytest.raises(ConfigError) as e:
        training_command("r", "sdxl_train", num_processes=0, gpus="1", main_process_port="x")
    assert str(e.value).splitlines() == [
        "num_processes must be at least 1, got 0",
        "gpus is not a known key (did you mean gpu_ids?)",
        "main_process_port must be a whole number, got 'x'",
    ]
    with pytest.raises(ConfigError, match="cpu works with one process only"):
        training_command("r", "sdxl_train", cpu=True, num_processes=2)


def test_printed_command_can_be_pasted(monkeypatch):
    arguments = ["python", "a b.py", 'say "hi"', r"C:\x y\run.toml"]
    monkeypatch.setattr(subject.sys, "platform", "linux")
    assert quote_command(arguments) == r"""python 'a b.py' 'say "hi"' 'C:\x y\run.toml'"""
    monkeypatch.setattr(subject.sys, "platform", "win32")
    assert quote_command(arguments) == r'''python "a b.py" "say \"hi\"" "C:\x y\run.toml"'''


@pytest.mark.parametrize("folder", ["my trainer", "a&b", "AI (new)", "O'Brien", "one,two", "a;b"])
def test_a_command_of_windows_runs_in_cmd_and_powershell(monkeypatch, folder):
    """A program in quotes is only a text in PowerShell, and cmd ends a command at an &."""
    monkeypatch.setattr(subject.sys, "platform", "win32")
    program, file = rf"C:\{folder}\kohya", rf"D:\{folder}\run.toml"
    assert quote_command(["kohya", "train", file, "--lr=1e-4"]) == f'kohya train "{file}" --lr=1e-4'
    words = [rf"'{word}'".replace("O'B", "O''B") for word in (program, file)]
    assert quote_command([program, "train", file]) == f'powershell "& {words[0]} train {words[1]}"'


def test_plain_paths_of_windows_stay_without_quotes(monkeypatch):
    monkeypatch.setattr(subject.sys, "platform", "win32")
    arguments = [r"C:\Users\Jörg_猫\kohya-1.0\kohya", "train", r"\\nas\share\run.toml", "--seed", "1"]
    assert quote_command(arguments) == " ".join(arguments)
    assert quote_command(["kohya", "", "D:\\my images\\"]) == r'kohya "" "D:\my images\\"'
