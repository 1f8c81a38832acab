"""Files of musubi-tuner, ai-toolkit and OneTrainer for Qwen-Image: what carries over, an outcome for every key."""

import tomllib

import pytest

from library import families, importers
from library.config.schema import changed, flatten_sections

CONFIGS = {script: families.config_class(script) for script in families.RUNS}
MUSUBI = """
dit = "qwen_image_bf16.safetensors"
vae = "qwen_image_vae.safetensors"
text_encoder = "qwen_2.5_vl_7b.safetensors"
model_version = "original"
dataset_config = "data.toml"
sdpa = true
mixed_precision = "bf16"
timestep_sampling = "shift"
discrete_flow_shift = 2.2
weighting_scheme = "none"
optimizer_type = "adamw8bit"
learning_rate = 5e-5
gradient_checkpointing = true
gradient_checkpointing_cpu_offload = true
fp8_base = true
fp8_scaled = true
fp8_vl = true
max_data_loader_n_workers = 2
persistent_data_loader_workers = true
network_module = "networks.lora_qwen_image"
network_dim = 16
max_train_epochs = 16
save_every_n_epochs = 1
seed = 42
output_dir = "out"
output_name = "lora"
"""
AITOOLKIT = {
    "job": "extension",
    "config": {
        "name": "q",
        "process": [
            {
                "type": "sd_trainer",
                "training_folder": "out",
                "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
                "save": {"dtype": "float16", "save_every": 250, "max_step_saves_to_keep": 4},
                "datasets": [{"folder_path": "images", "caption_ext": "txt", "resolution": [512, 1024]}],
                "train": {
                    "batch_size": 1,
                    "steps": 3000,
                    "lr": 1e-4,
                    "optimizer": "adamw8bit",
                    "dtype": "bf16",
                    "timestep_type": "weighted",
                    "gradient_checkpointing": True,
                    "noise_scheduler": "flowmatch",
                },
                "model": {
                    "name_or_path": "Qwen/Qwen-Image",
                    "arch": "qwen_image:2512",
                    "quantize": True,
                    "qtype": "qfloat8",
                    "quantize_te": True,
                    "qtype_te": "qfloat8",
                    "layer_offloading": True,
                },
                "sample": {
                    "sampler": "flowmatch",
                    "sample_every": 250,
                    "width": 1024,
                    "height": 1024,
                    "guidance_scale": 4,
                    "sample_steps": 25,
                    "prompts": ["a cat"],
                },
            }
        ],
    },
}
ONETRAINER = {
    "training_method": "LORA",
    "model_type": "QWEN",
    "base_model_name": "Qwen/Qwen-Image",
    "resolution": "512",
    "transformer": {"train": True, "weight_dtype": "FLOAT_8"},
    "text_encoder": {"train": False},
    "batch_size": 2,
    "learning_rate": 3e-4,
    "layer_filter_preset": "attn-mlp",
    "timestep_distribution": "LOGIT_NORMAL",
    "dynamic_timestep_shifting": True,
    "gradient_checkpointing": "CPU_OFFLOADED",
    "layer_offload_fraction": 0.5,
}


def read(settings):
    imported = importers.import_content(settings, CONFIGS)
    assert imported.config.script == "qwen_image_train_network"
    return imported, flatten_sections(changed(imported.config))


