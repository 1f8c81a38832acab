"""Files of lora-scripts and LoRA_Easy_Training_Scripts, which are options of sd-scripts in forms of their own."""

import pytest

from library import importers
from library.config.problems import ConfigError
from library.config.schema import option_values
from tests.config.arriving import CONFIGS, differing, sets_of

LORA_SCRIPTS = {
    "model_train_type": "sdxl-lora",
    "pretrained_model_name_or_path": "./x.safetensors",
    "train_data_dir": "./t",
    "network_module": "lycoris.kohya",
    "lycoris_algo": "lokr",
    "lokr_factor": 8,
    "conv_dim": 4,
    "conv_alpha": 1,
    "dropout": 0.1,
    "network_dim": 32,
    "network_alpha": 16,
    "optimizer_type": "Prodigy",
    "prodigy_d_coef": "2.0",
    "optimizer_args_custom": ["weight_decay=0.01"],
    "lr_restart_cycles": 3,
    "lr_scheduler": "cosine_with_restarts",
    "enable_preview": True,
    "positive_prompts": "1girl",
    "negative_prompts": "bad",
    "sample_width": 768,
    "sample_every_n_epochs": 2,
    "gpu_ids": ["0"],
    "unet_lr": "1e-4",
    "reg_data_dir": "",
    "bogus_key": 3,
    "enable_base_weight": True,
    "base_weights": "/a.safetensors\n/b.safetensors",
    "base_weights_multiplier": "0.5\n1",
    "enable_block_weights": False,
    "down_lr_weight": "1,1",
    "ui_custom_params": "seed = 7\n[x]\nclip_skip = 2",
}
EASY = {
    "subsets": [
        {"num_repeats": 4, "image_dir": "/cats", "keep_tokens": 1, "shuffle_caption": True, "name": "x", "newer": 3}
    ],
    "train_mode": {"train_mode": "lora"},
    "general_args": {
        "args": {
            "pretrained_model_name_or_path": "m",
            "mixed_precision": "bf16",
            "sdxl": True,
            "seed": 23,
            "max_train_epochs": 10,
            "keep_tokens_separator": "|||",
        },
        "dataset_args": {"resolution": 896, "batch_size": 2},
    },
    "network_args": {
        "args": {
            "network_dim": 32,
            "network_alpha": 16.0,
            "network_args": {"conv_dim": 8, "algo": "lokr", "dora_wd": False},
        }
    },
    "optimizer_args": {
        "args": {
            "optimizer_type": "LoraEasyCustomOptimizer.came.CAME",
            "lr_scheduler": "cosine",
            "learning_rate": 1e-4,
            "lr_scheduler_type": "LoraEasyCustomOptimizer.CustomOptimizers.CosineAnnealingWarmupRestarts",
            "lr_scheduler_args": {"min_lr": 1e-6},
            "lr_scheduler_num_cycles": 4,
            "warmup_ratio": 0.1,
            "optimizer_args": {"weight_decay": "0.1", "betas": "0.9,0.99"},
        }
    },
    "saving_args": {"args": {"output_dir": "/o/${replace}", "easy_name": "cat", "save_toml": True}},
    "bucket_args": {"dataset_args": {"enable_bucket": True, "min_bucket_reso": 256}},
    "extra_args": {"args": {"v_parameterization": {"value": True, "is_dataset": False}}},
}


def keys_of(settings):
    """The leaves of a file of LoRA_Easy_Training_Scripts."""
    tables = [inner for table in settings.values() if isinstance(table, dict) for inner in table.values()]
    return {"subsets", "train_mode", *(key for inner in tables if isinstance(inner, dict) for key in inner)}


def test_every_key_of_lora_scripts_is_accounted_for_and_arrives():
    imported = importers.import_content(LORA_SCRIPTS, CONFIGS)
    assert imported.trainer == "lora-scripts" and {outcome.key for outcome in imported.outcomes} >= LORA_SCRIPTS.keys()
    expected = {
        "network_module": "lycoris.kohya",
        "network_args": ("algo=lokr", "conv_dim=4", "conv_alpha=1", "factor=8"),
        "network_dropout": 0.1,
        "optimizer_type": "Prodigy",
        "lr_scheduler_num_cycles": 3,
        "unet_lr": 1e-4,
        "optimizer_args": ("weight_decay=0.01", "d_coef=2.0"),
        "sample_every_n_epochs": 2,
        "seed": 7,
        "clip_skip": 2,
        "base_weights": ("/a.safetensors", "/b.safetensors"),
        "base_weights_multiplier": (0.5, 1.0),
    }
    assert differing(option_values(imported.config), expected) == {}
    assert imported.texts["sample_prompts"] == "1girl --w 768 --h 512 --l 7 --s 24 --d 2333 --n bad\n"
    assert (
        [outcome.option for outcome in imported.unknown()] == ["bogus_key"]
        and not imported.problems
        and not imported.guess
    )


