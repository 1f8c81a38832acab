"""Products in 8 bits, computed on the processor as the GPU does them."""

import pytest
import torch
from torch import nn

from library.check import machine, preflight
from library.config.problems import ConfigError
from library.memory.quantization import fp8_matmul, fp8_storage, int8, int8_matmul
from library.methods.adapters import AdapterSpec, LoraLinear
from tests.training import LORAS, config_of

CPU = torch.device("cpu")


FORMATS = {
    "fp8": lambda layer, device: fp8_matmul.quantize_fp8_(layer, device, device),
    "int8": lambda layer, device: int8.quantize_int8_(layer, device, True),
}
FORMATS["int8 rotated"] = lambda layer, device: int8.quantize_int8_(layer, device, True, True)
WORST = {"int8 rotated": 0.015, "fp8": 0.06, "int8": 0.015}


def layers(quantize=FORMATS["fp8"], bias=True):
    torch.manual_seed(0)
    exact = nn.Linear(64, 96, bias=bias).requires_grad_(False)
    with torch.no_grad():
        exact.weight[::2] *= 100  # rows of very different size, which one scale for all could not hold
    fast = nn.Linear(64, 96, bias=bias).requires_grad_(False)
    fast.load_state_dict(exact.state_dict())
    quantize(fast, CPU)
    return exact, fast


