"""Back to kohya_ss: nothing of the file is lost, and what is loaded there is what was trained here."""

import csv
import json
from pathlib import Path

import pytest

from library import importers
from library.cli import main
from library.config.building import build_config, replace_options
from library.config.problems import ConfigError
from library.config.schema import options_of
from library.families import RUNS, config_class
from library.importers import kohya_export, kohya_ss

CONFIGS = {script: config_class(script) for script in RUNS}
GOLDEN = Path(__file__).parents[1] / "golden"
PAGE_KEYS = {row["key"] for row in csv.DictReader((GOLDEN / "gui_keys.csv").open(encoding="utf-8"))}
PAGE_KEYS |= {"token_string", "init_word", "num_vectors_per_token", "weights", "template"}  # of a tab without a table
FLAGS = {
    line.split(",")[0].strip('"').removeprefix("--")
    for line in (GOLDEN / "sd_scripts_flags.csv").read_text("utf-8").splitlines()
}

BASES = {
    "sdxl lora": {
        "sdxl": True,
        "LoRA_type": "LyCORIS/LoKr",
        "factor": 8,
        "conv_dim": "4",
        "LyCORIS_preset": "full",
        "optimizer": "Prodigy",
        "optimizer_args": "a=1 b=2",
        "max_train_steps": 0,
        "epoch": 3,
        "lr_warmup": "10",
        "lr_scheduler": "cosine",
        "learning_rate": "1.0",
        "unet_lr": 1,
        "text_encoder_lr": 0,
        "xformers": True,
        "max_resolution": "1024,1024",
        "seed": "",
        "future_key": {"a": [1]},
        "lora_network_weights": "",
        "additional_parameters": "--zero_terminal_snr --log_prefix 'a b'",
        "sample_prompts": "a cat\na dog",
        "wandb_api_key": "mine",
    },
    "flux lora": {
        "flux1_checkbox": True,
        "LoRA_type": "Flux1",
        "ae": "a",
        "clip_l": "c",
        "t5xxl": "t",
        "split_mode": True,
        "text_encoder_lr": 1e-5,
        "t5xxl_lr": 2e-5,
        "unet_lr": 1e-4,
        "guidance_scale": 0,
        "clip_skip": 2,
        "flux1_cache_text_encoder_outputs": True,
        "compile": True,
        "compile_dynamic": "true",
    },
    "sdxl dreambooth": {
        "sdxl": True,
        "learning_rate": 1e-5,
        "learning_rate_te1": 0,
        "learning_rate_te2": 1e-6,
        "max_train_steps": "9",
        "save_model_as": "same as source model",
        "clip_l": "sd3",
        "xformers": "none",
        "persistent_data_loader_workers": 1,
    },
    "flux finetune": {
        "flux1_checkbox": True,
        "image_folder": "C:\\i",
        "train_dir": "C:\\d",
        "use_latent_files": "No",
        "caption_metadata_filename": "m.json",
        "flux1_clip_l": "c",
        "dataset_repeats": "40",
        "flux_fused_backward_pass": True,
        "optimizer": "Adafactor",
    },
    "sdxl word": {
        "sdxl": True,
        "token_string": "zorb",
        "init_word": "cat",
        "num_vectors_per_token": 8,
        "weights": "w.pt",
        "template": "style template",
        "save_model_as": "ckpt",
        "max_train_steps": 100,
        "caption_dropout_rate": 0.05,
        "additional_parameters": "--max_grad_norm 0.5",
        "noise_offset_type": "Original",
        "huggingface_repo_id": "False",
    },
}


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_what_is_not_changed_comes_back_as_it_was(base):
    imported = importers.import_content(base, CONFIGS)
    fields, _ = importers.export(imported.config, CONFIGS, base, imported.texts.get("sample_prompts", ""))
    assert fields == base and list(fields) == sorted(fields)


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_without_a_base_the_meaning_comes_back(base):
    imported = importers.import_content(base, CONFIGS)
    fields, lost = importers.export(imported.config, CONFIGS, None, imported.texts.get("sample_prompts", ""))
    again = importers.import_content(fields, CONFIGS)
    assert lost == [] and again.config.script == imported.config.script
    differing = {name for name, _, _ in importers.compare_configs(imported.config, again.config)}
    # What the page always says, where nothing said here means the same.
    assert differing <= {"network_module", "text_encoder_lr", "save_precision", "optimizer_type", "sdpa", "resolution"}


