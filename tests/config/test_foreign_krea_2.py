"""Files of musubi-tuner, ai-toolkit and OneTrainer for Krea 2."""

import pytest

from library import families, importers
from library.config.schema import changed, flatten_sections
from tests.config.arriving import of_aitoolkit

CONFIGS = {script: families.config_class(script) for script in families.RUNS}
ADAPTER = "ostris/krea2_turbo_training_adapter/krea2_turbo_training_adapter_v1.safetensors"
EVERY = ("train_text_fusion=True", "train_embedders=True")
MUSUBI = {
    "dit": "raw.safetensors",
    "vae": "qwen_image_vae.safetensors",
    "text_encoder": "qwen3vl_4b_bf16.safetensors",
    "dataset_config": "data.toml",
    "timestep_sampling": "krea2_shift",
    "weighting_scheme": "none",
    "network_module": "networks.lora_krea2",
    "network_dim": 32,
    "network_alpha": 32,
    "network_args": ["exclude_patterns=['first']"],
    "blocks_to_swap": 26,
    "fp8_base": True,
    "fp8_scaled": True,
    "turbo_dit": "turbo.safetensors",
    "turbo_dit_cache": True,
}
AITOOLKIT = {
    "network.type": "lora",
    "network.linear": 16,
    "model.arch": "krea2:turbo",
    "model.name_or_path": "krea/Krea-2-Turbo",
    "model.assistant_lora_path": ADAPTER,
    "train.timestep_type": "shift",
}
ONETRAINER = {
    "training_method": "LORA",
    "model_type": "KREA_2",
    "base_model_name": "krea/Krea-2-Raw",
    "layer_filter_preset": "attn-mlp",
    "layer_filter": "attn,ff",
    "timestep_distribution": "LOGIT_NORMAL",
    "dynamic_timestep_shifting": True,
    "transformer": {"train": True, "weight_dtype": "INT_W8A8", "offload_fraction": 0.3},
    "vae": {"weight_dtype": "FLOAT_32"},
}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (MUSUBI, {"network_args": (MUSUBI["network_args"][0], *EVERY), "blocks_to_swap": 26, "network_dim": 32}),
        (of_aitoolkit(AITOOLKIT | {"network.network_kwargs.ignore_if_contains": []}), {"network_args": EVERY}),
        (of_aitoolkit(AITOOLKIT | {"network.network_kwargs.ignore_if_contains": ["ff"]}), {"network_args": None}),
        (of_aitoolkit(AITOOLKIT), {"model_version": "turbo", "assistant_lora": ADAPTER, "network_args": EVERY}),
        (ONETRAINER, {"network_args": EVERY[:1], "blocks_to_swap": 8, "model_version": "raw", "int8_base": True}),
    ],
)
def test_every_key_has_a_fate_and_the_options_mean_the_same(settings, expected):
    imported = importers.import_content(settings, CONFIGS)
    assert imported.config.script == "krea_2_train_network"
    assert not [outcome for outcome in imported.outcomes if "supported by this trainer" in str(outcome.text)]
    values = flatten_sections(changed(imported.config))
    assert {name: values.get(name) for name in expected} == expected
    assert imported.config.noise.timestep_sampling == "krea2_shift"
    whole = {**settings, "training_method": "FINE_TUNE"} if settings is ONETRAINER else {}
    assert not whole or importers.import_content(whole, CONFIGS).config.script == "krea_2_train"