@pytest.mark.parametrize("name", ["musubi", "aitoolkit", "onetrainer"])
def test_every_key_has_a_fate_and_the_options_mean_the_same(name):
    settings = {"musubi": tomllib.loads(MUSUBI), "aitoolkit": AITOOLKIT, "onetrainer": ONETRAINER}[name]
    imported, values = read(settings)
    assert imported.outcomes and not [
        outcome for outcome in imported.outcomes if "supported by this trainer" in str(outcome.text)
    ]
    if name == "musubi":
        assert set(settings) <= {outcome.key for outcome in imported.outcomes}
        assert values["pretrained_model_name_or_path"] == "qwen_image_bf16.safetensors"
        assert values["text_encoder"].endswith("7b.safetensors") and values["vae"] == "qwen_image_vae.safetensors"
        assert values["timestep_sampling"] == "shift" and "discrete_flow_shift" not in values  # 2.2 is ours, too
        assert values["fp8_base"] and values["cpu_offload_checkpointing"] and values["cache_latents_to_disk"]
        assert values["network_args"] == ("train_modulation=True",)
    elif name == "aitoolkit":
        assert values["pretrained_model_name_or_path"] == "Qwen/Qwen-Image" and values["network_dim"] == 16
        assert values["fp8_base"] and values["blocks_to_swap"] == 59
        assert "--l 4" in imported.texts["sample_prompts"] and imported.config.noise.model_prediction_type == "raw"
    else:
        assert values["blocks_to_swap"] == 30 and imported.config.noise.timestep_sampling == "qwen_shift"
        assert values["network_dim"] == 16 and "network_args" not in values


def test_the_defaults_of_musubi_tuner_are_set_where_its_file_is_silent():
    short = {"network_module": "networks.lora_qwen_image", "dit": "a.safetensors", "network_dim": 8}
    imported, _ = read(short)
    assert imported.config.noise.discrete_flow_shift == 1.0 and imported.config.noise.timestep_sampling == "sigma"
    full = importers.import_content({"dit": "a.safetensors", "model_version": "original"}, CONFIGS)
    assert full.config.script == "qwen_image_train"


def test_timesteps_and_weights_of_musubi_mean_what_they_mean_there():
    base = tomllib.loads(MUSUBI) | {
        "weighting_scheme": "cosmap",
        "min_timestep": 100,
        "max_timestep": 700,
        "preserve_distribution_shape": True,
    }
    imported = importers.import_content(base, CONFIGS)
    kept_keys = {outcome.key for outcome in imported.of("kept")}
    assert {"weighting_scheme", "min_timestep", "max_timestep", "preserve_distribution_shape"} <= kept_keys
    noise = imported.config.noise
    assert noise.timestep_range == (0.1, 0.7) and noise.redraws_timesteps and noise.discrete_flow_shift == 2.2
    imported = importers.import_content(
        base | {"timestep_sampling": "sigma"}, CONFIGS
    )  # its table is counted from the noisiest step
    assert imported.config.noise.timestep_range == (0.3, 0.9) and imported.config.noise.discrete_flow_shift == 1.0
    assert {"min_timestep", "max_timestep", "discrete_flow_shift"} <= {
        outcome.key for outcome in imported.of("changed")
    }
    whole = importers.import_content(
        base | {"timestep_sampling": "sigma", "min_timestep": 0, "max_timestep": 1000}, CONFIGS
    )
    assert whole.config.noise.timestep_range == (0.0, 1.0)


def test_weights_that_flux_1_does_not_apply_are_reported_to_be_left_out():
    settings = {
        "dit": "k.safetensors",
        "text_encoder1": "t5.safetensors",
        "network_module": "networks.lora_flux",
        "network_dim": 4,
        "timestep_sampling": "shift",
        "weighting_scheme": "cosmap",
    }
    imported = importers.import_content(settings, CONFIGS)
    (said,) = [str(outcome.text) for outcome in imported.of("ignored") if outcome.key == "weighting_scheme"]
    assert "sigma_scaled" in said and imported.config.noise.weighting_scheme != "cosmap"


def test_the_range_of_ai_toolkit_is_counted_from_the_noisiest_timestep():
    def imported(kind):
        settings = {
            "job": "extension",
            "config": {
                "name": "q",
                "process": [
                    AITOOLKIT["config"]["process"][0]
                    | {"train": {"timestep_type": kind, "min_denoising_steps": 200, "max_denoising_steps": 900}}
                ],
            },
        }
        return importers.import_content(settings, CONFIGS)

    converted = imported("linear")
    assert converted.config.noise.timestep_range == (0.1, 0.8)
    converted = imported("sigmoid")
    ignored = {outcome.key for outcome in converted.of("ignored")}
    assert {"train.min_denoising_steps", "train.max_denoising_steps"} <= ignored
    assert converted.config.noise.timestep_range == (0.0, 1.0)
