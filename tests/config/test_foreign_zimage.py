"""Files of musubi-tuner, ai-toolkit and OneTrainer for Z-Image: what carries over, an outcome for every key."""

import tomllib

import pytest

from library import families, importers
from library.config.problems import ConfigError
from library.config.schema import changed, flatten_sections

CONFIGS = {script: families.config_class(script) for script in families.RUNS}
MUSUBI = """
dit = "z_image_bf16.safetensors"
vae = "ae.safetensors"
text_encoder = "qwen_3_4b.safetensors"
dataset_config = "data.toml"
sdpa = true
use_32bit_attention = true
mixed_precision = "bf16"
timestep_sampling = "shift"
discrete_flow_shift = 2.0
weighting_scheme = "none"
optimizer_type = "adamw8bit"
learning_rate = 1e-4
gradient_checkpointing = true
fp8_base = true
fp8_scaled = true
fp8_llm = true
blocks_to_swap = 20
network_module = "networks.lora_zimage"
network_dim = 32
base_weights = ["zimage_turbo_training_adapter_v2.safetensors"]
max_train_epochs = 16
output_dir = "out"
output_name = "lora"
"""
AITOOLKIT = {
    "job": "extension",
    "config": {
        "name": "z",
        "process": [
            {
                "type": "sd_trainer",
                "training_folder": "out",
                "network": {"type": "lora", "linear": 32, "linear_alpha": 32},
                "datasets": [{"folder_path": "images", "caption_ext": "txt", "resolution": [512, 1024]}],
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
                    "name_or_path": "Tongyi-MAI/Z-Image-Turbo",
                    "arch": "zimage:turbo",
                    "quantize": True,
                    "assistant_lora_path": "zimage_turbo_training_adapter_v2.safetensors",
                    "layer_offloading": True,
                },
                "sample": {
                    "sampler": "flowmatch",
                    "width": 1024,
                    "height": 1024,
                    "guidance_scale": 1,
                    "sample_steps": 8,
                    "prompts": ["a cat"],
                },
            }
        ],
    },
}
ONETRAINER = {
    "training_method": "LORA",
    "model_type": "Z_IMAGE",
    "base_model_name": "Tongyi-MAI/Z-Image",
    "resolution": "512",
    "transformer": {"train": True, "weight_dtype": "INT_8"},
    "text_encoder": {"train": False},
    "batch_size": 2,
    "learning_rate": 3e-4,
    "layer_filter_preset": "attn-mlp",
    "timestep_distribution": "LOGIT_NORMAL",
    "gradient_checkpointing": "CPU_OFFLOADED",
    "layer_offload_fraction": 0.5,
}


@pytest.mark.parametrize("name", ["musubi", "aitoolkit", "onetrainer"])
def test_every_key_has_a_fate_and_the_options_mean_the_same(name):
    settings = {"musubi": tomllib.loads(MUSUBI), "aitoolkit": AITOOLKIT, "onetrainer": ONETRAINER}[name]
    imported = importers.import_content(settings, CONFIGS)
    values = flatten_sections(changed(imported.config))
    assert imported.config.script == "zimage_train_network"
    assert imported.outcomes and not [
        outcome for outcome in imported.outcomes if "supported by this trainer" in str(outcome.text)
    ]
    if name == "musubi":
        assert set(settings) <= {outcome.key for outcome in imported.outcomes}
        assert (
            values["pretrained_model_name_or_path"] == "z_image_bf16.safetensors" and values["vae"] == "ae.safetensors"
        )
        assert values["text_encoder"] == "qwen_3_4b.safetensors" and values["blocks_to_swap"] == 20
        assert "timestep_sampling" not in values and "discrete_flow_shift" not in values  # these are ours, too
        assert values["fp8_base"] and values["base_weights"] and values["cache_latents_to_disk"]
        assert "network_args" not in values and "model_version" not in values
    elif name == "aitoolkit":
        assert values["model_version"] == "turbo" and values["network_dim"] == 32 and values["blocks_to_swap"] == 29
        assert values["assistant_lora"] == "zimage_turbo_training_adapter_v2.safetensors"
        assert "--l 0" in imported.texts["sample_prompts"] and values["fp8_base"]
    else:
        assert values["model_version"] == "base" and values["int8_base"] and values["blocks_to_swap"] == 15
        assert imported.config.noise.timestep_sampling == "sigmoid" and "network_args" not in values


