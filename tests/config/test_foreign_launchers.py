"""Scripts of other trainers whose settings are variables of a shell, and how a command launches its training."""

import json

import pytest

from library import importers
from library.config.problems import ConfigError
from library.config.schema import option_values
from tests.config.arriving import CONFIGS, differing

VARIABLES = {
    "pretrained_model": "./models/a.safetensors",
    "model_type": "sd1.5",
    "parameterization": 0,
    "train_data_dir": "./train/cat",
    "reg_data_dir": "",
    "network_module": "networks.lora",
    "train_unet_only": 1,
    "noise_offset": 0,
    "optimizer_type": "AdamW8bit",
    "save_state": 1,
    "resume": "",
    "clip_skip": 2,
    "multi_gpu": 0,
    "algo": "lokr",
    "conv_dim": 4,
    "use_wandb": 0,
}
FLAGS = ["--pretrained_model_name_or_path=$pretrained_model", "--train_data_dir=$train_data_dir"]
FLAGS += ["--network_module=$network_module", "--mixed_precision=bf16", "--logging_dir=./logs"]
TAIL = {
    "train.sh": """
extArgs=()
trainer_file="./scripts/train_network.py"
if [ $model_type == "sdxl" ]; then
  trainer_file="./scripts/sdxl_train_network.py"
fi
if [[ $save_state == 1 ]]; then extArgs+=("--save_state"); fi
python -m accelerate.commands.launch ${launchArgs[@]} --num_cpu_threads_per_process=4 $trainer_file \\
  FLAGS \\
  --xformers ${extArgs[@]}
""",
    "train.ps1": """
$ext_args = [System.Collections.ArrayList]::new()
$trainer_file = "./scripts/train_network.py"
if ($model_type -eq "sdxl") {
  $trainer_file = "./scripts/sdxl_train_network.py"
}
if ($save_state -eq 1) {
  [void]$ext_args.Add("--save_state")
}
python -m accelerate.commands.launch $launch_args --num_cpu_threads_per_process=4 $trainer_file `
  FLAGS `
  --xformers $ext_args
Read-Host | Out-Null ;
""",
}


def launcher(name, **changes):
    lines = [
        f'${key} = "{value}" # 数据' if name.endswith("ps1") else f'{key}="{value}" # 数据'
        for key, value in (VARIABLES | changes).items()
    ]
    mark = " `\n  " if name.endswith("ps1") else " \\\n  "
    return "\n".join(lines) + TAIL[name].replace("FLAGS", mark.join(FLAGS))


def imported(folder, name, text):
    (folder / name).write_text(text, encoding="utf-8")
    return importers.import_file(folder / name, CONFIGS)


@pytest.mark.parametrize("name", TAIL)
@pytest.mark.parametrize(
    ("changes", "script", "expected"),
    [
        ({}, "train_network", {"clip_skip": 2, "save_state": True, "network_train_unet_only": True}),
        ({"model_type": "sdxl"}, "sdxl_train_network", {"log_with": "tensorboard"}),
        ({"model_type": "flux", "network_module": "networks.lora_flux"}, "flux_train_network", {"save_state": True}),
        ({"noise_offset": 0.1, "parameterization": 1}, "train_network", {"v_parameterization": True}),
        ({"network_module": "lycoris.kohya"}, "train_network", {"network_args": ("conv_dim=4", "algo=lokr")}),
        ({"resume": "./a b-state"}, "train_network", {"resume": "./a b-state"}),
    ],
)  # fmt: skip
def test_a_launcher_of_lora_scripts_has_the_script_and_flags_that_it_chooses(tmp_path, name, changes, script, expected):
    text = launcher(name, **changes)
    result = imported(tmp_path, name, text)
    assert importers.is_command(text)
    assert result.config.script == script and not result.problems and not result.unknown()
    common = {"train_data_dir": "./train/cat", "optimizer_type": "AdamW8bit", "mixed_precision": "bf16"}
    values = option_values(result.config) | {"resume": str(result.config.steps.resume or "")}
    assert differing(values, common | expected) == {}
    assert not any("left out" in str(note) for note in result.notes)


@pytest.mark.parametrize("name", TAIL)
def test_a_launcher_of_a_model_that_is_not_trained_here_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="lora-scripts is for Stable Diffusion 2"):
        imported(tmp_path, name, launcher(name, model_type="sd2.0"))


