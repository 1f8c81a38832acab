"""What other trainers' files say about models: those that are not trained here are called by their names, and the keys
that choose or guide the others say what they do."""

import pytest

from library import importers
from library.config.problems import ConfigError
from library.config.schema import option_values
from tests.config.arriving import CONFIGS, SDXL_LORA, differing, of_aitoolkit

TUNER = {"model_type": "lora", "data_backend_config": "a.json"}
DEV = {"model_family": "flux2", "model_flavour": "dev"}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (of_aitoolkit({"network.type": "lora", "model.arch": "wan22_14b:i2v"}), "Wan 2.2"),
        (of_aitoolkit({"network.type": "lora", "model.arch": "hidream"}), "HiDream"),
        (of_aitoolkit({"network.type": "lora", "model.arch": "ltx2.3"}), "LTX 2"),
        (of_aitoolkit({"network.type": "lora", "model.arch": "chroma_radiance"}), "Chroma Radiance"),
        (of_aitoolkit({"network.type": "lora", "model.arch": "of_tomorrow"}), "of_tomorrow"),
        (SDXL_LORA | {"model_type": "HI_DREAM_FULL"}, "HiDream (HI_DREAM_FULL)"),
        (SDXL_LORA | {"model_type": "STABLE_DIFFUSION_35"}, "SD 3.5 (STABLE_DIFFUSION_35)"),
        (SDXL_LORA | {"model_type": "HUNYUAN_VIDEO"}, "HunyuanVideo (HUNYUAN_VIDEO)"),
        (TUNER | {"model_family": "wan_s2v"}, "Wan"),
        (TUNER | {"model_family": "kandinsky5_video"}, "Kandinsky 5"),
        (TUNER | {"model_family": "mageflow"}, "MageFlow"),
    ],
)
def test_a_model_that_is_not_trained_here_is_called_by_its_name(settings, name):
    with pytest.raises(ConfigError) as error:
        importers.import_content(settings, CONFIGS)
    assert f" is for {name}, which is not trained here" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "expected", "said"),
    [
        ({"model_family": "flux"}, 1.0, ""),
        ({"model_family": "flux", "flux_guidance_value": 3.5}, 3.5, "is guidance_scale"),
        (DEV | {"flux_guidance_value": 3.5}, 3.5, "is guidance_scale"),
        (DEV | {"flux_guidance_mode": "random-range", "flux_guidance_min": 1, "flux_guidance_max": 5}, 3.0,
         "random-range is not offered here; the nearest is guidance_scale = 3.0"),
        ({"model_family": "flux", "flux_guidance_mode": "random-range"}, 2.0, "random-range is not offered here"),
        ({"model_family": "flux2", "model_flavour": "klein-4b", "flux_guidance_value": 3.5}, 1.0,
         "there is no guidance in this model"),
    ],
)  # fmt: skip
def test_guidance_of_simpletuner_is_kept(settings, expected, said):
    result = importers.import_content(TUNER | settings, CONFIGS)
    assert option_values(result.config)["guidance_scale"] == expected
    remarks = [str(outcome.text) for outcome in result.outcomes if outcome.key.startswith("flux_guidance_")]
    assert all(remark.startswith(said) for remark in remarks) and bool(remarks) == bool(said)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_flavour": "base-1.0"}, "chooses the model"),
        ({"model_flavour": "base-1.0", "pretrained_model_name_or_path": "a.safetensors"},
         "pretrained_model_name_or_path names the model"),
    ],
)  # fmt: skip
def test_the_flavour_of_a_model_says_what_it_does(settings, said):
    result = importers.import_content(TUNER | {"model_family": "sdxl"} | settings, CONFIGS)
    assert [str(outcome.text) for outcome in result.outcomes if outcome.key == "model_flavour"] == [said]


def test_names_of_simpletuners_guides_are_read():
    guide = TUNER | {"model_family": "sdxl", "network_rank": 5, "use_gradient_checkpointing": False}
    result = importers.import_content(guide, CONFIGS)
    assert differing(option_values(result.config), {"network_dim": 5, "gradient_checkpointing": False}) == {}
    assert {"network_rank", "use_gradient_checkpointing"} <= {outcome.key for outcome in result.outcomes}


@pytest.mark.parametrize(
    ("optimizer", "ours", "arguments"),
    [
        ("LoraEasyCustomOptimizer.compass.Compass", "AdamW", ("weight_decay=0.1",)),
        ("LPFAdamW", "AdamW", ("weight_decay=0.1",)),
        ("LoraEasyCustomOptimizer.came.CAME", "CAME", ("weight_decay=0.1", "amp_fac=2")),
    ],
)
def test_an_optimizer_of_another_program_alone_becomes_the_nearest(optimizer, ours, arguments):
    args = {"sdxl": True, "optimizer_type": optimizer, "optimizer_args": {"weight_decay": "0.1", "amp_fac": "2"}}
    result = importers.import_content({"optimizer_args": {"args": args}}, CONFIGS)
    values = option_values(result.config)
    assert (values["optimizer_type"], values["optimizer_args"]) == (ours, arguments)
    assert [note for note in result.notes if "amp_fac" in str(note)] or ours == "CAME"