def test_prompts_and_weights_that_are_switched_off_there_are_off_here():
    off = {"enable_preview": False, "enable_base_weight": False}
    imported = importers.import_content({**LORA_SCRIPTS, **off}, CONFIGS)
    assert (
        not imported.texts
        and not imported.config.network.base_weights
        and imported.config.sample.sample_every_n_epochs is None
    )
    on = {"enable_block_weights": True, "network_module": "networks.lora"}
    assert "down_lr_weight=1,1" in importers.import_content({**LORA_SCRIPTS, **on}, CONFIGS).config.network.network_args


@pytest.mark.parametrize(
    ("settings", "script"),
    [
        ({"model_train_type": "flux-lora", "network_module": "networks.lora_flux"}, "flux_train_network"),
        ({"model_train_type": "sdxl-finetune", "learning_rate": 1e-5}, "sdxl_train"),
        (
            {"metadata": {"name": "x", "train_type": "flux-lora"}, "data": {"model_type": "chroma"}},
            "flux_train_network",
        ),
    ],
)
def test_the_train_type_of_lora_scripts_chooses_the_script(settings, script):
    assert importers.import_content(settings, CONFIGS).config.script == script


@pytest.mark.parametrize(
    ("kind", "words"),
    [("sd3-lora", "SD3"), ("lumina-lora", "Lumina"), ("new-lora", "new-lora")],
)
def test_other_train_types_are_refused_by_name(kind, words):
    with pytest.raises(ConfigError, match=words):
        importers.import_content({**LORA_SCRIPTS, "model_train_type": kind}, CONFIGS)


def test_every_key_of_easy_scripts_is_accounted_for_and_arrives(tmp_path):
    imported = importers.import_content(EASY, CONFIGS)
    assert imported.config.script == "sdxl_train_network" and {outcome.key for outcome in imported.outcomes} >= keys_of(
        EASY
    )
    expected = {
        "network_module": "lycoris.kohya",
        "network_args": ("conv_dim=8", "algo=lokr"),
        "network_dim": 32,
        "optimizer_type": "CAME",
        "optimizer_args": ("weight_decay=0.1", "betas=0.9,0.99"),
        "lr_warmup_steps": 0.1,
        "lr_scheduler": "cosine_with_restarts",
        "lr_scheduler_type": "",
        "lr_scheduler_args": (),
        "lr_scheduler_num_cycles": 4,
        "output_dir": "/o/cat",
        "seed": 23,
        "v_parameterization": True,
    }
    assert (
        differing(option_values(imported.config), expected) == {}
        and not imported.of("unknown")
        and not imported.problems
    )
    (tmp_path / "data.toml").write_text(imported.texts["dataset_config"], encoding="utf-8")
    (cats,) = sets_of(tmp_path / "data.toml")
    assert (cats.resolution, cats.batch_size, cats.subsets[0].num_repeats) == ((896, 896), 2, 4)
    assert any("newer is ignored" in str(note) for note in imported.notes)


def test_models_of_easy_scripts():
    flux = {"flux_args": {"args": {"clip_l": "c", "t5xxl": "t", "ae": "a"}}, "general_args": {"args": {"seed": 1}}}
    imported = importers.import_content(flux, CONFIGS)
    assert (
        imported.config.script == "flux_train_network"
        and imported.config.network.network_module == "networks.lora_flux"
    )
    older = {"general_args": {"args": {"v2": False, "seed": 1}}}
    assert importers.import_content(older, CONFIGS).config.script == "train_network"
    older["general_args"]["args"]["v2"] = True
    with pytest.raises(ConfigError, match="Stable Diffusion 2"):
        importers.import_content(older, CONFIGS)
    word = {
        "train_mode": {"train_mode": "ti"},
        "general_args": {"args": {"sdxl": True}},
        "textual_inversion_args": {"args": {"token_string": "zorb", "init_word": "cat"}},
    }
    imported = importers.import_content(word, CONFIGS)
    assert imported.config.script == "sdxl_train_textual_inversion" and imported.config.embedding.token_string == "zorb"
