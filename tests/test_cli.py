"""The console command: what it says, what it returns, and what it does not load."""

import contextlib
import io
import json
import subprocess
import sys

import pytest

from library.cli import launch, main
from library.config import environment
from tests import source


def loaded_by(*arguments: str) -> set[str]:
    """The heavy modules that a run of the command has loaded."""
    code = f"""
import sys
from library.cli import main
try:
    main.main({list(arguments)!r})
except SystemExit:
    pass
print("loaded", *(name for name in ("torch", "gradio", "diffusers", "transformers", "numpy") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=source.ROOT, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("train", "--help"),
        ("train", "flux_train_network", "--help"),
        ("check", "--help"),
        ("import", "--help"),
        ("diff", "a.json", "b.json"),
        ("bench",),
        ("bench", "--help"),
        ("bench", "--family", "flux", "--part", "wheels"),
    ],
)
def test_help_and_mistakes_load_nothing_heavy(arguments):
    assert not loaded_by(*arguments)


def test_help_names_every_command(capsys):
    assert main.main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("gui", "train", "demo", "check", "import", "diff", "doctor", "bench"))


def test_an_unknown_command_is_answered_with_a_suggestion(capsys):
    assert main.main(["dctor"]) == 2
    assert "Did you mean doctor?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("tools meerge", "merge"),
        ("demo --famly flux", "--family"),
        ("sample x --promt=x", "--prompt"),
        ("caption wd13 --thresold 1", "wd14"),
        ("demo --family fux", "flux"),
        ("cache lattents x.toml", "latents"),
    ],
)
def test_an_unknown_word_of_a_command_is_answered_with_a_suggestion(typed, meant, capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(typed.split())
    assert f"(did you mean {meant}?)" in capsys.readouterr().err


def test_check_says_everything_that_is_wrong(tmp_path, capsys):
    run = tmp_path / "flux_train_network.toml"
    run.write_text('lerning_rate = 1e-4\nmax_train_steps = "many"\n')
    assert main.main(["check", str(run)]) == 1
    shown = capsys.readouterr().err
    assert "lerning_rate" in shown
    assert "learning_rate" in shown
    assert "max_train_steps" in shown
    assert "2 to fix" not in shown and "ae is not set" in shown and "output_dir is not set" in shown
    assert "learning_rate is not set" not in shown


def test_check_takes_the_flags_of_a_script_and_names_all_that_is_wrong(tmp_path, capsys):
    run = tmp_path / "run.toml"
    run.write_text('noise_ofset = 1\nresolution = "64"\nlr_scheduler = "cosin"\n')
    wrong = ["--lerning_rate", "1", "--seed", "x", "--network_dim", "-3", "--optimizer_args", "weight_dekay=1"]
    wrong += ["--num_processes", "two", "--main_process_port", "70000", "--full_bf16", "--network_args", "conv=1"]
    files = {
        "pretrained_model_name_or_path": "m",
        "clip_l": "c.safetensors",
        "t5xxl": "t",
        "ae": "a",
        "resume": "r",
        "train_data_dir": "d",
        "network_weights": "w",
        "sample_prompts": "p",
        "output_dir": "o",
    }
    wrong += [part for name, file in files.items() for part in (f"--{name}", str(tmp_path / file))]
    more = [name for name in files if name != "output_dir"]
    named = [
        "noise_ofset",
        "cosin ",
        "--lerning_rate",
        "--seed",
        "--network_dim",
        "weight_dekay",
        "num_processes",
        "main_process_port",
        "full_bf16 needs",
        "conv",
        *more,
    ]
    for asked in (["flux_train_network", "--config_file", str(run)], [str(run), "--script", "flux_train_network"]):
        assert main.main(["check", *asked, *wrong]) == 1
        said = [line for line in capsys.readouterr().err.splitlines() if " to fix in " not in line]
        assert all(sum(name in line for line in said) >= 1 for name in named), said
        assert len(said) == len(named), said
    assert main.main(["check", "flux_train_network", "--json", *wrong]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (
        sum(finding["verdict"] == "bad" for finding in report["findings"]) == len(named) - 1
    )  # the file's two, and resolution


def test_a_check_that_fails_says_so_and_ends_with_a_code(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("library.check.report.make_report", lambda *_: 1 / 0)
    run = tmp_path / "flux_train_network.toml"
    run.write_text("")
    assert main.main(["check", str(run)]) == 1
    assert "the check itself failed (ZeroDivisionError" in capsys.readouterr().err
    assert main.main(["check", str(run), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"]


def test_check_of_a_file_that_is_not_there(tmp_path, capsys):
    assert main.main(["check", str(tmp_path / "no.toml"), "--script", "flux_train"]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_script_is_recognised_by_file_name_or_options(tmp_path):
    from library.config.problems import ConfigError

    def script_of(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return launch.script_of_toml(tmp_path / name)

    model = 'pretrained_model_name_or_path = "m"\noutput_dir = "o"\ntrain_data_dir = "d"\n'
    flux = model + 'ae = "a"\nclip_l = "c"\nt5xxl = "t"\n'
    assert script_of("my-sdxl_train-3.toml", "") == "sdxl_train"
    assert script_of("my-sdxl_train_network-3.toml", "") == "sdxl_train_network"
    assert script_of("a.toml", flux) == "flux_train"
    assert script_of("b.toml", flux + "network_dim = 8\n") == "flux_train_network"
    assert script_of("c.toml", model + "network_dim = 8\nnoise_offset_type = 'Original'\n") == "sdxl_train_network"
    one_encoder = model + 'text_encoder = "t"\nvae = "v"\nnetwork_dim = 8\n'
    assert script_of("e.toml", one_encoder + "timestep_sampling = 'qwen_shift'\n") == "qwen_image_train_network"
    assert script_of("my_fine_tune.toml", flux) == "flux_train", "no name of a family, so no name of a script"
    with pytest.raises(ConfigError, match="training script cannot be told"):
        script_of("f.toml", one_encoder)
    written = "# Z-Image LoRA: accelerate launch sd-scripts/zimage_train_network.py --config_file THIS_FILE\n"
    assert script_of("g.toml", written + one_encoder) == "zimage_train_network", "as an import or the page writes it"
    with pytest.raises(ConfigError, match="training script cannot be told"):
        script_of("d.toml", "ae = 'a'\nblock_lr = '1'\n")


def test_train_hands_its_flags_on(tmp_path, monkeypatch, capsys):
    """Launcher's options go to the launcher, the script's own to the script, checked before anything is started."""
    started = []
    monkeypatch.setattr(
        "library.runs.foreground.run_in_foreground", lambda arguments, _: started.append(arguments) or 7
    )
    run = tmp_path / "run.toml"
    run.write_text(
        'pretrained_model_name_or_path = "m.safetensors"\noutput_dir = "o"\nnetwork_module = "networks.lora"\n'
    )
    given = ["sdxl_train_network", "--config_file", str(run), "--num_processes", "2", "--seed", "3", "--no-compile"]
    assert main.main(["train", *given]) == 7
    (arguments,) = started
    at = next(i for i, a in enumerate(arguments) if a.endswith("sdxl_train_network.py"))
    assert arguments[at + 1 :] == ["--config_file", str(run), "--seed", "3", "--no-compile"]
    assert arguments[arguments.index("--num_processes") + 1] == "2"
    capsys.readouterr()
    assert main.main(["train", *given, "--sede", "4", "--num_machines", "many"]) == 2
    assert len(started) == 1
    said = capsys.readouterr().err
    for words in ("--sede is not an option", "num_machines must be", "train_data_dir is not set", "m.safetensors"):
        assert said.count(words) == 1, said


def test_train_without_a_file_has_only_flags(monkeypatch):
    started = []
    monkeypatch.setattr(
        "library.runs.foreground.run_in_foreground", lambda arguments, _: started.append(arguments) or 0
    )
    assert main.main(["train", "sdxl_train", "--seed", "3"]) == 0
    assert "--config_file" not in started[0]
    assert started[0][-2:] == ["--seed", "3"]


def test_a_training_in_front_of_the_shell_returns_its_exit_code():
    from library.runs import foreground

    assert foreground.run_in_foreground([sys.executable, "-c", "raise SystemExit(3)"], {}) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no polite kill")
@pytest.mark.parametrize("launched", [True, False])
def test_a_polite_kill_reaches_the_training(launched):
    """It goes past a launcher, and not past a training to the processes that it has started."""
    child, variables = (
        (
            "import signal, subprocess, sys, time; signal.signal(15, lambda *_: sys.exit(5)); "
            "p = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=subprocess.PIPE); "
            "print('up', flush=True); time.sleep(60)"
        ),
        {environment.DIRECT: "1"},
    )
    if launched:
        child = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
        variables = {}
    code = (
        "from library.runs import foreground; "
        f"raise SystemExit(foreground.run_in_foreground([{sys.executable!r}, '-c', {child!r}], {variables}))"
    )
    shell = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=source.ROOT)
    assert shell.stdout.readline() == "up\n"
    shell.terminate()
    assert shell.wait(30) == 5


def test_signs_that_a_console_cannot_show_are_printed_as_escapes(monkeypatch, tmp_path):
    """As on Windows, where what is printed into a file is in an old code page."""
    file = tmp_path / "絵.toml"
    file.write_text("learning_rate = 1\n", encoding="utf-8")
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="cp1252", write_through=True))
    assert main.main(["diff", str(file), str(file), "--script", "flux_train"]) == 0
    print(file.name)
    assert printed.getvalue().split()[-1] == b"\\u7d75.toml"


@pytest.mark.parametrize("command", [["diff", "絵ü.toml", "絵ü.toml"], ["tools", "verify", "絵ü.safetensors"], ["絵ü"]])
@pytest.mark.parametrize("chosen", ["", "cp1252"])
def test_names_of_files_get_through_a_pipe_of_windows(monkeypatch, command, chosen):
    """There Python's own choice is a code page that lacks most characters."""
    monkeypatch.setattr(environment, "WINDOWS", True)
    monkeypatch.setenv("PYTHONIOENCODING", chosen)
    printed = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(printed, encoding="cp1252", write_through=True))
    with contextlib.suppress(SystemExit):
        assert main.main(command)
    expected = "\\u7d75\xfc".encode("cp1252") if chosen else "絵ü".encode()
    assert expected in printed.getvalue()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sample"], "kohya sample needs config, such as kohya sample run.toml"),
        (["models"], "kohya models needs COMMAND, such as kohya models list"),
        (["diff", "a.toml"], "kohya diff needs second; kohya diff --help"),
        (["queue", "move"], "kohya queue move needs entry, to; kohya queue move --help"),
    ],
)
def test_missing_arguments_are_one_sentence_with_the_next_step(arguments, said, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main.main(arguments)
    lines = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == main.EXIT_MISUSED and len(lines) == 1 and lines[0].startswith(f"error: {said}")
