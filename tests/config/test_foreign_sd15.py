"""Files of kohya_ss for SD 1.5, as its older versions wrote them: what each key becomes, by table."""

import pytest

from library import importers
from library.config.schema import option_values
from tests.config.arriving import CONFIGS, differing, of_aitoolkit

# What every tab of the older page wrote: numbers as text, and empty texts for what is not set.
ANY_TAB = {
    "v2": False,
    "v_parameterization": False,
    "model_list": "custom",
    "max_resolution": "512,512",
    "learning_rate": "0.0001",
    "lr_scheduler": "cosine",
    "lr_warmup": "10",
    "optimizer": "AdamW8bit",
    "optimizer_args": "",
    "lr_scheduler_args": "",
    "lr_scheduler_num_cycles": "",
    "lr_scheduler_power": "",
    "train_batch_size": 1,
    "epoch": "1",
    "max_train_epochs": "",
    "max_train_steps": "400",
    "max_data_loader_n_workers": "0",
    "max_token_length": "75",
    "gradient_accumulation_steps": 1.0,
    "keep_tokens": "0",
    "seed": "",
    "clip_skip": 2,
    "noise_offset": "",
    "xformers": True,
    "additional_parameters": "",
}
TABS = {
    "lora": {"LoRA_type": "Standard", "network_dim": 8, "unet_lr": "0.0001", "text_encoder_lr": "5e-05"},
    "dreambooth": {"train_data_dir": "/i", "reg_data_dir": "", "max_bucket_reso": 1024, "enable_bucket": True},
    "finetune": {"image_folder": "/i", "dataset_repeats": "40", "full_path": True, "max_bucket_reso": "1024"},
    "word": {"token_string": "zorb", "init_word": "*", "num_vectors_per_token": 8, "template": "caption"},
}
META = {"image_folder": "C:\\photos", "train_dir": "C:\\d", "use_latent_files": "Yes"}
BOTH_ON, LATENTS_ON = {"create_caption": True, "create_buckets": True}, {"create_buckets": True}


def imported(tab, keys):
    return importers.import_content({**ANY_TAB, **TABS[tab], **keys}, CONFIGS)


@pytest.mark.parametrize("tab", TABS)
def test_a_file_of_an_older_version_is_understood_without_remainder(tab):
    found = imported(tab, {"use_shell": False, "headless": True, "print_only": False})
    assert [outcome.key for outcome in found.outcomes if outcome.kind == "unknown"] == []
    expected = {"clip_skip": 2, "max_train_steps": 400, "max_data_loader_n_workers": 0, "resolution": "512,512"}
    expected |= {"max_token_length": None, "lr_warmup_steps": 0.1, "gradient_accumulation_steps": 1, "seed": None}
    assert not differing(option_values(found.config), expected)
    assert {problem.option for problem in found.problems} <= {"init_word"}