def test_scales_in_prompts_are_counted_as_the_models_own_pipeline_does():
    """There 1 is without a negative prompt, here 0."""
    process = AITOOLKIT["config"]["process"][0]
    sample = process["sample"] | {"prompts": ["a cat --l 4.5", "a dog"], "guidance_scale": 1}
    imported = importers.import_content({"config": {"name": "z", "process": [process | {"sample": sample}]}}, CONFIGS)
    assert [line.split("--l ")[1] for line in imported.texts["sample_prompts"].splitlines()] == ["3.5", "0"]
    assert any(
        outcome.key == "sample.guidance_scale" and "less 1" in str(outcome.text) for outcome in imported.outcomes
    )
    samples = [{"prompt": "a cat", "cfg_scale": 5.0, "enabled": True}, {"prompt": "a dog", "cfg_scale": 0.5}]
    imported = importers.import_content({**ONETRAINER, "samples": samples}, CONFIGS)
    assert [line.split("--l ")[1].split()[0] for line in imported.texts["sample_prompts"].splitlines()] == ["4", "0"]


def test_the_kind_of_model_is_reported_by_the_module_or_by_keys_of_its_own():
    short = {"network_module": "networks.lora_zimage", "dit": "a.safetensors", "network_dim": 8}
    imported = importers.import_content(short, CONFIGS)
    assert imported.config.noise.discrete_flow_shift == 1.0 and imported.config.noise.timestep_sampling == "sigma"
    both = {"dit": "a.safetensors", "text_encoder": "b.safetensors"}
    assert importers.import_content(both | {"fp8_llm": True}, CONFIGS).config.script == "zimage_train"
    assert importers.import_content(both, CONFIGS, "zimage_train").config.script == "zimage_train"
    with pytest.raises(ConfigError, match="does not say which: name it with kohya import --script"):
        importers.import_content(both, CONFIGS)


@pytest.mark.parametrize(
    ("model", "version"),
    [("Tongyi-MAI/Z-Image", "base"), ("Tongyi-MAI/Z-Image-Turbo", "turbo"), ("ostris/Z-Image-De-Turbo", "base")],
)
def test_turbo_is_known_by_its_name_where_a_file_is_imported(model, version):
    imported = importers.import_content({**ONETRAINER, "base_model_name": model}, CONFIGS)
    assert imported.config.model.model_version == version


@pytest.mark.parametrize(("module", "algo"), [("networks.loha", "loha"), ("networks.lokr", "lokr")])
def test_other_kinds_of_adapters_of_musubi_are_those_of_lycoris(module, algo):
    settings = tomllib.loads(MUSUBI) | {"network_module": module, "network_args": ["rank_dropout=0.1", "factor=8"]}
    imported = importers.import_content(settings, CONFIGS)
    network = imported.config.network.module, imported.config.network.network_args
    assert isinstance(imported.config, CONFIGS["zimage_train_network"]) and not imported.problems
    assert network == ("lycoris.kohya", (f"algo={algo}", "rank_dropout=0.1", "factor=8", "bypass_mode=True"))
    kontext = {"dit": "k.safetensors", "text_encoder1": "t5.safetensors", "network_module": module, "network_dim": 8}
    assert importers.import_content(kontext, CONFIGS).config.network.network_args == (f"algo={algo}",)