@pytest.mark.parametrize(("sdxl", "script"), [(0, "train_network"), (1, "sdxl_train_network")])
def test_a_launcher_with_a_file_of_settings_reads_that(tmp_path, sdxl, script):
    text = (
        f'$config_file = "./config/cat.toml"\n$sdxl = {sdxl}\n$multi_gpu = 1\n'
        '$script_name = if ($sdxl) { "sdxl_train_network.py" } else { "train_network.py" }\n'
        'python -m accelerate.commands.launch $launch_args "./scripts/$script_name" `\n'
        "  --config_file=$config_file `\n  $ext_args\n"
    )
    missing = imported(tmp_path, "train_by_toml.ps1", text)
    (problem,) = missing.problems
    assert missing.config.script == script and "./config/cat.toml, which cannot be read" in str(problem)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "cat.toml").write_text("seed = 3", encoding="utf-8")
    result = imported(tmp_path, "train_by_toml.ps1", text)
    assert option_values(result.config)["seed"] == 3 and not result.problems
    assert result.launch["num_processes"] == 2


@pytest.mark.parametrize(
    ("flags", "launch", "words"),
    [
        ("--num_processes 2 --multi_gpu --gpu_ids 0,1", {"num_processes": 2, "gpu_ids": "0,1"}, "num_processes = 2"),
        ("--num_processes=4 --num_machines=2", {"num_processes": 4, "num_machines": 2}, "num_machines = 2"),
        ("--gpu_ids=1 --main_process_port 29501", {"gpu_ids": "1", "main_process_port": 29501}, "gpu_ids = 1"),
        ("--num_processes -3 --gpu_ids '$(rm)'", {"num_processes": 1}, "num_processes = -3"),
        ("--num_processes $GPUS", {}, "left out, as only the script itself knows it when it runs: --num_processes"),
        ("--multi_gpu", {}, "--multi_gpu, which means all GPUs"),
        ("--mixed_precision fp16", {}, "mixed_precision = fp16 is an option of `accelerate launch`"),
        ("--num_processes 1 --mixed_precision no", {"num_processes": 1}, ""),
    ],
)
def test_what_is_launched_how_arrives(tmp_path, flags, launch, words):
    result = imported(tmp_path, "a.sh", f"accelerate launch {flags} sdxl_train_network.py --network_dim 8\n")
    assert result.launch == launch
    notes = " | ".join(map(str, result.notes))
    assert words in notes if words else not notes


ENV = """
# export MODEL_FAMILY="flux"
export MODEL_FAMILY='sdxl'   # of the model
export MODEL_TYPE="lora"
MODEL_NAME=/models/xl.safetensors
export LEARNING_RATE=2e-5
export MAX_NUM_STEPS=300
export RESOLUTION=768
export RESOLUTION_TYPE="pixel"
export DATALOADER_CONFIG="config/data.json"
export OUTPUT_DIR="out/$MODEL_TYPE"
export PROMPT=${PROMPT}
export DEBUG_EXTRA_ARGS="--report_to=tensorboard"
export TRAINER_EXTRA_ARGS="--lora_rank=8"
export TRAINER_EXTRA_ARGS="${TRAINER_EXTRA_ARGS} ${DEBUG_EXTRA_ARGS}"
TRAINER_EXTRA_ARGS+=" --seed=7"
"""
DATA = [{"id": "cats", "type": "local", "instance_data_dir": "/cats", "caption_strategy": "textfile"}]


@pytest.mark.parametrize("name", ["config.env", ".env", "CONFIG.ENV"])
def test_variables_of_simpletuner_are_its_settings(tmp_path, name):
    (tmp_path / "data.json").write_text(json.dumps(DATA), encoding="utf-8")
    result = imported(tmp_path, name, ENV)
    expected = {
        "pretrained_model_name_or_path": "/models/xl.safetensors",
        "learning_rate": 2e-5,
        "max_train_steps": 300,
        "output_dir": "out/lora",
        "network_dim": 8,
        "log_with": "tensorboard",
        "seed": 7,
    }
    values = option_values(result.config)
    assert result.config.script == "sdxl_train_network" and differing(values, expected) == {}
    assert "/cats" in result.texts["dataset_config"]
    assert {"MODEL_FAMILY", "DATALOADER_CONFIG", "lora_rank"} <= {outcome.key for outcome in result.outcomes} | {
        outcome.key.removeprefix("--") for outcome in result.outcomes
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "export TRAINING_NUM_PROCESSES=1",
        "A=" + "$A" * 30_000,
        "\n".join(f"A{n}=$A{n - 1}$A{n - 1}" for n in range(2000)),
        "export MODEL_FAMILY=$(rm -rf /)",
    ],
)
def test_other_variables_are_refused_in_one_sentence(tmp_path, text):
    with pytest.raises(ConfigError) as refused:
        imported(tmp_path, "config.env", text)
    assert "has no settings of SimpleTuner" in str(refused.value)
