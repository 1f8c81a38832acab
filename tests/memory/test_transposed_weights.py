"""fp8 weights that are stored transposed as well: the same numbers, where there is memory for them."""

import pytest
import torch
from torch import nn

from library.check.estimate import estimate
from library.compiler.torch_settings import keep_torch_settings
from library.config import ineffective
from library.measuring.candidates import advise_changes, saving_memory
from library.memory import attention
from library.memory.modulation import modulation_layers
from library.memory.prepare import all_modulation, prepare_denoiser, restored_after
from library.memory.quantization import fp8_matmul, multiplies_in_8_bits
from tests.memory.test_modulation import prepared
from tests.training import LORAS, config_of, train

CPU = torch.device("cpu")
IN_FP8 = {"fp8_base": True, "fp8_compute": True, "mixed_precision": "bf16", "compile": True}
TWICE = IN_FP8 | {"fp8_transposed_weights": True}


@pytest.fixture
def multiplies_in_fp8(monkeypatch):
    """A processor computes the same sums as a GPU."""
    monkeypatch.setattr(fp8_matmul, "supports_fp8", lambda device: True)


def test_the_gradient_is_the_same_bit_for_bit():
    torch.manual_seed(0)
    layer = nn.Linear(64, 96).requires_grad_(False)
    fp8_matmul.quantize_fp8_(layer, CPU, CPU)
    x, gradient = torch.randn(2, 5, 64, requires_grad=True), torch.randn(2, 5, 96, dtype=torch.bfloat16)
    output = layer(x)
    (expected,) = torch.autograd.grad(output, x, gradient)
    fp8_matmul.keep_transposed(layer)
    assert torch.equal(layer(x), output) and "transposed_weight" not in layer.state_dict()
    (actual,) = torch.autograd.grad(layer(x), x, gradient)
    assert torch.equal(actual, expected) and expected.any()


@pytest.mark.parametrize("script", LORAS)
def test_losses_and_graphs_of_a_training_stay(demo, shapes, tmp_path, script, multiplies_in_fp8):
    options = IN_FP8 | {"compile_backend": "aot_eager", "compile_warmup": "true", "max_train_steps": 3}
    once, twice = (
        train(
            config_of(
                demo,
                script,
                **options,
                train_data_dir=shapes,
                fp8_transposed_weights=wanted,
                output_dir=tmp_path / str(wanted),
            )
        )
        for wanted in (False, True)
    )
    assert once.losses == twice.losses and len(once.losses) == 3
    graphs = [outcome.facts["compile"] for outcome in (once, twice)]
    assert graphs[0]["graphs"] == graphs[1]["graphs"] and not graphs[1]["recompiles"]


@pytest.mark.parametrize("script", LORAS)
def test_every_product_in_fp8_finds_its_transposed_weight(demo, script, multiplies_in_fp8):
    config, family, denoiser = prepared(demo, script, **TWICE)
    with keep_torch_settings(), attention.keep_attention_settings(), restored_after(denoiser, family):
        prepare_denoiser(denoiser, family, config, CPU, ((1, 8, 8),))
        plan = all_modulation(family)
        of_one_row = {layer for block in denoiser.modules() for layer in modulation_layers(block, plan)}
        in_fp8 = [
            layer
            for layer in denoiser.modules()
            if multiplies_in_8_bits(layer) and layer.weight.dtype == fp8_matmul.FP8_DTYPE
        ]
        assert in_fp8
        for layer in in_fp8:
            assert hasattr(layer, "transposed_weight") == (layer not in of_one_row)


@pytest.mark.parametrize("script", LORAS)
def test_swapped_blocks_store_nothing_twice_and_a_remark_says_so(demo, script, multiplies_in_fp8):
    options = TWICE | {"blocks_to_swap": 1, "gradient_checkpointing": True}
    config, family, denoiser = prepared(demo, script, **options)
    with keep_torch_settings(), attention.keep_attention_settings(), restored_after(denoiser, family):
        prepare_denoiser(denoiser, family, config, CPU, ((1, 8, 8),))
        assert not any(hasattr(layer, "transposed_weight") for layer in denoiser.modules())
    assert str(ineffective.ineffective_options(config)["fp8_transposed_weights"]) == "blocks_to_swap saves memory"


@pytest.mark.parametrize("script", LORAS)
def test_the_estimate_counts_them_and_less_memory_begins_without(demo, tmp_path, script):
    at = {"pretrained_model_name_or_path": tmp_path / "none"}
    once, twice = config_of(demo, script, **at, **IN_FP8), config_of(demo, script, **at, **TWICE)
    parts = [estimate(config, (1024, 1024), "NVIDIA H200", 141.0).parts["model"] for config in (once, twice)]
    assert 1.2 < parts[1] / parts[0] < 2
    first = next(iter(saving_memory(twice)))
    assert first == {"fp8_transposed_weights": False}
    assert str(advise_changes(first, twice)) == "leave fp8_transposed_weights out"
    assert {"fp8_transposed_weights": False} not in [*saving_memory(once)]
