"""Files of OneTrainer: what they say, and what they leave to OneTrainer's defaults, arrives key by key."""

import json

import pytest

from library import importers
from library.cli import main
from library.config.formats import read_toml
from library.config.schema import option_values
from tests.config.arriving import CONFIGS, SDXL_LORA, differing, nested, sets_of

ENCODERS_OFF = {"text_encoder": {"train": False}, "text_encoder_2": {"train": False}}
SDXL_FULL = {"model_type": "STABLE_DIFFUSION_XL_10_BASE", "training_method": "FINE_TUNE"}
FLUX_LORA = {"model_type": "FLUX_DEV_1", "training_method": "LORA"}

ONETRAINER_DEFAULTS = {
    "network_dim": 16,
    "network_alpha": 1.0,
    "mixed_precision": "fp16",
    "save_precision": "float",
    "gradient_checkpointing": True,
    "enable_bucket": True,
    "max_bucket_reso": 2048,
    "cache_latents": True,
    "cache_latents_to_disk": True,
    "lr_scheduler": "constant_with_warmup",
    "lr_warmup_steps": 200,
    "max_train_epochs": 100,
    "learning_rate": 3e-6,
    "optimizer_type": "AdamW",
    "train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "resolution": "512",
    "caption_extension": ".txt",
    "ema_decay": 0.0,
    "no_half_vae": True,
    "save_state_every_n_minutes": 30,
}
# A key of a file of OneTrainer, as it is today or once was -> what it is here. `base` is what else the file says.
ONETRAINER = [
    (SDXL_LORA, {"base_model_name": "b.safetensors"}, {"pretrained_model_name_or_path": "b.safetensors"}),
    (SDXL_LORA, {"output_model_destination": "out/cat.safetensors"}, {"output_dir": "out", "output_name": "cat"}),
    (SDXL_LORA, {"lora_rank": 24, "lora_alpha": 12}, {"network_dim": 24, "network_alpha": 12.0}),
    (SDXL_LORA, {"lora_rank": "24"}, {"network_dim": 24}),
    (SDXL_LORA, {"lora_rank": None}, {"network_dim": 16}),
    (SDXL_LORA, {"lora_rank": ""}, {"network_dim": 16}),
    (SDXL_LORA, {"lora_rank": [3]}, {"network_dim": 16}),
    (SDXL_LORA, {"layer_filter_preset": "full"}, {"network_args": ("conv_dim=16", "conv_alpha=1")}),
    (SDXL_LORA, {"layer_filter_preset": "attn-mlp"}, {"network_args": ()}),
    (
        SDXL_LORA,
        {"lora_decompose": True, "layer_filter_preset": "attn-mlp"},
        {"network_module": "lycoris.kohya", "network_args": ("algo=lora", "dora_wd=True", "preset=attn-mlp")},
    ),
    (SDXL_LORA, {"peft_type": "LOHA"}, {"network_module": "lycoris.kohya", "network_args": ("algo=loha",)}),
    (SDXL_LORA, {"train_dtype": "BFLOAT_16"}, {"mixed_precision": "bf16"}),
    (SDXL_LORA, {"train_dtype": "TFLOAT_32"}, {"mixed_precision": "no", "cuda_allow_tf32": True}),
    (SDXL_LORA, {"output_dtype": "BFLOAT_16"}, {"save_precision": "bf16"}),
    (SDXL_LORA, {"vae.weight_dtype": "FLOAT_16"}, {"no_half_vae": False}),
    (SDXL_LORA, {"vae_weight_dtype": "FLOAT_16"}, {"no_half_vae": False}),
    (SDXL_LORA, {"unet.weight_dtype": "INT_8"}, {"int8_base": True}),
    (SDXL_LORA, {"unet.weight_dtype": "FLOAT_8"}, {"fp8_base_unet": True}),
    (SDXL_LORA, {"weight_dtype": "FLOAT_8"}, {"fp8_base": True}),
    (SDXL_FULL, {"unet.weight_dtype": "BFLOAT_16"}, {"full_bf16": True, "mixed_precision": "bf16"}),
    (SDXL_FULL, {"weight_dtype": "BFLOAT_16"}, {"full_bf16": True, "mixed_precision": "bf16"}),
    (SDXL_FULL, {"unet.weight_dtype": "FLOAT_16"}, {"full_fp16": True, "mixed_precision": "fp16"}),
    (SDXL_FULL, {"unet.weight_dtype": "FLOAT_32"}, {"full_fp16": False, "full_bf16": False, "mixed_precision": "fp16"}),
    (SDXL_LORA, {"gradient_checkpointing": False}, {"gradient_checkpointing": False}),
    (SDXL_LORA, {"unet.gradient_checkpointing": False}, {"gradient_checkpointing": False}),
    (SDXL_LORA, {"gradient_checkpointing": "CPU_OFFLOADED"}, {"cpu_offload_checkpointing": True}),
    (FLUX_LORA, {"gradient_checkpointing": "CPU_OFFLOADED", "layer_offload_fraction": 0.5}, {"blocks_to_swap": 19}),
    (FLUX_LORA, {"transformer.offload_fraction": 0.99}, {"blocks_to_swap": 35, "gradient_checkpointing": True}),
    (
        FLUX_LORA,
        {"transformer.weight_dtype": "NFLOAT_4", "text_encoder_2.weight_dtype": "NFLOAT_4"},
        {"base_bits": 4},
    ),
    (
        FLUX_LORA,
        {"prior.weight_dtype": "FLOAT_W8A8", "train_dtype": "BFLOAT_16"},
        {"fp8_base_unet": True, "fp8_compute": True},
    ),
    (SDXL_LORA, {"learning_rate": 1e-4, "unet.learning_rate": 2e-4}, {"learning_rate": 1e-4, "unet_lr": 2e-4}),
    (
        SDXL_LORA,
        {"learning_rate": 1e-4, "learning_rate_scaler": "BOTH", "batch_size": 4, "gradient_accumulation_steps": 4},
        {"learning_rate": 4e-4},
    ),
    (SDXL_LORA, {"learning_rate": 1e-4}, {"text_encoder_lr": (1e-4, 1e-4)}),
    (
        SDXL_LORA,
        {"learning_rate": 1e-4, "text_encoder.learning_rate": 2e-5, "text_encoder_2.train": False},
        {"text_encoder_lr": (2e-5, 0.0), "network_train_unet_only": False},
    ),
    (
        SDXL_LORA,
        {"train_text_encoder": False, "train_text_encoder_2": False},
        {"network_train_unet_only": True, "cache_text_encoder_outputs": True},
    ),
    (SDXL_LORA, {"unet.train": False}, {"network_train_text_encoder_only": True}),
    (
        SDXL_FULL,
        {"learning_rate": 1e-5, "unet_learning_rate": 2e-5, "text_encoder_2.train": False},
        {"learning_rate": 2e-5, "train_text_encoder": True, "learning_rate_te1": 1e-5, "learning_rate_te2": 0.0},
    ),
    (FLUX_LORA, {"learning_rate": 1e-4}, {"text_encoder_lr": (1e-4, 1e-4), "network_args": ("train_t5xxl=True",)}),
    (SDXL_LORA, {"learning_rate_warmup_steps": 20, "gradient_accumulation_steps": 4}, {"lr_warmup_steps": 5}),
    (SDXL_LORA, {"learning_rate_warmup_steps": 1}, {"lr_warmup_steps": 1.0}),
    (SDXL_LORA, {"learning_rate_warmup_steps": 0}, {"lr_scheduler": "constant", "lr_warmup_steps": 0}),
    (
        SDXL_LORA,
        {"learning_rate_warmup_steps": 0.1, "learning_rate_scheduler": "LINEAR"},
        {"lr_scheduler": "linear", "lr_warmup_steps": 0.1},
    ),
    (
        SDXL_LORA,
        {"learning_rate_scheduler": "COSINE", "learning_rate_min_factor": 0.1},
        {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_min_lr_ratio": 0.1},
    ),
    (
        SDXL_LORA,
        {"learning_rate_scheduler": "COSINE_WITH_HARD_RESTARTS", "learning_rate_cycles": 3},
        {"lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": 3},
    ),
    (SDXL_LORA, {"epochs": 7, "batch_size": 3}, {"max_train_epochs": 7, "train_batch_size": 3}),
    (SDXL_LORA, {"clip_grad_norm": None}, {"max_grad_norm": 0.0}),
    (
        SDXL_LORA,
        {"ema": "CPU", "ema_decay": 0.99, "ema_update_step_interval": 3},
        {"ema_decay": 0.99, "ema_device": "cpu", "ema_every_n_steps": 3},
    ),
    (SDXL_LORA, {"dropout_probability": 0.2}, {"network_dropout": 0.2}),
    (SDXL_LORA, {"text_encoder.dropout_probability": 0.1}, {"caption_dropout_rate": 0.1}),
    (
        SDXL_LORA,
        {"offset_noise_weight": 0.04, "perturbation_noise_weight": 0.1},
        {"noise_offset": 0.04, "ip_noise_gamma": 0.1},
    ),
    (SDXL_LORA, {"min_noising_strength": 0.1, "max_noising_strength": 0.9}, {"min_timestep": 100, "max_timestep": 900}),
    (SDXL_LORA, {"loss_weight_fn": "MIN_SNR_GAMMA", "loss_weight_strength": 4}, {"min_snr_gamma": 4.0}),
    (SDXL_LORA, {"min_snr_gamma": 3}, {"min_snr_gamma": 3.0}),
    (SDXL_LORA, {"mse_strength": 0, "mae_strength": 1}, {"loss_type": "l1"}),
    (
        SDXL_LORA,
        {"huber_strength": 2, "huber_delta": 0.2},
        {"loss_type": "huber", "huber_c": 0.2, "huber_schedule": "constant"},
    ),
    (
        SDXL_LORA,
        {"rescale_noise_scheduler_to_zero_terminal_snr": True, "force_v_prediction": True},
        {"zero_terminal_snr": True, "v_parameterization": True},
    ),
    (SDXL_LORA, {"save_every": 2, "save_every_unit": "EPOCH"}, {"save_every_n_epochs": 2}),
    (SDXL_LORA, {"save_after": 300, "save_after_unit": "STEP"}, {"save_every_n_steps": 300}),
    (
        SDXL_LORA,
        {"save_every": 100, "save_every_unit": "STEP", "save_skip_first": 400},
        {"save_every_n_steps": 100, "save_from_step": 400},
    ),
    (SDXL_LORA, {"backup_after": 2, "backup_after_unit": "HOUR"}, {"save_state_every_n_minutes": 120}),
    (SDXL_LORA, {"resolution": "1024x768"}, {"resolution": "1024,768", "enable_bucket": False}),
    (SDXL_LORA, {"resolution": "512,1024"}, {"resolution": "512;1024", "enable_bucket": True}),
    (SDXL_LORA, {"latent_caching": False}, {"cache_latents": False, "cache_text_encoder_outputs": False}),
    (
        SDXL_LORA,
        {"optimizer": "ADAMW_8BIT", "optimizer_weight_decay": 0.1},
        {"optimizer_type": "AdamW8bit", "optimizer_args": ("weight_decay=0.1",)},
    ),
    (
        SDXL_LORA,
        {"optimizer.optimizer": "ADAFACTOR"},
        {
            "optimizer_type": "Adafactor",
            "optimizer_args": ("scale_parameter=False", "relative_step=False", "warmup_init=False"),
        },
    ),
    (SDXL_FULL, {"optimizer.optimizer": "ADAFACTOR", "optimizer.fused_back_pass": True}, {"fused_backward_pass": True}),
    (
        SDXL_LORA,
        {"optimizer.optimizer": "PRODIGY", "optimizer.beta1": 0.9, "optimizer.d_coef": 2, "optimizer.decouple": True},
        {"optimizer_type": "Prodigy", "optimizer_args": ("betas=0.9,0.999", "d_coef=2", "decouple=True")},
    ),
    (
        SDXL_LORA,
        {"optimizer.optimizer": "SCHEDULE_FREE_ADAMW"},
        {
            "optimizer_type": "AdamWScheduleFree",
            "lr_scheduler": "constant",
            "lr_warmup_steps": 0,
            "optimizer_args": ("weight_decay=0.01", "warmup_steps=200"),
        },
    ),
    (
        FLUX_LORA,
        {"timestep_distribution": "LOGIT_NORMAL", "dynamic_timestep_shifting": True, "noising_weight": 0.5},
        {
            "timestep_sampling": "flux_shift",
            "sigmoid_scale": 1.5,
            "model_prediction_type": "raw",
            "guidance_scale": 1.0,
        },
    ),
    (
        FLUX_LORA,
        {"timestep_distribution": "LOGIT_NORMAL", "timestep_shift": 2},
        {"timestep_sampling": "shift", "discrete_flow_shift": 2.0},
    ),
    (
        FLUX_LORA,
        {"timestep_distribution": "LOGIT_NORMAL", "noising_bias": 0.5, "timestep_shift": 2},
        {
            "timestep_sampling": "sigma",
            "weighting_scheme": "logit_normal",
            "logit_mean": -0.5,
            "discrete_flow_shift": 2.0,
        },
    ),
    (
        FLUX_LORA,
        {"timestep_distribution": "HEAVY_TAIL", "noising_weight": 0.6},
        {"timestep_sampling": "sigma", "weighting_scheme": "mode", "mode_scale": 0.6, "discrete_flow_shift": 1.0},
    ),
    (FLUX_LORA, {}, {"timestep_sampling": "uniform", "t5xxl_max_token_length": 77}),
    (FLUX_LORA, {"timestep_shift": 3}, {"timestep_sampling": "sigma", "discrete_flow_shift": 3.0}),
    (
        FLUX_LORA,
        {"transformer.guidance_scale": 2, "text_encoder_2.attention_mask": True},
        {"guidance_scale": 2.0, "apply_t5_attn_mask": True},
    ),
    (
        FLUX_LORA,
        {"layer_filter_preset": "attn-mlp", **{f"{part}.train": False for part in ENCODERS_OFF}},
        {"network_args": ("img_mod_dim=0", "txt_mod_dim=0", "single_mod_dim=0")},
    ),
    (SDXL_LORA, {"compile": True, "dataloader_threads": 3}, {"compile": True, "max_data_loader_n_workers": 3}),
]


def test_onetrainers_defaults_hold_where_a_preset_says_nothing():
    imported = importers.import_content({**SDXL_LORA, **ENCODERS_OFF}, CONFIGS)
    config = option_values(imported.config)
    assert not differing(config, {k: v for k, v in ONETRAINER_DEFAULTS.items() if k in config})
    assert config["network_train_unet_only"] and config["cache_text_encoder_outputs"]
    told = {outcome.key: str(outcome.text) for outcome in imported.of("default")}
    assert told["lora_rank"] == "network_dim = 16" and "epochs" in told and not imported.problems
    assert any(
        "not in the file, so OneTrainer has" in str(line) and "lora_rank" in str(line) for line in imported.lines()
    )


@pytest.mark.parametrize(("base", "keys", "expected"), ONETRAINER, ids=lambda v: ",".join(v) if v else "-")
def test_a_key_of_onetrainer_arrives(base, keys, expected):
    imported = importers.import_content({**base, **nested(keys)}, CONFIGS)
    config = option_values(imported.config)
    assert not differing(config, {name: value for name, value in expected.items() if name in config})
    assert expected.keys() <= config.keys() | {"save_state_every_n_minutes"}
    named = {outcome.key for outcome in imported.outcomes}
    assert keys.keys() <= named, keys.keys() - named


def test_concepts_and_samples_of_onetrainer(tmp_path):
    concepts = [
        {
            "path": "/cats",
            "balancing": 2,
            "text": {"tag_dropout_enable": True, "tag_dropout_probability": 0.2},
            "image": {"enable_random_flip": True},
        },
        {"path": "/large", "image": {"enable_resolution_override": True, "resolution_override": "1536"}},
        {"path": "/held", "type": "VALIDATION"},
        {"path": "/people", "type": "PRIOR_PREDICTION"},
    ]
    samples = [{"prompt": "a cat", "width": 832, "height": 1216, "seed": 7, "cfg_scale": 5, "diffusion_steps": 12}]
    (tmp_path / "concepts.json").write_text(json.dumps(concepts), encoding="utf-8")
    (tmp_path / "samples.json").write_text(json.dumps(samples), encoding="utf-8")
    settings = {
        **SDXL_LORA,
        **ENCODERS_OFF,
        "resolution": "768,1024",
        "concept_file_name": "concepts.json",
        "sample_definition_file_name": "samples.json",
        "sample_after": 2,
        "sample_after_unit": "EPOCH",
    }
    (tmp_path / "a.json").write_text(json.dumps(settings), encoding="utf-8")
    (tmp_path / "concepts.json").rename(tmp_path / "moved.json")
    first, *others = map(str, importers.import_file(tmp_path / "a.json", CONFIGS).lines())
    assert first.startswith("to fix: concept_file_name: this file was not found")
    assert not any("concept_file_name" in line for line in others)
    (tmp_path / "moved.json").rename(tmp_path / "concepts.json")
    assert main.main(["import", str(tmp_path / "a.json"), "-o", str(tmp_path / "run.toml")]) == 0
    run = read_toml(tmp_path / "run.toml")
    sets = sets_of(run["dataset_config"])
    assert [(d.resolution, d.table) for d in sets] == [((1024, 1024), 0), ((768, 768), 0), ((1536, 1536), 1)]
    first = sets[0].subsets[0]
    assert first.flip_aug and first.num_repeats == 2 and first.caption_tag_dropout_rate == 0.2
    kept = [subset.custom_attributes for subset in sets[0].subsets]
    assert kept == [None, {"diff_output_preservation": True}] and not sets[0].subsets[1].is_reg
    assert [s.image_dir for s in sets[2].subsets] == ["/large"]
    prompts = (tmp_path / "run.prompts.txt").read_text(encoding="utf-8")
    assert prompts == "a cat --w 832 --h 1216 --s 12 --l 5 --d 7\n" and run["sample_every_n_epochs"] == 2


WORD = {"placeholder": "<zorb>", "token_count": 4, "initial_embedding_text": "toy", "model_name": "zorb.safetensors"}


@pytest.mark.parametrize(
    ("model", "script"),
    [
        ("STABLE_DIFFUSION_15", "train_textual_inversion"),
        ("STABLE_DIFFUSION_XL_10_BASE", "sdxl_train_textual_inversion"),
    ],
)
def test_an_embedding_is_a_textual_inversion(model, script):
    settings = {"model_type": model, "training_method": "EMBEDDING", "learning_rate": 1e-3}
    settings |= {"unet": {"train": True, "weight_dtype": "FLOAT_16"}, "train_dtype": "FLOAT_16", "lora_rank": 8}
    imported = importers.import_content({**settings, "embedding": WORD}, CONFIGS)
    expected = {"token_string": "<zorb>", "num_vectors_per_token": 4, "init_word": "toy", "weights": "zorb.safetensors"}
    expected |= {"learning_rate": 1e-3, "mixed_precision": "fp16", "full_fp16": False}
    assert imported.config.script == script and not imported.problems
    assert not differing(option_values(imported.config), expected)
    rest = importers.import_content({**settings, "embedding_learning_rate": 5e-3}, CONFIGS)
    expected = {"token_string": "<embedding>", "num_vectors_per_token": 1, "init_word": "*", "learning_rate": 5e-3}
    assert not differing(option_values(rest.config), expected)


def test_what_is_said_of_text_encoders_fits_the_model():
    text_encoder = {"train": True, "dropout_probability": 0.1, "stop_training_after": 3}
    settings = {"training_method": "FINE_TUNE", "unet": {"train": False}, "text_encoder": text_encoder, "epochs": 10}
    imported = importers.import_content({**settings, "model_type": "STABLE_DIFFUSION_15"}, CONFIGS)
    outcomes = {outcome.key: str(outcome.text) for outcome in imported.outcomes}
    assert {
        "unet.train is off: OneTrainer trains text encoders alone; the image model is trained here, too",
        "text_encoder: OneTrainer stops after 3 epochs; here it learns to the end",
    } <= {*map(str, imported.notes)}
    assert outcomes["text_encoder.dropout_probability"] == "caption_dropout_rate = 0.1"
