"""Files of ai-toolkit: what they say, and what they leave to ai-toolkit's defaults, arrives key by key."""

import pytest

from library import importers
from library.config.schema import option_values
from tests.config.arriving import CONFIGS, FLUX_AI, differing, of_aitoolkit, sets_of

SDXL_AI = {"network.type": "lora", "model.name_or_path": "xl.safetensors", "model.arch": "sdxl"}
FULL_AI = {"model.name_or_path": "xl.safetensors", "model.is_xl": True}
AITOOLKIT_DEFAULTS = {
    "network_dim": 4,
    "network_alpha": 1.0,
    "learning_rate": 1e-6,
    "max_train_steps": 1000,
    "train_batch_size": 1,
    "optimizer_type": "AdamW",
    "gradient_checkpointing": True,
    "mixed_precision": "no",
    "save_precision": "fp16",
    "save_every_n_steps": 1000,
    "save_last_n_steps": 4000,
    "lr_scheduler": "constant",
    "max_grad_norm": 1.0,
    "network_train_unet_only": True,
    "timestep_sampling": "sigmoid",
    "model_prediction_type": "raw",
    "guidance_scale": 1.0,
    "ema_decay": 0.0,
}
AITOOLKIT = [
    (FLUX_AI, {"network.linear": 32, "network.linear_alpha": 16}, {"network_dim": 32, "network_alpha": 16.0}),
    (FLUX_AI, {"network.rank": 8, "network.linear": 32, "network.alpha": 4}, {"network_dim": 8, "network_alpha": 4.0}),
    (FLUX_AI, {"network.dropout": 0.1}, {"network_dropout": 0.1}),
    (SDXL_AI, {"network.conv": 8}, {"network_args": ("conv_dim=8", "conv_alpha=8")}),
    (
        FLUX_AI,
        {"network.type": "lokr", "network.lokr_factor": 8},
        {"network_module": "lycoris.kohya", "network_args": ("algo=lokr", "factor=8", "full_matrix=True")},
    ),
    (FLUX_AI, {"model.quantize": True}, {"fp8_base": True}),
    (FLUX_AI, {"model.quantize": True, "model.qtype": "uint4"}, {"base_bits": 4}),
    (FLUX_AI, {"model.quantize": True, "model.qtype": "uint3|owner/adapters/a.safetensors"}, {"base_bits": 4}),
    (FLUX_AI, {"model.quantize": True, "model.qtype": "uint6"}, {"fp8_base": True}),
    (FLUX_AI, {"model.quantize": True, "model.qtype": "int8", "model.quantize_te": False}, {"int8_base": True}),
    (FLUX_AI, {"model.quantize": True, "model.quantize_te": False}, {"fp8_base_unet": True, "fp8_base": False}),
    (
        FLUX_AI,
        {"model.layer_offloading": True, "model.layer_offloading_transformer_percent": 0.5},
        {"blocks_to_swap": 19},
    ),
    (FLUX_AI, {"model.assistant_lora_path": "a.safetensors"}, {"assistant_lora": "a.safetensors"}),
    (
        SDXL_AI,
        {"model.is_v_pred": True, "model.vae_path": "v.safetensors"},
        {"v_parameterization": True, "vae": "v.safetensors"},
    ),
    (
        FLUX_AI,
        {"save.dtype": "bf16", "save.save_every": 100, "save.max_step_saves_to_keep": 3},
        {"save_precision": "bf16", "save_every_n_steps": 100, "save_last_n_steps": 200},
    ),
    (
        FLUX_AI,
        {"save.push_to_hub": True, "save.hf_repo_id": "a/b", "save.hf_private": True},
        {"huggingface_repo_id": "a/b", "huggingface_repo_visibility": "private"},
    ),
    (FLUX_AI, {"logging.use_wandb": True, "logging.project_name": "p"}, {"log_with": "wandb", "log_tracker_name": "p"}),
    (FLUX_AI, {"train.steps": "700", "train.batch_size": 2}, {"max_train_steps": 700, "train_batch_size": 2}),
    (
        FLUX_AI,
        {"train.steps": 700, "train.gradient_accumulation": 2},
        {"max_train_steps": 700, "gradient_accumulation_steps": 2},
    ),
    (
        FLUX_AI,
        {"train.steps": 700, "train.gradient_accumulation_steps": 2},
        {"max_train_steps": 350, "gradient_accumulation_steps": 2},
    ),
    (
        FLUX_AI,
        {"train.lr": "2e-4", "train.optimizer": "adamw8bit", "train.optimizer_params.betas": [0.9, 0.99]},
        {"learning_rate": 2e-4, "optimizer_type": "AdamW8bit", "optimizer_args": ("eps=1e-06", "betas=0.9,0.99")},
    ),
    (FLUX_AI, {"train.lr": 1e-4, "train.optimizer": "prodigy"}, {"learning_rate": 1.0, "optimizer_type": "Prodigy"}),
    (FLUX_AI, {"train.optimizer": "automagic"}, {"optimizer_type": "AdamW8bit"}),
    (
        FLUX_AI,
        {"train.optimizer": "adafactor"},
        {"optimizer_args": ("relative_step=False", "scale_parameter=False", "warmup_init=False")},
    ),
    (
        FLUX_AI,
        {"train.lr_scheduler": "constant_with_warmup", "train.lr_scheduler_params.num_warmup_steps": 50},
        {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 50},
    ),
    (FLUX_AI, {"train.lr_scheduler": "constant_with_warmup"}, {"lr_warmup_steps": 1000}),
    (
        FLUX_AI,
        {"train.lr_scheduler": "cosine", "train.lr_scheduler_params.num_warmup_steps": 50},
        {"lr_scheduler": "cosine", "lr_warmup_steps": 50},
    ),
    (
        FLUX_AI,
        {"train.dtype": "bf16", "train.gradient_checkpointing": False},
        {"mixed_precision": "bf16", "gradient_checkpointing": False},
    ),
    (
        FULL_AI,
        {"train.dtype": "bf16", "train.train_text_encoder": True, "train.text_encoder_lr": 1e-6},
        {"full_bf16": True, "train_text_encoder": True, "learning_rate_te1": 1e-6, "learning_rate_te2": 1e-6},
    ),
    (
        SDXL_AI,
        {"train.train_text_encoder": True, "train.text_encoder_lr": 5e-5, "train.unet_lr": 1e-4},
        {"text_encoder_lr": (5e-5,), "unet_lr": 1e-4, "network_train_unet_only": False},
    ),
    (
        SDXL_AI,
        {"train.noise_offset": 0.05, "train.min_snr_gamma": 5, "train.loss_type": "mae"},
        {"noise_offset": 0.05, "min_snr_gamma": 5.0, "loss_type": "l1"},
    ),
    (
        SDXL_AI,
        {"train.min_denoising_steps": 100, "train.max_denoising_steps": 899},
        {"min_timestep": 100, "max_timestep": 900},
    ),
    (FLUX_AI, {"train.timestep_type": "linear"}, {"timestep_sampling": "uniform"}),
    (FLUX_AI, {"train.timestep_type": "flux_shift"}, {"timestep_sampling": "flux_shift"}),
    (FLUX_AI, {"train.ema_config.use_ema": True, "train.ema_config.ema_decay": 0.95}, {"ema_decay": 0.95}),
    (FLUX_AI, {"train.ema_config.use_ema": True}, {"ema_decay": 0.999}),
    (FLUX_AI, {"train.bypass_guidance_embedding": True}, {"bypass_guidance_embedding": True}),
    (FLUX_AI, {"train.max_grad_norm": 0.5, "train.seed": 9}, {"max_grad_norm": 0.5, "seed": 9}),
    (FLUX_AI, {"train.cache_text_embeddings": True}, {"cache_text_encoder_outputs": True}),
    (
        FLUX_AI,
        {"sample.prompts": ["a"], "sample.sample_every": 50, "train.skip_first_sample": True},
        {"sample_every_n_steps": 50, "sample_at_first": False},
    ),
]


