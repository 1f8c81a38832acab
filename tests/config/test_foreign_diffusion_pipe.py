"""Files of diffusion-pipe, and of its data sets."""

import tomllib
from pathlib import Path

import pytest

from kohya_gui.form import presets
from library import importers
from library.config.problems import ConfigError
from library.config.schema import option_values
from tests.config.arriving import CONFIGS, differing, sets_of

SOURCE = Path(__file__).parent / "foreign/diffusion_pipe.toml"
WHOLE = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
DATA = """
resolutions = [512, [1280, 720]]
enable_ar_bucket = true
min_ar = 0.5
max_ar = 2.0
frame_buckets = [1, 33]
[[directory]]
path = '/cats'
mask_path = '/masks'
num_repeats = 2
[[directory]]
path = '/dogs'
control_path = '/refs'
resolutions = [1024]
enable_ar_bucket = false
shuffle_tags = true
ar_buckets = [1.0]
"""
SMALL = {"pipeline_stages": 1, "epochs": 1, "optimizer": {"type": "adamw", "lr": 1e-4}}


def flattened(settings):
    return {
        f"{key}.{name}" if name else key
        for key, value in settings.items()
        for name in (value if isinstance(value, dict) else [""])
    }


def test_every_key_is_accounted_for():
    imported = importers.import_file(SOURCE, CONFIGS)
    assert imported.trainer == "diffusion-pipe" and imported.config.script == "flux_train_network"
    assert (
        {outcome.key for outcome in imported.outcomes} >= flattened(WHOLE)
        and not imported.problems
        and not imported.of("unknown")
    )
    assert all(outcome.kind in ("kept", "empty") or len(str(outcome.text)) > 2 for outcome in imported.outcomes)
    assert "canary" not in imported.report() + " ".join(map(str, imported.lines()))


def test_the_settings_arrive():
    expected = {
        "pretrained_model_name_or_path": "/models/flux1-kontext-dev.safetensors",
        "model_type": "kontext",
        "clip_l": "/models/FLUX.1-dev",
        "ae": "/models/FLUX.1-dev",
        "guidance_scale": 2.5,
        "sigmoid_scale": 1.3,
        "timestep_sampling": "flux_shift",
        "model_prediction_type": "raw",
        "max_train_epochs": 40,
        "network_module": "lycoris.kohya",
        "base_weights": ("/a.safetensors",),
        "base_weights_multiplier": (0.5,),
        "network_args": ("algo=lokr", "factor=4", "full_matrix=True", "bypass_mode=True"),
        "optimizer_type": "AdamW8bit",
        "optimizer_args": ("betas=0.9,0.99", "weight_decay=0.01"),
        "learning_rate": 2e-5,
        "lr_scheduler": "cosine_with_min_lr",
        "lr_scheduler_min_lr_ratio": 0.05,
        "lr_warmup_steps": 100,
        "max_grad_norm": 0.5,
        "gradient_accumulation_steps": 2,
        "save_every_n_steps": 100,
        "save_state_every_n_minutes": 120,
        "gradient_checkpointing": True,
        "cpu_offload_checkpointing": True,
        "save_precision": "bf16",
        "mixed_precision": "bf16",
        "fp8_base_unet": True,
        "vae_batch_size": 8,
        "compile": True,
        "blocks_to_swap": 8,
        "loss_type": "huber",
        "huber_c": 0.5,
        "log_with": "wandb",
        "log_tracker_name": "cats",
        "wandb_api_key": None,
        "caption_dropout_rate": 0.1,
        "network_train_unet_only": True,
        "cache_text_encoder_outputs_to_disk": True,
    }
    assert differing(option_values(importers.import_file(SOURCE, CONFIGS).config), expected) == {}


def test_its_data_sets_become_a_dataset_file(tmp_path):
    (tmp_path / "run.toml").write_text(SOURCE.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "dataset.toml").write_text(DATA, encoding="utf-8")
    imported = importers.import_file(tmp_path / "run.toml", CONFIGS)
    (tmp_path / "ours.toml").write_text(imported.texts["dataset_config"], encoding="utf-8")
    small, wide, dogs = sets_of(tmp_path / "ours.toml", "flux_train_network", model_type="kontext")
    assert (small.resolution, wide.resolution, dogs.resolution) == ((512, 512), (1280, 720), (1024, 1024))
    assert (small.batch_size, wide.batch_size, dogs.batch_size) == (4, 1, 1)
    assert small.enable_bucket and small.min_bucket_reso == 256 and small.max_bucket_reso == 768
    assert not dogs.enable_bucket and small.subsets[0].num_repeats == 2 and dogs.subsets[0].shuffle_caption
    assert (small.subsets[0].conditioning_data_dir, dogs.subsets[0].control_directory) == ("/masks", "/refs")
    assert (
        option_values(imported.config)["masked_loss"] and option_values(imported.config)["cached_caption_variants"] == 2
    )
    notes = "\n".join(map(str, imported.notes))
    assert "datasets of /dogs: ar_buckets is ignored" in notes and "frame_buckets" in notes


