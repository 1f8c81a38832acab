"""An assistant LoRA takes part in steps, and is nowhere in samples, files and states."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from library import families
from library.check import preflight
from library.config.problems import ConfigError
from tests.sampling.test_sampling import lora_file
from tests.train.test_sample_lora import block_layers, values_of
from tests.training import LORAS, config_of, demo, problems_and_remarks, squares, train  # noqa: F401 - fixtures, also without a conftest

FLUX, SDXL, TURBO = "flux_train_network", "sdxl_train_network", "zimage_train_network"
WAYS = {
    FLUX: (FLUX, {"compile": True, "compile_backend": "eager"}),
    SDXL: (SDXL, {"network_module": "lycoris.kohya", "network_args": ["algo=lokr"]}),
}
BF16 = {"mixed_precision": "bf16", "compile": True, "sample_compile": "true", "cuda_graphs": "true"}
GPU_WAYS = {
    "recorded": {},
    "swapped": {"gradient_checkpointing": True, "blocks_to_swap": 1, "cuda_graphs": "auto"},
    "fp8 products": {"fp8_base": True, "fp8_compute": True},
    "int8": {"int8_base": True},
}


def pictures(run):
    return [np.asarray(Image.open(event["file"])) for event in run.events("sample")]


def compare(demo, squares, tmp_path, script, how, tolerance):  # noqa: F811
    """Compare trainings with the file as assistant, merged, and without it."""
    values, file = values_of(demo, script, tmp_path, train_data_dir=squares, **how)
    path, strength = file.rsplit(":", 1)
    merging = {"base_weights": [path], "base_weights_multiplier": [float(strength)]}
    unsampled = {name: value for name, value in values.items() if not name.startswith("sample_")}
    plain = train(config_of(demo, script, output_dir=tmp_path / "plain", **values))
    merged = train(config_of(demo, script, output_dir=tmp_path / "merged", **unsampled, **merging))
    ours = train(config_of(demo, script, output_dir=tmp_path / "ours", assistant_lora=file, **values))
    assert not ours.events("sample_failed")
    assert ours.losses == pytest.approx(merged.losses, rel=tolerance)
    assert ours.losses != pytest.approx(plain.losses, rel=tolerance)
    assert np.array_equal(pictures(ours)[0], pictures(plain)[0])
    assert ours.tensors().keys() == plain.tensors().keys()
    with safe_open(ours.file, framework="pt") as saved:
        assert saved.metadata()["ss_assistant_lora"] == "fast.safetensors:0.8"


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_a_merged_lora_and_samples_those_of_none(demo, squares, tmp_path, way):  # noqa: F811
    compare(demo, squares, tmp_path, *WAYS[way], 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("way", GPU_WAYS)
def test_so_they_are_in_compiled_and_recorded_passes(demo, squares, tmp_path, way):  # noqa: F811
    compare(demo, squares, tmp_path, FLUX, BF16 | GPU_WAYS[way], 2e-2)


def test_a_training_is_resumed_beside_it(demo, squares, tmp_path):  # noqa: F811
    values, file = values_of(demo, TURBO, tmp_path, train_data_dir=squares, assistant_lora=None)
    values |= {"assistant_lora": file, "save_state": True, "save_every_n_steps": 1}
    whole = train(config_of(demo, TURBO, output_dir=tmp_path / "whole", **values))
    (state,) = (tmp_path / "whole").glob("*-step00000001-state")
    resumed = train(config_of(demo, TURBO, output_dir=tmp_path / "resumed", resume=state, **values))
    assert resumed.losses == whole.losses[1:]
    assert all(torch.equal(tensor, resumed.tensors()[name]) for name, tensor in whole.tensors().items())


def test_what_cannot_be_an_assistant_is_named_before_the_training(demo, squares, tmp_path):  # noqa: F811
    families_of = {name: families.family_for(config_of(demo, name)) for name in (TURBO, SDXL)}
    fitting, foreign = (lora_file(tmp_path / f"{name}.safetensors", block_layers(f)) for name, f in families_of.items())
    save_file({"some.weight": torch.ones(2)}, tmp_path / "none.safetensors")
    lokr = {"lora_unet_layers_0_attention_to_q.lokr_w1": torch.ones(2, 2)}
    save_file(lokr, tmp_path / "lokr.safetensors")
    (tmp_path / "folder").mkdir()
    cases = {
        fitting: "",
        f"{fitting}:0.5": "",
        tmp_path / "gone.safetensors": "does not exist",
        tmp_path / "folder": "is a folder: name a file in it",
        f"{foreign}:0.5": "choose a file made for it",
        tmp_path / "none.safetensors": "nothing in",
        tmp_path / "lokr.safetensors": "not a plain LoRA",
        "https://huggingface.co/someone/adapters/blob/main/a.safetensors": "write someone/adapters/a.safetensors",
        f"{fitting}:11": "strengths are numbers from -10 to 10",
    }
    for value, words in cases.items():
        try:
            found = problems_and_remarks(config_of(demo, TURBO, train_data_dir=squares, assistant_lora=value))[0]
        except ConfigError as error:
            found = error.problems
        about = [str(problem) for problem in found if problem.option == "assistant_lora"]
        assert len(about) == bool(words) and all(words in text for text in about), (value, about)
        assert not any("network_module" in text for text in about)  # no module is for an assistant
    with pytest.raises(ConfigError, match="assistant_lora cannot be used here: it works only beside a LoRA"):
        config_of(demo, "zimage_train", assistant_lora=fitting)


@pytest.mark.parametrize("script", LORAS)
def test_its_published_file_is_proposed_and_taken_from_base_weights(demo, script):  # noqa: F811
    for known in families.facts_of(families.config_class(script).family).assistant_loras:
        config = config_of(demo, script, base_weights=[known.file], base_weights_multiplier=[0.5])
        (note,) = (note for note in preflight.methods.method_notes(config) if note.option == "base_weights")
        fixed = config_of(demo, script, **note.fix)
        assert fixed.network.assistant_lora == f"{known.file}:0.5" and not fixed.network.base_weights
        assert not [*preflight.methods.method_notes(fixed)]
