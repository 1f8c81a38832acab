"""A tensor of another shape than its network needs is named by the check, from headers alone, with its option."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from library import families
from library.config.schema import options_of
from library.families.shared import expected_shapes
from tests.training import LORAS, config_of

BASE = "pretrained_model_name_or_path"
# Tensors of each network, the parts of Stable Diffusion in one file among them.
DAMAGED = (
    r"mlp\.(fc2|down_proj)\.weight$",
    r"self_attn\.[vo]\w*_proj\.weight$",
    r"SelfAttention\.k\.weight$",
    r"DenseReluDense\.wo\.weight$",
    r"final_layer_norm\.weight$",
    r"decoder\.(up|mid).*(conv2|residual\.6)\.weight$",
    r"decoder\.conv_in\.weight$",
    r"input_blocks\.\d.*emb_layers\.1\.weight$",
    r"input_blocks\.\d.*attn2\.to_v\.weight$",
    r"input_blocks\.\d.*ff\.net\.0\.proj\.weight$",
    r"output_blocks\.\d.*in_layers\.2\.weight$",
    r"time_embed\.2\.weight$",
)


def problems_of(demo, script, **paths):
    return list(families.family_for(config_of(demo, script, **paths)).problems())


@pytest.mark.parametrize("script", LORAS)
def test_a_tensor_of_another_shape_is_named_with_its_option(demo, script, tmp_path):
    config, checked = config_of(demo, script), 0
    options = [name for name, option in options_of(type(config)).items() if option.kind in ("file", "folder")]
    files = {option: str(getattr(config.model, option, None) or "") for option in options}
    assert problems_of(demo, script) == []
    for option, file in files.items():
        is_transformer = option == BASE and not families.facts_of(config.family).saves_all_parts
        if (
            not file.endswith(".safetensors") or is_transformer
        ):  # transformers are built on the meta device to be checked
            continue
        tensors, path = load_file(file), tmp_path / f"{option}.safetensors"
        for pattern in DAMAGED:
            name = next((name for name in reversed(tensors) if re.search(pattern, name)), None)
            if not name:
                continue
            other = torch.cat([tensors[name], tensors[name][-1:]])
            save_file({**tensors, name: other}, path)
            (problem,) = problems_of(demo, script, **{option: path})
            assert problem.option == option and "does not fit the tensors beside it" in str(problem), name
            assert str(list(other.shape)[0]) in str(problem)
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize("script", ["sdxl_train_network", "train_network"])
def test_a_unet_for_other_texts_than_its_encoders_give_is_refused(demo, script, tmp_path):
    tensors, path = load_file(config_of(demo, script).model.pretrained_model_name_or_path), tmp_path / "m.safetensors"
    wider = {
        name: torch.zeros(len(tensor), tensor.shape[1] + 32)
        for name, tensor in tensors.items()
        if re.search(r"attn2\.to_[kv]\.weight", name)
    }
    save_file({**tensors, **wider}, path)
    (problem,) = problems_of(demo, script, pretrained_model_name_or_path=path)
    assert problem.option == "pretrained_model_name_or_path" and "they are of different models" in str(problem)


def test_the_wrong_tensor_is_named_and_not_its_neighbours():
    layers = {f"text_model.encoder.layers.{n}.mlp.fc1.weight": (64, 32) for n in range(3)}
    wrong = "text_model.encoder.layers.0.mlp.fc1.weight"
    problem = expected_shapes.misshapen("a", {**layers, wrong: (64, 33)})
    assert problem and problem.arguments["tensor"] == wrong
    assert expected_shapes.misshapen("a", layers) is None