def test_a_change_touches_only_its_own_fields():
    base = BASES["sdxl lora"]
    config = replace_options(
        importers.import_content(base, CONFIGS).config, network_dim=32, log_prefix="c", unet_lr=2.0
    )
    fields, lost = importers.export(config, CONFIGS, base, base["sample_prompts"])
    changed = {key for key in fields if fields[key] != base.get(key)}
    assert changed == {"network_dim", "additional_parameters", "unet_lr", "learning_rate", "t5xxl_lr"} and not lost
    assert fields["additional_parameters"] == "--zero_terminal_snr --log_prefix c" and fields["learning_rate"] == 1.0
    assert fields["future_key"] == {"a": [1]} and fields["text_encoder_lr"] == 0 and fields["wandb_api_key"] == "mine"


@pytest.mark.parametrize(("warmup", "percent", "steps"), [("100%", 100, 0), ("5%", 5, 0), (1, 0, 1)])
def test_a_warmup_of_all_steps_is_not_one_step(warmup, percent, steps):
    values = {"lr_scheduler": "cosine", "lr_warmup_steps": warmup}
    config = build_config(CONFIGS["sdxl_train_network"], values, notes=[])
    fields, _ = importers.export(config, CONFIGS)
    assert (fields["lr_warmup"], fields["lr_warmup_steps"]) == (percent, steps)
    again = importers.import_content(fields, CONFIGS).config
    assert repr(again.optim.lr_warmup_steps) == repr(config.optim.lr_warmup_steps)


def test_a_new_field_wins_over_a_flag_that_was_typed():
    base = {"sdxl": True, "LoRA_type": "Standard", "seed": 1, "additional_parameters": "--seed 5 --bogus x"}
    config = replace_options(importers.import_content(base, CONFIGS).config, seed=7)
    fields, _ = importers.export(config, CONFIGS, base)
    assert fields["seed"] == 7 and fields["additional_parameters"] == "--bogus x"


def test_what_has_no_place_is_named():
    config = build_config(
        CONFIGS["sdxl_train_network"], {"ema_decay": 0.9, "network_args": ["network_reg_dims=a"]}, notes=[]
    )
    _, lost = importers.export(config, CONFIGS)
    assert any("ema_decay" in str(line) for line in lost) and any("network_reg_dims" in str(line) for line in lost)


def test_a_base_of_another_tab_is_refused():
    with pytest.raises(ConfigError, match="DreamBooth"):
        importers.export(build_config(CONFIGS["sdxl_train_network"], {}), CONFIGS, BASES["sdxl dreambooth"])


def test_every_field_is_one_of_the_page_and_every_flag_one_of_the_scripts():
    option_names = {name for config in CONFIGS.values() for name in options_of(config)}
    assert kohya_export.SAME_NAMED_FIELDS <= PAGE_KEYS and kohya_export.TYPED <= FLAGS
    assert option_names >= kohya_export.SAME_NAMED_FIELDS | kohya_export.TYPED
    assert kohya_ss.SWITCHES.keys() <= PAGE_KEYS
    for script, config in CONFIGS.items():
        if config.family not in kohya_ss.TRAINED:
            with pytest.raises(ConfigError, match="kohya_ss does not train"):
                importers.export(build_config(config, {}), CONFIGS)
            continue
        if config.kind not in kohya_export.EXPORTED_KINDS:
            with pytest.raises(ConfigError, match="save it as TOML"):
                importers.export(build_config(config, {}), CONFIGS)
            continue
        fields, lost = importers.export(build_config(config, {}), CONFIGS)
        assert fields.keys() <= PAGE_KEYS and not lost, script
        assert not [key for key, value in fields.items() if value is None]
        assert [family for switch, family in kohya_ss.SWITCHES.items() if fields.get(switch)] == [
            *([config.family] if config.family != "sd15" else [])  # the model without a box
        ]