def away(actual, wanted):
    """How far off, as a share of the size of each row."""
    return ((actual.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()


@pytest.mark.parametrize("name", FORMATS)
def test_answers_and_gradients_are_those_of_the_exact_product_but_for_rounding(name):
    exact, fast = layers(FORMATS[name])
    x = (torch.randn(2, 5, 64) * torch.logspace(-3, 3, 5)[:, None]).requires_grad_(True)
    gradient = torch.randn(2, 5, 96) * torch.logspace(2, -2, 5)[:, None]
    wanted, actual = exact(x), fast(x)
    assert fast.weight.itemsize == 1 and actual.dtype == (torch.bfloat16 if name == "fp8" else x.dtype)
    assert away(actual, wanted) < WORST[name]
    (wanted_x,) = torch.autograd.grad(wanted, x, gradient)
    (found_x,) = torch.autograd.grad(actual, x, gradient.to(actual.dtype))
    assert away(found_x, wanted_x) < WORST[name]


def test_int8_products_are_sums_of_whole_numbers_in_both_directions():
    weight, few = (torch.randint(-127, 128, size, dtype=torch.int8) for size in ((96, 64), (5, 64)))
    rows, columns = torch.rand(5, 1), torch.rand(96)
    sums = (few.long() @ weight.long().t()).float()
    product = int8_matmul.int8_product(few, weight, rows, columns, torch.float32)
    assert torch.equal(product, sums * rows * columns)
    product = int8_matmul.int8_product(few, weight, rows, None, torch.bfloat16)
    assert torch.equal(product, (sums * rows).to(torch.bfloat16))


def test_rotated_rows_round_better_where_few_channels_are_large():
    off = {}
    for name in ("int8", "int8 rotated"):
        exact, fast = layers(FORMATS[name])
        x = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(1))
        x[..., 7] *= 40
        off[name] = away(fast(x), exact(x))
    assert off["int8 rotated"] < 0.6 * off["int8"]


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k", "n"), [(4608, 3072, 9216), (77, 2048, 640), (1, 64, 96), (300, 1040, 272)])
def test_int8_kernels_of_the_gpu_give_the_very_same_numbers(m, k, n):
    from library.memory.quantization import int8_triton

    torch.manual_seed(0)
    few, weight = (torch.randint(-127, 128, size, dtype=torch.int8) for size in ((m, k), (n, k)))
    rows, columns = torch.rand(m, 1), torch.rand(n)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for inputs in ((few, weight, rows, columns), (few, weight, rows, None)):
            wanted = int8_matmul.int8_product(*inputs, dtype)
            on_gpu = [x if x is None else x.cuda() for x in inputs]
            assert torch.equal(int8_matmul.int8_product(*on_gpu, dtype).cpu(), wanted)
            for tiles in (int8_triton.USUAL_TILES, int8_triton.FEW_ROWS_TILES, int8_triton.OLD):
                assert torch.equal(int8_triton.multiply(*on_gpu, dtype, tiles).cpu(), wanted)


@pytest.mark.gpu
def test_compiled_int8_layers_of_the_gpu_agree_with_the_processor():
    _, here = layers(FORMATS["int8"])
    there = torch.compile(layers(FORMATS["int8"])[1].cuda(), fullgraph=True)
    x, gradient = torch.randn(2, 40, 64), torch.randn(2, 40, 96)
    inputs, again = x.clone().requires_grad_(True), x.cuda().requires_grad_(True)
    wanted, actual = here(inputs), there(again)
    assert away(actual.cpu(), wanted) < 0.01
    (wanted_x,), (found_x,) = (
        torch.autograd.grad(wanted, inputs, gradient),
        torch.autograd.grad(actual, again, gradient.cuda()),
    )
    assert away(found_x.cpu(), wanted_x) < 0.01


@pytest.mark.parametrize("name", FORMATS)
def test_one_row_an_image_is_multiplied_unchanged_kept(name):
    exact, fast = layers(FORMATS[name])
    x = torch.randn(3, 64)
    assert away(fast(x), exact(x)) < 0.04


@pytest.mark.parametrize("name", FORMATS)
def test_a_compiled_graph_brings_no_matrix_back_for_one_row(name):
    """The kernel that adds up reads it as it is kept."""
    exact, fast = layers(FORMATS[name])
    graphs, x = [], torch.randn(1, 64, requires_grad=True)
    answer = torch.compile(fast, backend=lambda graph, _: graphs.append(graph.code) or graph, fullgraph=True)(x)
    assert "linear" not in graphs[0] and away(answer, exact(x)) < 0.04
    (found_x,) = torch.autograd.grad(answer.float().sum(), x)
    (wanted_x,) = torch.autograd.grad(exact(x).sum(), x)
    assert away(found_x, wanted_x) < 0.04


def test_what_comes_in_8_bits_stays_bit_for_bit():
    layer = nn.Linear(32, 32).requires_grad_(False)
    layer.weight.data = layer.weight.data.to(fp8_matmul.FP8_DTYPE)
    before = layer.weight.data.clone()
    fp8_matmul.quantize_fp8_(layer, CPU, CPU)
    assert torch.equal(layer.weight.data.float(), before.float()) and bool((layer.weight_scale == 1).all())


def test_rounding_a_few_rows_at_a_time_changes_nothing(monkeypatch):
    exact, whole = layers()
    monkeypatch.setattr(fp8_matmul, "MAX_ROUNDED", 5 * 64 + 1)
    _, parts = layers()
    rows, scale = fp8_matmul.quantize_rows_fp8(exact.weight)
    for actual in (whole, parts):
        assert torch.equal(actual.weight.view(torch.uint8), rows.view(torch.uint8))
        assert torch.equal(actual.weight_scale, scale[:, 0])


def test_rows_of_zeros_stay_zeros():
    for quantize in (fp8_matmul.quantize_rows_fp8, int8_matmul.quantize_rows_int8):
        few, rows = quantize(torch.zeros(2, 16))
        assert not few.float().any() and rows.isfinite().all()


@pytest.mark.parametrize("name", FORMATS)
def test_adapters_go_on_learning_around_it_and_names_stay(name):
    exact, _ = layers()
    adapted = LoraLinear.around(exact, AdapterSpec(rank=4, alpha=4.0))
    names = [*adapted.state_dict()]
    FORMATS[name](adapted, CPU)
    assert type(adapted).__name__ == "LoraLinear" and isinstance(adapted, nn.Linear)
    assert [*adapted.state_dict()] == names
    x = torch.randn(2, 3, 64, requires_grad=True)
    adapted(x).square().sum().backward()
    assert adapted.lora_up.weight.grad.any() and x.grad.any() and adapted.weight.grad is None


@pytest.mark.parametrize("name", FORMATS)
def test_8_bit_products_compile_into_one_graph(name):
    _, fast = layers(FORMATS[name])
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    x = torch.randn(2, 5, 64, requires_grad=True)
    actual = torch.compile(fast, backend=count, fullgraph=True)(x)
    assert len(graphs) == 1 and torch.equal(actual, fast(x))


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("script", LORAS)
def test_without_such_a_gpu_they_are_kept_and_no_more_and_that_is_reported(demo, squares, script, name):
    how = {f"{name}_base": True, f"{name}_compute": True, "compile": True, "cuda_graphs": "true"}
    config = config_of(demo, script, mixed_precision="bf16", train_data_dir=squares, **how)
    block = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    fp8_storage.store_blocks([[block]], config, CPU)
    dtype = {"fp8": fp8_matmul.FP8_DTYPE, "int8": torch.int8}[name]
    x = torch.randn(2, 3, 32)
    assert block[0].weight.dtype == dtype and "_Product" not in str(block[0](x.requires_grad_(True)).grad_fn)
    remarks = preflight.check_before_training(config)
    assert any(f"{name}_compute has no effect" in str(remark) for remark in remarks)
    assert any("cuda_graphs has no effect here: no GPU was found" in str(remark) for remark in remarks)


def test_a_gpu_with_int8_products_alone_is_offered_them(demo, squares, monkeypatch):
    monkeypatch.setattr(int8_matmul, "supports_int8", lambda device: True)
    how = {"fp8_base": True, "fp8_compute": True, "mixed_precision": "bf16", "compile": True}
    (said,) = (
        remark
        for remark in preflight.check_before_training(
            config_of(demo, "flux_train_network", train_data_dir=squares, **how)
        )
        if "fp8_compute" in str(remark)
    )
    assert "this GPU multiplies in int8, not in fp8; use auto_compute" in str(said)
    assert said.fix == {"fp8_compute": False, "auto_compute": True}


@pytest.mark.parametrize(
    ("script", "kind", "capability", "said"),
    [
        ("flux_train_network", "bf16", (7, 5), "fp16"),
        ("flux_train_network", "bf16", (8, 0), ""),
        ("flux_train_network", "fp16", (7, 5), ""),
        ("zimage_train_network", "bf16", (7, 5), ""),
        ("flux_train", "bf16", (7, 5), ""),
        ("zimage_train_network", "fp16", (8, 6), "bf16"),
    ],
)
def test_half_precision_that_gpu_or_model_do_not_suit_is_reported(demo, monkeypatch, script, kind, capability, said):
    monkeypatch.setattr(machine, "training_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    needs_bf16 = {"full_bf16": True} if script == "flux_train" else {}
    told = list(machine.find_half_precision_notes(config_of(demo, script, mixed_precision=kind, **needs_bf16)))
    assert [remark.fix for remark in told] == ([{"mixed_precision": said}] if said else [])


def test_8_bit_products_need_an_8_bit_base_and_bf16(demo):
    with pytest.raises(ConfigError, match="fp8_compute needs a base model in 8 bits: add fp8_base"):
        config_of(demo, LORAS[0], mixed_precision="bf16", fp8_compute=True)
    with pytest.raises(ConfigError, match="fp8_compute needs mixed_precision = bf16"):
        config_of(demo, LORAS[0], mixed_precision="fp16", fp8_base=True, fp8_compute=True)
    with pytest.raises(ConfigError, match="int8_compute needs a base model in int8: add int8_base"):
        config_of(demo, LORAS[0], mixed_precision="bf16", int8_compute=True)
    for name in ("fp8", "int8"):
        with pytest.raises(ConfigError, match=f"auto_compute and {name}_compute exclude each other: choose one"):
            config_of(
                demo,
                LORAS[0],
                mixed_precision="bf16",
                auto_compute=True,
                **{f"{name}_base": True, f"{name}_compute": True},
            )