def test_a_transformer_beside_the_base_model_is_the_one_that_is_trained():
    """As OneTrainer's preset for De-Turbo has it; offload_fraction is accounted for, too."""
    file = "https://huggingface.co/ostris/Z-Image-De-Turbo/blob/main/z_image_de_turbo_v1_bf16.safetensors"
    part = {"train": True, "weight_dtype": "INT_8", "model_name": file, "offload_fraction": 0.6}
    imported = importers.import_content(
        ONETRAINER
        | {
            "base_model_name": "Tongyi-MAI/Z-Image-Turbo",
            "transformer": part,
            "gradient_checkpointing": None,
            "layer_offload_fraction": 0,
        },
        CONFIGS,
    )
    model = imported.config.model
    assert model.pretrained_model_name_or_path == "ostris/Z-Image-De-Turbo" and model.model_version == "base"
    assert model.text_encoder == model.vae == "Tongyi-MAI/Z-Image-Turbo"
    assert (
        not [outcome for outcome in imported.outcomes if "support" in str(outcome.text)]
        and imported.config.memory.blocks_to_swap == 18
    )
    flux = {
        "training_method": "LORA",
        "model_type": "FLUX_DEV_1",
        "base_model_name": "black-forest-labs/FLUX.1-dev",
        "transformer": {"model_name": "krea.safetensors"},
        "vae": {"model_name": "ae.safetensors"},
    }
    model = importers.import_content(flux, CONFIGS).config.model
    assert model.pretrained_model_name_or_path == "krea.safetensors" and model.ae == "ae.safetensors"
    assert model.clip_l == model.t5xxl == "black-forest-labs/FLUX.1-dev"


def test_a_preset_of_onetrainer_has_the_arguments_that_it_keeps_for_the_optimizer():
    """Its presets name the optimizer alone; its page takes the arguments from those that are kept for each."""
    preset_optimizers = {
        "fused_back_pass": True,
        "beta1": None,
        "eps": 1e-30,
        "eps2": 0.001,
        "relative_step": False,
        "scale_parameter": False,
        "warmup_init": False,
        "stochastic_rounding": True,
    }
    settings = {
        "training_method": "FINE_TUNE",
        "model_type": "Z_IMAGE",
        "optimizer": {"optimizer": "ADAFACTOR"},
        "optimizer_defaults": {"ADAFACTOR": preset_optimizers, "ADAMW": {"beta1": 0.5}},
        "resolution": "128",
        "text_encoder": {"train": False},
        "train_dtype": "BFLOAT_16",
        "weight_dtype": "BFLOAT_16",
    }
    imported = importers.import_content(settings, CONFIGS)
    assert imported.config.optim.fused_backward_pass and not imported.notes and not imported.problems
    arguments = ("eps=1e-30,0.001", "scale_parameter=False", "relative_step=False", "warmup_init=False")
    assert set(arguments) <= set(imported.config.optim.optimizer_args)
    keys = {outcome.key for outcome in imported.outcomes}
    assert {f"optimizer_defaults.ADAFACTOR.{name}" for name in preset_optimizers} | {
        "optimizer_defaults.ADAMW.beta1"
    } <= keys


def test_networks_and_adapters_beside_the_model_of_ai_toolkit():
    model = {
        "arch": "zimage:deturbo",
        "name_or_path": "ostris/Z-Image-De-Turbo",
        "extras_name_or_path": "Tongyi-MAI/Z-Image-Turbo",
    }
    process = {"type": "diffusion_trainer", "network": {"type": "lora"}, "model": model}
    settings = {"job": "extension", "config": {"name": "z", "process": [process]}}
    chosen = importers.import_content(settings, CONFIGS).config.model
    assert chosen.text_encoder == chosen.vae == "Tongyi-MAI/Z-Image-Turbo" and chosen.model_version == "base"
    adapter = "ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_v2.safetensors"
    process["model"] = {
        "arch": "zimage:turbo",
        "name_or_path": "Tongyi-MAI/Z-Image-Turbo",
        "assistant_lora_path": adapter,
    }
    imported = importers.import_content(settings, CONFIGS)
    assert imported.config.model.model_version == "turbo" and imported.config.network.assistant_lora == adapter
    (said,) = [outcome.text for outcome in imported.outcomes if outcome.key == "model.assistant_lora_path"]
    assert adapter in str(said) and "assistant_lora" in str(said)
