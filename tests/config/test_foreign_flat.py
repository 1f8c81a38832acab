"""Flat files of sd-scripts that name no script, and the forms that guides and presets give them."""

import pytest

from library import importers
from library.config.problems import ConfigError
from library.config.schema import option_values
from tests.config.arriving import CONFIGS, differing

LORA = {"network_module": "networks.lora", "network_dim": 8}
MODEL = "pretrained_model_name_or_path"


@pytest.mark.parametrize(
    ("settings", "script"),
    [
        ({"resolution": "512,512"}, "train_network"),
        ({"resolution": "512,640", MODEL: "models/model.ckpt"}, "train_network"),
        ({"resolution": "512,512", MODEL: "models/animeXL.safetensors"}, "sdxl_train_network"),
        ({"resolution": "512,512", "cache_text_encoder_outputs": True}, "sdxl_train_network"),
        ({"resolution": "768,768"}, "sdxl_train_network"),
        ({"resolution": "1024,1024", MODEL: "v1-5-pruned.safetensors"}, "train_network"),
        ({"resolution": "no size"}, "sdxl_train_network"),
        ({}, "sdxl_train_network"),
    ],
)
def test_the_size_of_images_says_which_model_is_likely(settings, script):
    result = importers.import_content({**LORA, **settings}, CONFIGS)
    assert result.config.script == script and result.guess
    other = importers.import_content({**LORA, **settings}, CONFIGS, preferred=["sdxl_train_network"])
    assert other.config.script == "sdxl_train_network", "the page takes the family on screen"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"a": {**LORA, "seed": 1}, "b": {"seed": 1, "unet_lr": 1e-4}}, {"seed": 1, "unet_lr": 1e-4}),
        ({**LORA, "text_encoder_lr1": 1e-5, "text_encoder_lr2": 2e-5}, {"text_encoder_lr": (1e-5, 2e-5)}),
    ],
)
def test_other_forms_of_an_option_are_read(settings, expected):
    result = importers.import_content(settings, CONFIGS, "sdxl_train_network")
    assert differing(option_values(result.config), expected) == {} and not result.unknown()


def test_the_description_of_a_preset_is_no_setting():
    preset = {"metadata": {"name": "small", "version": "1"}, "data": {"resolution": "768,768"}}
    result = importers.import_content(preset, CONFIGS, preferred=["train_network"])
    assert result.config.script == "train_network" and not result.unknown()
    assert {outcome.key for outcome in result.of("ignored")} == {"name", "version"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"a": {**LORA, "seed": 1}, "b": {"seed": 2}}, "seed is in both"),
        ({"model_dir": "a", "lora_model_dir": "b", "output_dir": "c", "logging_dir": "d"}, "kohya_ss's own page"),
    ],
)
def test_what_contradicts_itself_or_is_no_training_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        importers.import_content(settings, CONFIGS)
