"""NaN in a file that a training starts from, or samples with, is named with its option before the model is loaded."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from library import families
from library.config.problems import ConfigError
from library.methods import small_files
from library.methods.sample_lora import SampleLora
from tests.sampling.test_sampling import lora_file
from tests.train.test_sample_lora import block_layers
from tests.training import LORA_OF_EACH_KIND, config_of, problems_and_remarks, references, train

FLUX, LLLITE, WORDS = "flux_train_network", "sdxl_train_control_net_lllite", "sdxl_train_textual_inversion"
SAMPLES = {"sample_from_captions": 1, "sample_every_n_steps": 1}
LYCORIS = {"network_module": "lycoris.kohya", "network_args": ["algo=loha"]}
# option: values beside it
OPTIONS = {
    "network_weights": {"network_dim": 4},
    "base_weights": {},
    "assistant_lora": {},
    "sample_lora": SAMPLES,
}


def spoilt(file, chosen, value=float("nan")):
    """Put a value into the first tensor whose name ends so."""
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(chosen))
    tensors[name] = torch.full_like(tensors[name], value)
    path = file.with_name(f"spoilt-{file.name}")
    save_file(tensors, path)
    return path, name


def about(config, option):
    try:
        found = problems_and_remarks(config)[0]
    except ConfigError as error:
        found = error.problems
    return [str(problem) for problem in found if problem.option == option]


@pytest.fixture(scope="module")
def lora(demo, tmp_path_factory):
    def made(script):
        layers = block_layers(families.family_for(config_of(demo, script)))
        return lora_file(tmp_path_factory.mktemp("lora") / "a.safetensors", layers)

    return made


@pytest.mark.parametrize("chosen", ["lora_up.weight", "alpha"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("script", LORA_OF_EACH_KIND)
def test_each_option_of_a_lora(demo, squares, lora, script, option, chosen):
    path, name = spoilt(lora(script), chosen)
    value = [path] if option == "base_weights" else path
    config = config_of(demo, script, train_data_dir=squares, **OPTIONS[option] | {option: value})
    (said,) = about(config, option)
    assert f"{path} is damaged: 1 tensor with NaN or infinity, first {name}" in said


@pytest.mark.parametrize(
    "script, option, values, chosen",
    [
        (FLUX, "network_weights", LYCORIS, "hada_w1_a"),
        (LLLITE, "network_weights", {}, "weight"),
        (WORDS, "weights", {"token_string": "zorb", "init_word": "cat"}, "clip_l"),
    ],
)
def test_files_of_other_methods(demo, squares, tmp_path, script, option, values, chosen):
    """Such files are what a training has saved."""
    given = {"train_data_dir": squares, "output_dir": tmp_path / "out", "max_train_steps": 1} | values
    if script == LLLITE:
        given["conditioning_data_dir"] = references(squares, tmp_path)
    whole = train(config_of(demo, script, **given)).file
    path, name = spoilt(whole, chosen)
    again = given | {"output_dir": tmp_path / "again"}
    assert about(config_of(demo, script, **again, **{option: whole}), option) == []
    (said,) = about(config_of(demo, script, **again, **{option: path}), option)
    assert f"{path} is damaged: 1 tensor with NaN or infinity, first {name}" in said


def test_a_lora_for_samples_from_elsewhere_is_read_with_the_same_eyes(demo, lora):
    """A file that is downloaded when the training starts has passed no check."""
    path, _ = spoilt(lora(FLUX), "lora_up.weight")
    with pytest.raises(ConfigError, match="is damaged"):
        SampleLora({path: 1.0}, families.family_for(config_of(demo, FLUX)))


def test_an_alpha_that_nothing_reads_may_be_infinite(tmp_path):
    layer = {"a.lokr_w1": torch.ones(2, 2), "a.lokr_w2": torch.ones(2, 2), "a.alpha": torch.tensor(np.inf)}
    save_file(layer, tmp_path / "a.safetensors")
    assert small_files.read_tensors(tmp_path / "a.safetensors", "a LoRA file").keys() == layer.keys()
