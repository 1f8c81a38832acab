"""Products in 8 bits, computed on the processor as the GPU does them."""

import pytest
import torch
from torch import nn

from library.check import preflight
from library.config.schema import ConfigError
from library.memory.quantization import fp8_matmul, fp8_storage
from library.methods.adapters import AdapterSpec, LoraLinear
from tests.training import LORAS, config_of

CPU = torch.device("cpu")


def layers(bias=True):
    torch.manual_seed(0)
    exact = nn.Linear(64, 96, bias=bias).requires_grad_(False)
    with torch.no_grad():
        exact.weight[::2] *= 100  # rows of very different size, which one scale for all could not hold
    fast = nn.Linear(64, 96, bias=bias).requires_grad_(False)
    fast.load_state_dict(exact.state_dict())
    fp8_matmul.quantize_fp8_(fast, CPU)
    return exact, fast


def away(found, wanted):
    """How far off, as a share of the size of each row."""
    return ((found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()


def test_answers_and_gradients_are_those_of_the_exact_product_but_for_rounding():
    exact, fast = layers()
    x = (torch.randn(2, 5, 64) * torch.logspace(-3, 3, 5)[:, None]).requires_grad_(True)
    gradient = torch.randn(2, 5, 96) * torch.logspace(2, -2, 5)[:, None]
    wanted, found = exact(x), fast(x)
    assert fast.weight.dtype == fp8_matmul.FP8 and found.dtype == torch.bfloat16
    assert away(found, wanted) < 0.06
    (wanted_x,) = torch.autograd.grad(wanted, x, gradient)
    (found_x,) = torch.autograd.grad(found, x, gradient.to(found.dtype))
    assert away(found_x, wanted_x) < 0.06


def test_one_row_an_image_is_multiplied_as_it_is_kept():
    exact, fast = layers()
    x = torch.randn(3, 64)
    assert away(fast(x), exact(x)) < 0.04


def test_what_comes_in_8_bits_stays_bit_for_bit():
    layer = nn.Linear(32, 32).requires_grad_(False)
    layer.weight.data = layer.weight.data.to(fp8_matmul.FP8)
    before = layer.weight.data.clone()
    fp8_matmul.quantize_fp8_(layer, CPU)
    assert torch.equal(layer.weight.data.float(), before.float()) and bool((layer.weight_scale == 1).all())


def test_rows_of_zeros_stay_zeros():
    few, rows = fp8_matmul.rounded(torch.zeros(2, 16))
    assert not few.float().any() and rows.isfinite().all()


def test_adapters_go_on_learning_around_it_and_names_stay():
    exact, _ = layers()
    adapted = LoraLinear.around(exact, AdapterSpec(rank=4, alpha=4.0))
    names = [*adapted.state_dict()]
    fp8_matmul.quantize_fp8_(adapted, CPU)
    assert type(adapted).__name__ == "LoraLinear" and isinstance(adapted, nn.Linear)
    assert [*adapted.state_dict()] == names
    x = torch.randn(2, 3, 64, requires_grad=True)
    adapted(x).square().sum().backward()
    assert adapted.lora_up.weight.grad.any() and x.grad.any() and adapted.weight.grad is None


def test_it_compiles_into_one_graph():
    _, fast = layers()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    x = torch.randn(2, 5, 64, requires_grad=True)
    found = torch.compile(fast, backend=count, fullgraph=True)(x)
    assert len(graphs) == 1 and torch.equal(found, fast(x))


@pytest.mark.parametrize("script", LORAS)
def test_without_such_a_gpu_they_are_kept_and_no_more_and_that_is_said(demo, squares, script):
    config = config_of(
        demo, script, mixed_precision="bf16", fp8_base=True, fp8_compute=True, train_data_dir=squares, compile=True
    )
    block = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    fp8_storage.store_blocks([[block]], config, CPU)
    assert isinstance(block[0], fp8_storage.StoredLinear)
    assert any("fp8_compute has no effect" in remark for remark in preflight.check(config))


def test_what_it_needs(demo):
    with pytest.raises(ConfigError, match="fp8_compute needs a base model in 8 bits: add fp8_base"):
        config_of(demo, LORAS[0], mixed_precision="bf16", fp8_compute=True)
    with pytest.raises(ConfigError, match="fp8_compute needs mixed_precision = bf16"):
        config_of(demo, LORAS[0], mixed_precision="fp16", fp8_base=True, fp8_compute=True)