def test_the_command_writes_json_and_never_over_a_file(tmp_path, capsys):
    (tmp_path / "p.txt").write_text("a cat\n", encoding="utf-8")
    run, out, base = tmp_path / "run.toml", tmp_path / "x.json", tmp_path / "old.json"
    run.write_text(f"network_dim = 32\nema_decay = 0.9\nsample_prompts = '{tmp_path / 'p.txt'}'\n", encoding="utf-8")
    base.write_text(json.dumps({"sdxl": True, "LoRA_type": "Standard", "mine": 1}), encoding="utf-8")
    assert main.main(["import", "--to", "kohya_ss", str(run), "-o", str(out), "--base", str(base)]) == 0
    fields = json.loads(out.read_text(encoding="utf-8"))
    assert fields["network_dim"] == 32 and fields["mine"] == 1 and fields["sample_prompts"] == "a cat"
    assert "ema_decay" in capsys.readouterr().out
    assert main.main(["import", "--to", "kohya_ss", str(run), "-o", str(out)]) == 1
    assert main.main(["import", "--to", "kohya_ss", str(run)]) == 0
    assert json.loads(capsys.readouterr().out)["sdxl"] is True


LAUNCH = {
    "multi_gpu": True,
    "num_processes": "2",
    "gpu_ids": "0, 1",
    "num_machines": 1,
    "main_process_port": 0,
    "num_cpu_threads_per_process": 2,
    "extra_accelerate_launch_args": "",
}


def test_how_a_training_is_started_is_read_and_written_back():
    settings = BASES["sdxl lora"] | LAUNCH
    imported, read = importers.import_content(settings, CONFIGS), importers.read_launch_settings(settings)
    assert (read["num_processes"], read["gpu_ids"]) == (2, "0,1")
    assert read["main_process_port"] is None and read["num_cpu_threads_per_process"] is None
    told = {outcome.key: outcome.kind for outcome in imported.outcomes}
    assert [told[key] for key in LAUNCH] == ["changed", "changed", "changed", "empty", "empty", "empty", "empty"]
    for same in (read, {**read, "num_processes": "2"}, None):  # as the form holds them, too, and from the shell
        fields, _ = importers.export(imported.config, CONFIGS, settings, launch=same)
        assert {key: fields[key] for key in LAUNCH} == LAUNCH
    fields, _ = importers.export(
        imported.config, CONFIGS, settings, launch={**read, "gpu_ids": "", "num_processes": "1"}
    )
    assert (fields["gpu_ids"], fields["num_processes"], fields["multi_gpu"]) == ("", 1, False)
    fields, _ = importers.export(
        imported.config, CONFIGS, launch={"gpu_ids": "3", "extra_accelerate_launch_args": "--cpu"}
    )
    assert (
        fields["gpu_ids"] == "3" and fields["extra_accelerate_launch_args"] == "--cpu" and "num_processes" not in fields
    )


@pytest.mark.parametrize(
    "key, value",
    [
        ("num_processes", 10**9),
        ("main_process_port", 99999),
        ("num_machines", "two"),
        ("extra_accelerate_launch_args", "--module x"),
    ],
)
def test_what_the_launcher_would_refuse_is_not_taken_over(key, value):
    settings = BASES["sdxl lora"] | {key: value}
    assert importers.read_launch_settings(settings)[key] in (1, None, ())
    outcome = next(outcome for outcome in importers.import_content(settings, CONFIGS).outcomes if outcome.key == key)
    assert outcome.kind in ("ignored", "empty")
