"""Which script the settings of kohya_ss and ai-toolkit are for."""

import re

import pytest

from library import importers
from library.config.problems import ConfigError
from library.importers import kohya_ss
from tests import source
from tests.config.arriving import of_aitoolkit
from tests.config.test_foreign import CONFIGS


@pytest.mark.parametrize(
    ("keys", "script"),
    [
        ({"sdxl": True, "LoRA_type": "Standard"}, "sdxl_train_network"),
        ({"sdxl_checkbox": "true", "image_folder": "x"}, "sdxl_train"),
        ({"sdxl": True, "flux1_checkbox": True, "LoRA_type": "Flux1"}, "sdxl_train_network"),
        ({"flux1_checkbox": True, "LoRA_type": "Flux1"}, "flux_train_network"),
        ({"flux1_checkbox": True, "max_resolution": "1"}, "flux_train"),
        ({"LoRA_type": "Flux1"}, "flux_train_network"),
        ({"sdxl": True, "token_string": "zorb"}, "sdxl_train_textual_inversion"),
        ({"LoRA_type": "Standard"}, "train_network"),
        ({"num_vectors_per_token": 1, "flux1_checkbox": True}, "train_textual_inversion"),
        ({"train_data_dir": "x", "reg_data_dir": "", "stop_text_encoder_training": 0}, "train_db"),
        ({"image_folder": "x", "full_path": True}, "fine_tune"),
    ],
)
def test_the_script_is_found_as_kohya_ss_chooses_it(keys, script):
    assert kohya_ss.script_of_kohya_file(keys) == script


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"v2": True, "max_resolution": "1", "optimizer": "x"}, "Stable Diffusion 2"),
        ({"sd3_checkbox": True}, "SD3"),
    ],
)
def test_models_that_are_not_trained_here_are_refused_by_name(keys, words):
    with pytest.raises(ConfigError, match=words):
        importers.import_content(keys, CONFIGS)


def test_a_flag_is_named_with_its_command_as_the_page_has_no_flags():
    for path in (source.ROOT / "library" / "importers").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?<!kohya import )(?<!such as )--script", text), path


@pytest.mark.parametrize(
    "settings",
    [
        {"flux1_checkbox": True, "LoRA_type": "Flux1", "model_type": "chroma", "clip_l": "c", "guidance_scale": 3.5},
        of_aitoolkit({"network.type": "lora", "model.arch": "chroma", "model.name_or_path": "lodestones/Chroma1-HD"}),
        of_aitoolkit({"network.type": "lora", "model.is_flux": True, "model.name_or_path": "chroma1.safetensors"}),
        {
            "model_type": "CHROMA_1",
            "training_method": "LORA",
            "layer_filter_preset": "attn-mlp",
            "base_model_name": "lodestones/Chroma1-Base",
            "text_encoder_sequence_length": 256,
            "text_encoder": {"train": False},
            "text_encoder_2": {"train": False},
        },
    ],
)
def test_chroma_arrives_with_all_that_it_needs(settings):
    imported = importers.import_content(settings, CONFIGS)
    model = imported.config.model
    assert (type(imported.config).script, model.model_type) == ("flux_train_network", "chroma")
    assert (model.apply_t5_attn_mask, model.guidance_scale, model.clip_l) == (True, 0.0, None)
    assert not imported.problems and not imported.config.network.network_args
    assert model.t5xxl_max_token_length in (None, 256)


def test_krea_and_flex_arrive_as_flux():
    """Krea is known by its name, Flex.1 by the blocks in its file."""
    krea = {
        "model_type": "FLUX_DEV_1",
        "training_method": "LORA",
        "base_model_name": "black-forest-labs/FLUX.1-Krea-dev",
    }
    flex = {"network.type": "lora", "model.arch": "flex1", "model.name_or_path": "ostris/Flex.1-alpha"}
    for settings in (krea, of_aitoolkit(flex)):
        assert importers.import_content(settings, CONFIGS).config.model.model_type == "flux"


def test_a_script_that_is_named_wins():
    assert importers.import_content({"LoRA_type": "Standard"}, CONFIGS, "flux_train_network").config.family == "flux"
    with pytest.raises(ConfigError, match="flux_train_network"):
        importers.import_content({"LoRA_type": "Standard"}, CONFIGS, "flux_train_netwrk")
