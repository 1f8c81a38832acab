"""Files of musubi-tuner, ai-toolkit and OneTrainer for FLUX.2: what carries over, and that every key has an outcome."""

import tomllib

import pytest

from library import families, importers
from library.config.schema import changed, flatten_sections

CONFIGS = {script: families.config_class(script) for script in families.RUNS}
MUSUBI = """
model_version = "klein-base-9b"
dit = "flux-2-klein-base-9b.safetensors"
vae = "flux2-vae.safetensors"
vae_dtype = "bfloat16"
text_encoder = "qwen_3_8b.safetensors"
dataset_config = "data.toml"
sdpa = true
mixed_precision = "bf16"
timestep_sampling = "flux2_shift"
weighting_scheme = "none"
optimizer_type = "adamw8bit"
learning_rate = 1e-4
gradient_checkpointing = true
fp8_base = true
fp8_scaled = true
fp8_text_encoder = true
blocks_to_swap = 16
network_module = "networks.lora_flux_2"
network_dim = 32
max_train_epochs = 16
output_dir = "out"
output_name = "lora"
"""
AITOOLKIT = {
    "job": "extension",
    "config": {
        "name": "k",
        "process": [
            {
                "type": "sd_trainer",
                "training_folder": "out",
                "network": {"type": "lora", "linear": 32, "linear_alpha": 32},
                "datasets": [
                    {"folder_path": "images", "caption_ext": "txt", "resolution": [1024], "control_path": "before"}
                ],
                "train": {
                    "batch_size": 1,
                    "steps": 3000,
                    "lr": 1e-4,
                    "optimizer": "adamw8bit",
                    "dtype": "bf16",
                    "timestep_type": "shift",
                    "gradient_checkpointing": True,
                    "noise_scheduler": "flowmatch",
                },
                "model": {
                    "name_or_path": "black-forest-labs/FLUX.2-klein-base-4B",
                    "arch": "flux2_klein_4b",
                    "quantize": True,
                    "layer_offloading": True,
                },
                "sample": {
                    "sampler": "flowmatch",
                    "width": 1024,
                    "height": 1024,
                    "guidance_scale": 4,
                    "sample_steps": 25,
                    "samples": [{"prompt": "a cat", "ctrl_img": "cat.png"}],
                },
            }
        ],
    },
}
ONETRAINER = {
    "training_method": "LORA",
    "model_type": "FLUX_2",
    "base_model_name": "black-forest-labs/FLUX.2-klein-base-9B",
    "resolution": "1024",
    "transformer": {"train": True, "weight_dtype": "INT_8"},
    "text_encoder": {"train": False},
    "vae": {"weight_dtype": "FLOAT_32"},
    "batch_size": 2,
    "learning_rate": 3e-5,
    "layer_filter_preset": "blocks",
    "timestep_distribution": "LOGIT_NORMAL",
    "dynamic_timestep_shifting": True,
    "layer_offload_fraction": 0.5,
    "gradient_checkpointing": "CPU_OFFLOADED",
}


@pytest.mark.parametrize("name", ["musubi", "aitoolkit", "onetrainer"])
def test_every_key_has_a_fate_and_the_options_mean_the_same(name):
    settings = {"musubi": tomllib.loads(MUSUBI), "aitoolkit": AITOOLKIT, "onetrainer": ONETRAINER}[name]
    imported = importers.import_content(settings, CONFIGS)
    values = flatten_sections(changed(imported.config))
    assert imported.config.script == "flux_2_train_network" and "network_args" not in values
    assert imported.outcomes and not [
        outcome for outcome in imported.outcomes if "supported by this trainer" in str(outcome.text)
    ]
    if name == "musubi":
        assert set(settings) <= {outcome.key for outcome in imported.outcomes}
        assert values["pretrained_model_name_or_path"] == settings["dit"] and values["vae"] == settings["vae"]
        assert values["text_encoder"] == settings["text_encoder"] and values["model_version"] == "klein-base-9b"
        assert "timestep_sampling" not in values and values["vae_dtype"] == "bfloat16"  # the former is ours, too
        assert values["fp8_base"] and values["cache_latents_to_disk"] and values["blocks_to_swap"] == 16
    elif name == "aitoolkit":
        assert values["model_version"] == "klein-base-4b" and values["blocks_to_swap"] == 19 and values["fp8_base"]
        assert "timestep_sampling" not in values and "--ci cat.png" in imported.texts["sample_prompts"]
        assert 'control_directory = "before"' in imported.texts["dataset_config"]
    else:
        assert values["model_version"] == "klein-base-9b" and values["int8_base"] and values["blocks_to_swap"] == 10
        assert "timestep_sampling" not in values and "vae_dtype" not in values


def test_the_kind_of_model_is_reported_by_the_module_or_by_keys_of_its_own():
    short = {"network_module": "networks.lora_flux_2", "dit": "a.safetensors", "network_dim": 8}
    imported = importers.import_content(short, CONFIGS)
    assert imported.config.model.model_version == "dev" and imported.config.noise.timestep_sampling == "sigma"
    both = {"dit": "a.safetensors", "text_encoder": "b.safetensors"}
    for own in ({"fp8_text_encoder": True}, {"model_version": "klein-4b"}):
        assert importers.import_content(both | own, CONFIGS).config.script == "flux_2_train"


@pytest.mark.parametrize(
    ("model", "version"),
    [
        ("FLUX.2-dev", "dev"),
        ("FLUX.2-klein-4B", "klein-4b"),
        ("FLUX.2-klein-base-4B", "klein-base-4b"),
        ("FLUX.2-klein-9B", "klein-9b"),
    ],
)
def test_which_model_is_meant_is_known_by_its_name(model, version):
    imported = importers.import_content({**ONETRAINER, "base_model_name": f"black-forest-labs/{model}"}, CONFIGS)
    assert imported.config.model.model_version == version


def test_the_scale_of_dev_is_the_guidance_that_it_reads():
    process = AITOOLKIT["config"]["process"][0]
    dev = process | {"model": {"name_or_path": "black-forest-labs/FLUX.2-dev", "arch": "flux2"}}
    imported = importers.import_content({"config": {"name": "d", "process": [dev]}}, CONFIGS)
    assert "--g 4" in imported.texts["sample_prompts"] and "--l" not in imported.texts["sample_prompts"]
    samples = {"samples": [{"prompt": "a cat", "cfg_scale": 4.0}]}
    for model, flag in {"dev": "--g 4.0", "klein-base-4B": "--l 4.0"}.items():
        settings = {**ONETRAINER, "base_model_name": f"black-forest-labs/FLUX.2-{model}", **samples}
        assert flag in importers.import_content(settings, CONFIGS).texts["sample_prompts"]
