"""Files of other trainers for Anima: what carries over, and that every key has an outcome."""

import pytest

from library import families, importers
from library.config.schema import changed, flatten_sections

CONFIGS = {script: families.config_class(script) for script in families.RUNS}
PARTS = {"qwen3": "qwen.safetensors", "vae": "vae.safetensors", "timestep_sampling": "sigmoid", "attn_mode": "torch"}
SD_SCRIPTS = {
    **PARTS,
    "pretrained_model_name_or_path": "a.safetensors",
    "network_module": "networks.lora_anima",
    "unsloth_offload_checkpointing": True,
    "network_train_unet_only": True,
}
KOHYA_SS = {
    **{f"anima_{key}": value for key, value in PARTS.items()},
    "anima_checkbox": True,
    "LoRA_type": "Anima",
    "pretrained_model_name_or_path": "a.safetensors",
    "anima_unsloth_offload_checkpointing": True,
    "unet_lr": 1e-4,
    "text_encoder_lr": 0,
    "flux1_clip_l": "c.safetensors",
}
AITOOLKIT = {
    "job": "extension",
    "config": {
        "name": "a",
        "process": [
            {
                "type": "sd_trainer",
                "training_folder": "out",
                "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
                "datasets": [{"folder_path": "images"}],
                "train": {"steps": 10, "lr": 1e-4, "optimizer": "adamw"},
                "model": {"name_or_path": "circlestone-labs/Anima", "arch": "anima"},
            }
        ],
    },
}
ONETRAINER = {
    "training_method": "LORA",
    "model_type": "ANIMA",
    "base_model_name": "circlestone-labs/Anima",
    "transformer": {"train": True},
    "text_encoder": {"train": False},
    "learning_rate": 3e-5,
}


@pytest.mark.parametrize("settings", [SD_SCRIPTS, KOHYA_SS, AITOOLKIT, ONETRAINER])
def test_every_key_has_a_fate_and_the_options_mean_the_same(settings):
    imported = importers.import_content(settings, CONFIGS)
    values = flatten_sections(changed(imported.config))
    assert imported.config.script == "anima_train_network" and values["network_train_unet_only"]
    assert not [outcome for outcome in imported.outcomes if "supported by this trainer" in str(outcome.text)]
    if settings in (SD_SCRIPTS, KOHYA_SS):
        assert settings.keys() <= {outcome.key for outcome in imported.outcomes}
        assert (values["qwen3"], values["vae"]) == ("qwen.safetensors", "vae.safetensors")
        assert values["cpu_offload_checkpointing"] and imported.config.network.module == "networks.lora_anima"