def test_ai_toolkits_defaults_hold_where_a_file_says_nothing():
    imported = importers.import_content(of_aitoolkit(FLUX_AI), CONFIGS)
    assert not differing(option_values(imported.config), AITOOLKIT_DEFAULTS) and not imported.problems
    assert {"network.linear", "train.steps"} <= {outcome.key for outcome in imported.of("default")} | {"train.steps"}


@pytest.mark.parametrize(("base", "keys", "expected"), AITOOLKIT, ids=lambda v: ",".join(v) if v else "-")
def test_a_key_of_ai_toolkit_arrives(base, keys, expected):
    imported = importers.import_content(of_aitoolkit({**base, **keys}), CONFIGS)
    assert not differing(option_values(imported.config), expected)
    assert keys.keys() <= {outcome.key for outcome in imported.outcomes}


def test_videos_of_ai_toolkit_are_not_trained_in_silence():
    for frames, said in ((41, True), (1, False)):
        sets = {"datasets": [{"folder_path": "/d", "num_frames": frames}]}
        notes = importers.import_content(of_aitoolkit({**FLUX_AI, **sets}), CONFIGS).notes
        assert any("num_frames" in str(note) and "videos are not trained" in str(note) for note in notes) == said


def test_data_sets_of_ai_toolkit_key_by_key(tmp_path):
    table = {
        "folder_path": "/i",
        "mask_path": "/m",
        "caption_ext": "txt",
        "default_caption": "a cat",
        "num_repeats": 3,
        "caption_dropout_rate": 0.1,
        "token_dropout_rate": 0.2,
        "shuffle_tokens": True,
        "keep_tokens": 2,
        "flip_x": True,
        "is_reg": True,
        "resolution": [512, 768],
        "cache_latents": True,
        "bucket_tolerance": 32,
    }
    settings = of_aitoolkit(FLUX_AI)
    settings["config"]["process"][0]["datasets"] = [table]
    imported = importers.import_content(settings, CONFIGS)
    (tmp_path / "data.toml").write_text(imported.texts["dataset_config"], encoding="utf-8")
    sets = sets_of(tmp_path / "data.toml")
    subset = sets[0].subsets[0]
    assert [d.resolution for d in sets] == [(768, 768), (512, 512)] and sets[0].bucket_reso_steps == 32
    assert (subset.conditioning_data_dir, subset.class_tokens, subset.num_repeats) == ("/m", "a cat", 3)
    assert (subset.caption_dropout_rate, subset.caption_tag_dropout_rate, subset.keep_tokens) == (0.1, 0.2, 2)
    assert subset.shuffle_caption and subset.flip_aug and subset.is_reg and imported.config.data.masked_loss
    assert imported.config.cache.cache_latents and not imported.config.cache.cache_latents_to_disk
