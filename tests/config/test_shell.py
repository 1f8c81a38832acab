"""The four scripts as a person runs them: --help, mistakes, files, and no torch before training."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from library import families
from library.cli import train_script
from library.cli.launch import LAUNCH_FLAGS
from library.cli.train_script import read_command_line
from library.config.formats import read_toml
from library.config.problems import ConfigError
from library.config.schema import options_of
from library.families.flux.options import FluxLora
from library.families.sdxl.options import SdxlLora

SCRIPTS = Path(__file__).parents[2] / "sd-scripts"
NOBODYS = Path(os.path.expanduser("~no-such-user/run.toml"))  # Windows expects all users' folders beside each other


def run(script, *argv, **env):
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=os.environ | env)


@pytest.fixture
def called(capsys, monkeypatch):
    """A function: what a script says and how it ends, run in this process, which has loaded what takes seconds."""

    def call(script, *argv):
        path = str(SCRIPTS / f"{script}.py")
        monkeypatch.setattr(sys, "argv", [path, *map(str, argv)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(path, run_name="__main__")
        said = capsys.readouterr()
        return SimpleNamespace(returncode=ended.value.code, stdout=said.out, stderr=said.err)

    return call


def problems(*argv, config=FluxLora):
    return train_script.read_command_line(config, list(argv)).problems


@pytest.mark.parametrize("script", families.RUNS)
def test_help_lists_every_option(script, called):
    done = called(script, "--help")
    assert done.returncode == 0
    assert not done.stderr
    for name in options_of(families.config_class(script)):
        assert f"\n  --{name}" in done.stdout
    assert done.stdout.isascii()  # a console in an old code page shows it too


def test_reading_a_command_line_loads_nothing_heavy():
    code = (
        "import sys\n"
        "from library import families\n"
        "from library.cli import options_page, train_script; from library.config import command, dataset\n"
        "for script in families.RUNS: train_script.help_text(families.config_class(script))\n"
        "heavy = {'torch', 'transformers', 'diffusers', 'accelerate', 'gradio', 'numpy', 'PIL'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_mistakes_are_reported_at_once_with_exit_code_2(called):
    done = called("flux_train_network", "--lerning_rate", 1, "--learning_rate", "abc", "--max_train_epochs", -5)
    assert done.returncode == 2
    assert not done.stdout
    said = done.stderr.splitlines()
    assert said[:3] == [
        "error: --lerning_rate is not an option (did you mean learning_rate?)",
        "error: --learning_rate must be a number, got 'abc'",
        "error: --max_train_epochs must be at least 1 (or 0 for not set), got '-5'",
    ]
    # With them all that would have been said once these are mended.
    empty = {"pretrained_model_name_or_path", "clip_l", "t5xxl", "ae", "train_data_dir", "resolution", "output_dir"}
    assert {line.split()[1] for line in said[3:]} == empty


def test_only_the_first_of_several_processes_talks(called, monkeypatch):
    """The others end after it, and look for nothing that they would not say."""
    waited = []
    monkeypatch.setattr(train_script, "time", SimpleNamespace(sleep=waited.append))
    monkeypatch.setattr(train_script, "problems_beyond_reading", lambda reading: pytest.fail("torch would be loaded"))
    monkeypatch.setenv("RANK", "1")
    done = called("flux_train", "--foo")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "") and waited == [train_script.MAX_START_GAP]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["stray"], "stray: unexpected value. Every value follows a flag, as in --output_dir stray"),
        (["--vae", "a", "b"], '--vae takes one value, got 2; put quotes around a value with blanks: "a b"'),
        (["--output_name"], "--output_name needs a value: text"),
        (["--cache_latents", "perhaps"], "--cache_latents must be true or false, got 'perhaps'"),
        (["--no-cache_latents", "x"], "--no-cache_latents takes no value"),
        (["--learning-rate", "1"], "--learning-rate is not an option (did you mean learning_rate?)"),
        (["--learning_r", "1"], "--learning_r is not an option (did you mean learning_rate?)"),
        (["--double_blocks_to_swap", "some"], "--double_blocks_to_swap must be a whole number, got 'some'"),
        (["--config_file"], "--config_file takes one value"),
        (["--num_process", "2"], "--num_process is not an option (did you mean num_processes?)"),
        (["--num_machine", "2"], "--num_machine is not an option (did you mean num_machines?)"),
        (["--machine_rnk", "2"], "--machine_rnk is not an option (did you mean machine_rank?)"),
    ],
)
def test_mistaken_flag_is_one_sentence(argv, sentence):
    assert [*map(str, problems(*argv))] == [sentence]


def test_a_flag_may_have_been_meant_for_the_command_that_reads_it():
    reading = train_script.read_command_line(
        FluxLora, ["--jsn", "--extra_accelerate_launch_arg", "x"], [*LAUNCH_FLAGS, "json"]
    ).problems
    assert [str(problem_of_flag.arguments["hint"]) for problem_of_flag in reading] == [
        " (did you mean json?)",
        " (did you mean extra_accelerate_launch_args?)",
    ]


@given(st.lists(st.sampled_from(["--seed", "--no-cache_latents", "-1", "--foo=", "--", "-", "--=x", ""]) | st.text()))
def test_no_command_line_is_too_strange_for_a_sentence(argv):
    flags, leftover = train_script.read_flags(FluxLora, argv)
    assert all(isinstance(name, str) for name in flags)
    assert all(str(problem).strip() for problem in leftover)


def test_missing_file_does_not_hide_other_mistakes(tmp_path):
    leftover = problems("--config_file", str(tmp_path / "run"), "--learning_rate", "x", "--foo")
    assert [*map(str, leftover)] == [
        "--foo is not an option",
        f"{tmp_path / 'run.toml'} does not exist",
        "--learning_rate must be a number, got 'x'",
    ]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", ". is a folder; name a file"),
        (".", ". is a folder; name a file"),
        (os.sep, f"{os.sep} is a folder; name a file"),
        ("~no-such-user/run", f"{NOBODYS} does not exist"),
        ("~no-such-user/run.toml", f"{NOBODYS} does not exist"),
    ],
)
def test_a_config_file_that_is_none_is_one_sentence(name, sentence):
    assert [str(problem) for problem in problems("--config_file", name)][:1] == [str(sentence)]


def test_flags_win_over_file_and_file_over_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'learning_rate = "5e-5"\n[a]\ncache_latents = true\nseed = 0\ncaption_extention = "txt"\nepoch = 2\n'
    )
    argv = ["--config_file", str(path.with_suffix("")), "--seed", "7", "--no-cache_latents", "--logit_mean", "-1e-1"]
    reading = read_command_line(FluxLora, argv)
    config = reading.config
    assert (config.optim.learning_rate, config.steps.seed, config.cache.cache_latents) == (5e-5, 7, False)
    assert (config.noise.logit_mean, config.captions.caption_extension) == (-0.1, ".txt")
    notes = "\n".join(map(str, reading.notes))
    assert "in run.toml: epoch is ignored" in notes
    assert "in run.toml: caption_extention is an old name" in notes


def test_all_shapes_of_flags():
    argv = ["--cache_latents", "--xformers=false", "--text_encoder_lr", "1e-5", "2e-5", "--optimizer_args"]
    argv += ["weight_decay=0.1", "betas=0.9,0.99", "--caption_prefix=--x", "--seed", "1", "--seed", "2"]
    config = read_command_line(SdxlLora, argv).config
    assert config.cache.latents
    assert config.optim.text_encoder_lr == (1e-5, 2e-5)
    assert config.optim.optimizer_args == ("weight_decay=0.1", "betas=0.9,0.99")
    assert (config.captions.caption_prefix, config.steps.seed) == ("--x", 2)


def test_output_config_writes_what_differs_and_never_overwrites(tmp_path):
    argv = ["--config_file", tmp_path / "new", "--output_config", "--seed", 0, "--wandb_api_key", "s3cret"]
    done = run("sdxl_train", *argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert read_toml(tmp_path / "new.toml") == {"seed": 0}
    again = run("sdxl_train", *argv)
    assert again.returncode == 2
    assert again.stderr == f"error: {tmp_path / 'new.toml'} already exists; name another file or delete it first\n"


def test_output_config_needs_a_file(capsys):
    with pytest.raises(SystemExit) as ended:
        train_script.read_command_line(FluxLora, ["--output_config"])
    wanted = "error: --output_config needs --config_file, which names the file to write\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, wanted)


def test_main_trains_and_tells_what_only_training_finds(capsys, monkeypatch):
    trained = []
    module = type(sys)("library.cli.train")
    module.train = lambda config, notes, began: trained.append((config, notes))
    monkeypatch.setitem(sys.modules, "library.cli.train", module)
    assert train_script.main(FluxLora, ["--seed", "3", "--mem_eff_attn"]) == 0
    ((config, notes),) = trained
    assert config.steps.seed == 3
    assert capsys.readouterr().err == f"note: {notes[0]}\n" and "mem_eff_attn is ignored" in str(notes[0])

    def fails(config, notes, began):
        raise ConfigError("model.safetensors does not exist\noutput_dir is full")

    module.train = fails
    with pytest.raises(SystemExit) as e:
        train_script.main(FluxLora, [])
    assert e.value.code == 1
    assert capsys.readouterr().err == "error: model.safetensors does not exist\nerror: output_dir is full\n"