def test_a_file_of_data_sets_alone_is_converted_and_is_no_training(tmp_path):
    path = tmp_path / "dataset.toml"
    path.write_text(DATA, encoding="utf-8")
    assert importers.is_foreign_dataset(importers.parse_file(path))
    with pytest.raises(ConfigError, match=r"data set file of diffusion-pipe.*kohya import dataset\.toml"):
        importers.import_file(path, CONFIGS)
    with pytest.raises(ConfigError, match="data set file of diffusion-pipe"):
        presets.import_fitting(path, {"sdxl": CONFIGS["sdxl_train"]}, "sdxl", [])


@pytest.mark.parametrize(
    ("model", "script", "expected"),
    [
        (
            {
                "type": "sdxl",
                "checkpoint_path": "/x",
                "v_pred": True,
                "min_snr_gamma": 5,
                "unet_lr": 4e-5,
                "text_encoder_1_lr": 2e-5,
            },
            "sdxl_train_network",
            {
                "v_parameterization": True,
                "min_snr_gamma": 5,
                "unet_lr": 4e-5,
                "text_encoder_lr": (2e-5, 1e-4),
                "network_train_unet_only": False,
                "cache_text_encoder_outputs": False,
            },
        ),
        (
            {
                "type": "z_image",
                "diffusion_model": "/z_image_turbo.safetensors",
                "vae": "/v",
                "text_encoders": [{"path": "/q", "type": "lumina2"}],
                "merge_adapters": ["/a"],
                "dtype": "bfloat16",
            },
            "zimage_train_network",
            {"model_version": "turbo", "vae": "/v", "text_encoder": "/q", "base_weights": ("/a",)},
        ),
        (
            {"type": "flux2", "diffusion_model": "/flux-2-klein-base-9b.safetensors", "shift": 3},
            "flux_2_train_network",
            {"model_version": "klein-base-9b", "timestep_sampling": "shift", "discrete_flow_shift": 3.0},
        ),
        (
            {"type": "krea2", "diffusion_model": "/krea2_turbo_bf16.safetensors", "flux_shift": True},
            "krea_2_train_network",
            {
                "model_version": "turbo",
                "timestep_sampling": "krea2_shift",
                "network_args": ("train_text_fusion=True",),
            },
        ),
        (
            {"type": "anima", "transformer_path": "/a", "vae_path": "/v", "llm_path": "/q", "llm_adapter_lr": 0},
            "anima_train_network",
            {"qwen3": "/q", "vae": "/v", "network_args": (), "timestep_sampling": "sigmoid"},
        ),
        (
            {"type": "chroma", "transformer_path": "/c", "diffusers_path": "/d", "timestep_sample_method": "uniform"},
            "flux_train_network",
            {"model_type": "chroma", "ae": "/d", "clip_l": None, "timestep_sampling": "uniform"},
        ),
        (
            {"type": "qwen_image", "transformer_path": "/qwen_image_edit_2509.safetensors", "text_encoder_path": "/t"},
            "qwen_image_train_network",
            {"model_version": "edit-2509", "text_encoder": "/t"},
        ),
    ],
)
def test_each_model_is_imported_with_its_script(model, script, expected):
    imported = importers.import_content({**SMALL, "model": model, "adapter": {"type": "lora", "rank": 8}}, CONFIGS)
    assert (
        imported.config.script == script
        and differing(option_values(imported.config), {"network_alpha": 8, **expected}) == {}
    )
    whole = importers.import_content({**SMALL, "model": {**model, "dtype": "bfloat16"}}, CONFIGS).config
    assert whole.script == script.removesuffix("_network") and whole.precision.full_bf16


@pytest.mark.parametrize(("kind", "words"), [("wan", "Wan"), ("ltx-video", "LTX-Video"), ("x", "x")])
def test_other_models_are_refused_by_name(kind, words):
    with pytest.raises(ConfigError, match=f"is for {words}, which is not trained here"):
        importers.import_content({**SMALL, "model": {"type": kind}}, CONFIGS)
