"""Commands that start a training, as guides write them and scripts of a shell keep them."""

import contextlib

import pytest

from library import importers
from library.config.problems import ConfigError
from library.config.schema import option_values
from library.importers import command_line
from tests.config.arriving import CONFIGS, differing

EXPECTED = {"network_dim": 8, "learning_rate": 5e-5, "optimizer_args": ("weight_decay=0.1", "betas=0.9,0.99")}
FLAGS = ["--network_dim=8", "--learning_rate 5e-5", '--optimizer_args "weight_decay=0.1" "betas=0.9,0.99"']
STARTS = "accelerate launch --num_cpu_threads_per_process 1 sdxl_train_network.py"


def imported(folder, text, name="train.sh"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return importers.import_file(path, CONFIGS)


@pytest.mark.parametrize(
    "text",
    [
        " \\\n  ".join([STARTS, *FLAGS]),
        " ^\n  ".join([STARTS, *FLAGS]),
        " `\r\n  ".join([STARTS, *FLAGS]),
        " \\  \n".join([STARTS, *FLAGS]),
        "\\\n  ".join([STARTS, *FLAGS]),
        "\n  ".join([STARTS, *FLAGS]),
        " ".join([STARTS, *FLAGS]),
        "```bash\n" + " \\\n".join([STARTS, FLAGS[0], "# --learning_rate 1 \\", *FLAGS[1:]]) + "\n```\n",
        "cd sd-scripts\n" + " ".join(["CUDA_VISIBLE_DEVICES=0", STARTS.replace("sdxl", "./sd-scripts/sdxl"), *FLAGS]),
        " ".join([r'python "D:\my tools\sd-scripts\sdxl_train_network.py"', *FLAGS]),
        " ".join(["python make_captions.py --batch_size 4 folder\n", STARTS, *FLAGS]),
        " ".join(["kohya train sdxl_train_network", *FLAGS]),
        "\n".join(["RANK=8", 'export ARGS="weight_decay=0.1"', " ".join([STARTS, *FLAGS]).replace("=8", "=$RANK")]),
        "\n".join(["$rank = 8  # of the adapter", " ".join([STARTS, *FLAGS]).replace("=8", "=$rank")]),
        "\n".join(["set RANK=8", " ".join([STARTS, *FLAGS]).replace("=8", "=%RANK%")]),
    ],
)
def test_command_becomes_training(tmp_path, text):
    result = imported(tmp_path, text)
    assert result.config.script == "sdxl_train_network"
    assert differing(option_values(result.config), EXPECTED) == {}
    assert not result.notes and not result.unknown()
    assert importers.is_command(text)


@pytest.mark.parametrize(
    ("script", "flags", "ours", "expected"),
    [
        ("train_db", "--v_parameterization", "train_db", {"v_parameterization": True}),
        ("finetune/fine_tune", "--max_train_steps 9", "fine_tune", {"max_train_steps": 9}),
        ("flux_train", "--blocks_to_swap 2", "flux_train", {"blocks_to_swap": 2}),
        ("src/musubi_tuner/krea2_train_network", "--dit a.safetensors", "krea_2_train_network", {}),
        ("src/musubi_tuner/zimage_train", "--dit a.safetensors", "zimage_train", {"timestep_sampling": "sigma"}),
        ("sdxl_train_network", "--seed 1 --text_encoder_lr1=1e-5 --text_encoder_lr2=2e-5", "sdxl_train_network",
         {"text_encoder_lr": (1e-5, 2e-5)}),
        ("train", "--model_family=sdxl --model_type=lora --lora_rank=3", "sdxl_train_network", {"network_dim": 3}),
    ],
)  # fmt: skip
def test_script_chooses_training(tmp_path, script, flags, ours, expected):
    result = imported(tmp_path, f"accelerate launch {script}.py {flags}")
    assert result.config.script == ours
    assert differing(option_values(result.config), expected) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("accelerate launch sd3_train_network.py --seed 1", "sd-scripts is for SD3"),
        ("python src/musubi_tuner/wan_train_network.py --dit a", "musubi-tuner is for Wan"),
        ("python hunyuan_image_train_network.py --seed 1", "is for HunyuanImage"),
        ("deepspeed --num_gpus=1 train.py --deepspeed --config cat.toml", "settings of cat.toml: import that file"),
        ("python run.py config/cat.yaml", "settings of config/cat.yaml: import that file"),
        ("python cascade_train.py --seed 1", "cascade_train.py is not a script"),
        ("python gen_img.py --ckpt a --prompt 'it's'", "no command that starts a training"),
        ("a cat\na dog --n bad", "no command that starts a training"),
        ('accelerate launch sdxl_train.py --vae "a', "quote that is never closed"),
        ('f="a.py"\nf="b.py"\naccelerate launch $f --seed 1', r"chooses its script when it runs \(\$f\)"),
    ],
)
def test_other_command_is_refused_in_a_sentence(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        imported(tmp_path, text, "train.txt")


def test_what_only_the_script_knows_is_named(tmp_path):
    text = f"{STARTS} --seed=5 --max_train_steps=$([Math]::Ceiling($n / 2)) --unet_lr $lr ${{more[@]}} --lowram stray"
    result = imported(tmp_path, text.replace("process 1", "process 1 --num_processes 2"))
    notes = " | ".join(map(str, result.notes))
    assert option_values(result.config)["seed"] == 5
    for named in ("--max_train_steps '$([Math]::Ceiling($n/2))'", "--unet_lr '$lr'", "${more[@]}", "num_processes = 2"):
        assert named in notes
    assert "max_train_steps" not in {outcome.key for outcome in result.outcomes}


def test_only_the_first_of_several_trainings_is_imported(tmp_path):
    result = imported(tmp_path, f"{STARTS} --seed 1\n{STARTS} --seed 2\n")
    assert option_values(result.config)["seed"] == 1
    assert "several commands" in str(result.notes[0])


def test_flags_take_precedence_over_the_file_that_they_name(tmp_path):
    (tmp_path / "cat.toml").write_text("[a]\nseed = 1\n[b]\nnetwork_dim = 8\n")
    result = imported(tmp_path, f"{STARTS} --config_file {tmp_path / 'cat'} --seed 2")
    values = option_values(result.config)
    assert (values["seed"], values["network_dim"]) == (2, 8)


def test_last_of_two_equal_flags_counts():
    assert command_line.flags_of(["--a", "1", "--b", "2", "--a", "3", "4"]) == {"a": ["3", "4"], "b": ["2"]}
    assert command_line.flags_of(["x", "--a=1", "2"]) == {"": ["x", "2"], "a": ["1"]}


@pytest.mark.parametrize("text", ["seed = 1\n# python sdxl_train.py --seed 1", "a cat", ""])
def test_other_text_is_no_command(text):
    assert not importers.is_command(text)


@pytest.mark.parametrize(
    "text",
    [
        "(" + "." * 60_000,
        "$(" * 30_000,
        "accelerate launch " * 3_000,
        "a\n" + "--\n" * 20_000,
        "\\ " * 20_000,
        "A=" + "$A" * 30_000 + f"\n{STARTS} --seed $A",
        "set " + " " * 60_000,
    ],
)
def test_no_text_takes_long(tmp_path, text):
    """Each is read in a fraction of a second; a pattern that tries everything twice would need hours."""
    importers.is_command(text)
    with contextlib.suppress(ConfigError):
        imported(tmp_path, text + "\nx --seed")
    with pytest.raises(ConfigError, match="bytes"):
        imported(tmp_path, text * 40)


def test_variables_that_grow_without_end_are_left_as_they_are():
    read = []

    class Counted(dict):
        def get(self, name, default=None):
            read.append(name)
            return super().get(name, default)

    word = "$a" * 20_000
    assert command_line.fill_variables(word, Counted(a="$a" * 2000)) == word and len(read) < 5
    assert command_line.fill_variables("${x}/b", {"x": "$y c", "y": "q"}) == "q c/b"
