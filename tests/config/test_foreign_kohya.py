"""Files of kohya_ss: what its page starts with, its tabs, and epochs that stay epochs."""

import pytest

from library import importers
from library.config.schema import option_values
from tests.config.arriving import CONFIGS, arrived, differing

KOHYA_LORA = {"sdxl": True, "LoRA_type": "Standard"}
KOHYA_STARTS = {
    "learning_rate": 1e-4,
    "unet_lr": 1e-4,
    "text_encoder_lr": (1e-4,),
    "network_dim": 8,
    "network_alpha": 1.0,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 0.1,
    "resolution": "512,512",
    "mixed_precision": "fp16",
    "save_precision": "fp16",
    "caption_extension": ".txt",
    "enable_bucket": True,
    "bucket_no_upscale": True,
    "max_bucket_reso": 2048,
    "cache_latents": True,
    "save_every_n_epochs": 1,
    "max_train_steps": 1600,
    "optimizer_type": "AdamW",
}


def test_the_page_of_kohya_ss_starts_where_a_file_says_nothing():
    imported = importers.import_content(KOHYA_LORA, CONFIGS)
    assert not differing(option_values(imported.config), KOHYA_STARTS)
    assert not differing(
        arrived({**KOHYA_LORA, "network_dim": None, "learning_rate": 5e-5}), {"network_dim": 8, "learning_rate": 5e-5}
    )
    assert "defaults of kohya_ss" in imported.report()


@pytest.mark.parametrize(
    ("keys", "steps", "epochs"),
    [
        ({"epoch": 20}, 1600, 20),
        ({"epoch": "20", "max_train_steps": "", "max_train_epochs": ""}, 1600, 20),
        ({"epoch": 20, "max_train_steps": None}, 1600, 20),
        ({"epoch": 20, "max_train_epochs": "12"}, 1600, 12),
        ({"epoch": 20, "max_train_steps": "300", "max_train_epochs": ""}, 300, None),
        ({"max_train_steps": 0}, 1600, 1),
        ({"max_train_epochs": 3, "max_train_steps": 500}, 1600, 3),
        ({}, 1600, None),
    ],
)
def test_epochs_stay_epochs(keys, steps, epochs):
    imported = importers.import_content({**KOHYA_LORA, **keys}, CONFIGS)
    assert (imported.config.steps.max_train_steps, imported.config.steps.max_train_epochs) == (steps, epochs)
    if "max_train_steps" not in keys:
        assert "max_train_steps is set" not in imported.report()


FINETUNE = {
    "sdxl_checkbox": True,
    "max_resolution": "1024,1024",
    "optimizer": "PagedAdamW8bit",
    "learning_rate": 2e-5,
    "max_train_epochs": "30",
    "train_text_encoder": False,
    "noise_offset": 0.03,
    "noise_offset_type": "Original",
    "multires_noise_iterations": 4,
    "full_bf16": True,
    "mixed_precision": "bf16",
    "dataset_repeats": "2",
    "use_latent_files": "No",
    "create_caption": True,
}


@pytest.mark.parametrize("kept", [set(FINETUNE), {"sdxl_checkbox", "dataset_repeats"}, {"sdxl_checkbox", "block_lr"}])
def test_a_finetune_without_its_folders_is_a_finetune(kept):
    imported = importers.import_content(
        {
            **{k: FINETUNE[k] for k in kept & FINETUNE.keys()},
            "sdxl_checkbox": True,
            **({"block_lr": ""} if "block_lr" in kept else {}),
        },
        CONFIGS,
    )
    assert imported.trainer == "kohya_ss (Finetune)" and imported.config.data.enable_bucket
    if kept == set(FINETUNE):
        expected = {
            "max_train_epochs": 30,
            "noise_offset": 0.03,
            "multires_noise_iterations": 4,
            "full_bf16": True,
            "dataset_repeats": 2,
            "train_text_encoder": False,
            "lr_scheduler": "constant",
        }
        assert not differing(option_values(imported.config), expected)


def test_no_two_notes_of_an_import_contradict_each_other():
    """An option is spoken of as on or off, set or not, once: no note takes back what another says."""
    for settings in (FINETUNE, {"sdxl_checkbox": True, "image_folder": "/i"}, {**KOHYA_LORA, "epoch": 3}):
        lines = importers.import_content(settings, CONFIGS).lines()
        assert sum("enable_bucket" in str(line) for line in lines) <= 1, lines
        assert not any("our defaults hold" in str(line) for line in lines)
        assert sum("noise_offset_type" in str(line) for line in lines) <= 1