@pytest.mark.parametrize(
    ("tab", "keys", "expected", "said"),
    [
        # 0 freezes a text encoder, and is not "not set".
        ("dreambooth", {"learning_rate_te": 0}, {"learning_rate_te": 0.0}, {}),
        ("dreambooth", {"learning_rate_te": "0"}, {"learning_rate_te": 0.0}, {}),
        ("finetune", {"learning_rate_te": 0.0}, {"learning_rate_te": 0.0}, {}),
        ("dreambooth", {}, {"learning_rate_te": 1e-4, "stop_text_encoder_training": None}, {}),
        # Where the text encoder stops.
        (
            "dreambooth",
            {"stop_text_encoder_training": 50},
            {"stop_text_encoder_training": 50},
            {"stop_text_encoder_training": "50 is a step: the page of kohya_ss calls it a percentage"},
        ),
        ("dreambooth", {"stop_text_encoder_training": 0}, {"stop_text_encoder_training": None}, {}),
        ("dreambooth", {"stop_text_encoder_training": "-1"}, {"stop_text_encoder_training": -1}, {}),
        ("dreambooth", {"stop_text_encoder_training_pct": 30}, {"stop_text_encoder_training": 120}, {}),
        ("dreambooth", {"stop_text_encoder_training_pct": -1}, {"stop_text_encoder_training": -1}, {}),
        ("dreambooth", {"stop_text_encoder_training_pct": 0}, {"stop_text_encoder_training": None}, {}),
        (
            "dreambooth",
            {"stop_text_encoder_training_pct": 30, "max_train_epochs": "5"},
            {"stop_text_encoder_training": None, "max_train_epochs": 5},
            {"stop_text_encoder_training_pct": "set stop_text_encoder_training to a step"},
        ),
        ("lora", {"stop_text_encoder_training_pct": 30}, {}, {"stop_text_encoder_training_pct": "only train_db"}),
        # Why an option is left out is what the script says.
        ("dreambooth", {"no_token_padding": True}, {}, {"no_token_padding": "always padded to 75 tokens"}),
        ("lora", {"no_token_padding": True}, {}, {"no_token_padding": "no script reads it"}),
        ("lora", {"dynamo_backend": "inductor"}, {}, {"dynamo_backend": "it had no effect in kohya_ss"}),
        # Sizes in steps that the U-Net cannot compute.
        ("lora", {"bucket_reso_steps": 1}, {"bucket_reso_steps": 32}, {"bucket_reso_steps": "the nearest is"}),
        ("lora", {"bucket_reso_steps": 64.0}, {"bucket_reso_steps": 64}, {}),
        ("finetune", {"bucket_reso_steps": "100"}, {"bucket_reso_steps": 96}, {"bucket_reso_steps": "the nearest is"}),
        # A metadata file that the training would only write is not read, and others are.
        (
            "finetune",
            {**META, **BOTH_ON},
            {"in_json": None, "train_data_dir": "C:\\photos"},
            {"train_dir": "from the captions beside the images"},
        ),
        ("finetune", {**META, **LATENTS_ON}, {"in_json": "C:\\d\\meta_cap.json"}, {}),
        ("finetune", META, {"in_json": "C:\\d\\meta_lat.json"}, {}),
    ],
)
def test_what_a_key_becomes(tab, keys, expected, said):
    found = imported(tab, keys)
    assert not differing(option_values(found.config), expected)
    reasons = {outcome.key: str(outcome.text) for outcome in found.outcomes}
    assert [key for key, words in said.items() if words not in reasons[key]] == []
    assert [problem for problem in found.problems if problem.option in expected] == []


@pytest.mark.parametrize(
    ("keys", "members"),
    [
        ({"image_folder": "/d/10_zorb toy"}, ["image_dir = '/d/10_zorb toy'", "num_repeats = 40"]),
        ({**META, "image_folder": "C:\\d\\1_a\\"}, ["num_repeats = 40", "metadata_file = 'C:\\d\\meta_lat.json'"]),
    ],
)
def test_the_folder_of_a_finetune_may_be_named_like_one_of_dreambooth(keys, members):
    found = imported("finetune", keys)
    lines = found.texts["dataset_config"].replace('"', "'").splitlines()
    assert set(members) <= {line.replace("\\\\", "\\") for line in lines}
    assert (found.config.data.train_data_dir, found.config.data.in_json) == (None, None)
    assert imported("finetune", keys | {"dataset_config": "/d.toml"}).texts == {}


@pytest.mark.parametrize("model", [{}, {"model.arch": "sd1"}, {"model.arch": "sd15"}, {"model.is_xl": True}])
def test_ai_toolkit_trains_it_where_a_file_says_nothing_else(model):
    settings = {"network.type": "lora", "network.linear": 8, "model.name_or_path": "/m/a.safetensors", **model}
    found = importers.import_content(of_aitoolkit({**settings, "train.train_text_encoder": True}), CONFIGS)
    assert found.config.script == ("sdxl_train_network" if "model.is_xl" in model else "train_network")
    said = {outcome.key: str(outcome.text) for outcome in found.outcomes}
    assert said["train.train_text_encoder"] == "text encoders get adapters, too"
    assert not found.config.network.network_train_unet_only
