import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn

from library.methods.adapters import AdapterSpec, LoraConv2d, LoraLinear, SplitLoraLinear, adapter_class


def adapted(layer, **spec):
    spec = AdapterSpec(**{"rank": 3, "alpha": 1.5, **spec})
    torch.manual_seed(1)
    new = adapter_class(layer, spec).around(layer, spec)
    with torch.no_grad():
        for up in new.lora_up if isinstance(new, SplitLoraLinear) else [new.lora_up]:
            up.weight.normal_()
    return new


def test_linear_is_base_plus_scaled_product():
    layer, x = nn.Linear(5, 7), torch.randn(2, 4, 5)
    new = adapted(layer)
    expected = layer(x) + 0.5 * x @ new.lora_down.weight.T @ new.lora_up.weight.T
    torch.testing.assert_close(new(x), expected)
    assert new.weight is layer.weight and new.bias is layer.bias and isinstance(new, nn.Linear)
    assert not hasattr(layer, "lora_down")


def test_half_precision_has_the_strength_of_float32():
    """float16 scales the activations in place of the factors, which it would lose."""
    layers = (nn.Linear(5, 7), torch.randn(2, 4, 5)), (nn.Conv2d(4, 6, 3), torch.randn(2, 4, 8, 8))
    for layer, x in layers:
        for spec in ({}, *([{"split": (3, 4)}] if x.ndim == 3 else [])):
            new = adapted(layer, **spec)
            expected = new.delta(x)
            for dtype in (torch.float16, torch.bfloat16):
                torch.testing.assert_close(new.delta(x.to(dtype)).float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kernel, stride, padding", [(1, 1, 0), (3, 1, 1), (3, 2, 1)])
def test_conv_is_the_sum_of_two_convolutions(kernel, stride, padding):
    layer, x = nn.Conv2d(4, 6, kernel, stride, padding), torch.randn(2, 4, 8, 8)
    new = adapted(layer)
    product = torch.einsum("or,rikl->oikl", new.lora_up.weight.flatten(1), new.lora_down.weight)
    expected = F.conv2d(x, layer.weight + 0.5 * product, layer.bias, stride, padding)
    torch.testing.assert_close(new(x), expected, rtol=1e-4, atol=1e-5)
    assert new.lora_down.weight.shape == (3, 4, kernel, kernel) and new.lora_up.weight.shape == (6, 3, 1, 1)


def test_a_new_adapter_changes_nothing():
    for layer, x in ((nn.Linear(5, 7), torch.randn(2, 5)), (nn.Conv2d(4, 6, 3), torch.randn(1, 4, 8, 8))):
        spec = AdapterSpec(rank=4, alpha=1)
        assert torch.equal(adapter_class(layer, spec).around(layer, spec)(x), layer(x))


def test_split_adapters_are_block_diagonal_and_scale_alike():
    layer, x = nn.Linear(4, 4 * 3 + 10), torch.randn(2, 4)
    new = adapted(layer, split=(4, 4, 4, 10))
    tensors = new.tensors()
    down, up, alpha = (tensors[k] for k in ("lora_down.weight", "lora_up.weight", "alpha"))
    assert down.shape == (12, 4) and up.shape == (22, 12)
    assert not up[:4, 3:].any() and not up[12:, :9].any()
    # What a loader does that knows nothing of the splitting: alpha over rows.
    torch.testing.assert_close(new(x) - layer(x), float(alpha) / 12 * x @ down.T @ up.T)


def test_split_reads_its_own_file_and_refuses_an_entangled_one():
    layer = nn.Linear(4, 12)
    new, other = adapted(layer, split=(4, 4, 4)), adapted(layer, split=(4, 4, 4), alpha=9.0)
    other.load(new.tensors())
    assert other.alpha == 1.5
    assert all(torch.equal(a, b) for a, b in zip(new.tensors().values(), other.tensors().values(), strict=True))
    with pytest.raises(ValueError, match="split_qkv"):
        other.load({**new.tensors(), "lora_up.weight": torch.ones(12, 9)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_base_in_few_bits_works_with_and_without_autocast(dtype):
    layer, x = nn.Linear(16, 8).to(dtype), torch.randn(2, 16)
    new = adapted(layer)
    expected = F.linear(x, layer.weight.float(), layer.bias.float()) + new.delta(x)
    torch.testing.assert_close(new(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert new(x).dtype == torch.bfloat16
        torch.testing.assert_close(new(x).float(), expected, rtol=0.1, atol=0.1)
    assert new.lora_down.weight.dtype == torch.float32


def test_casting_the_model_keeps_the_scale_exact():
    new = adapted(nn.Linear(4, 4), rank=24, alpha=1.0).to(torch.bfloat16)
    assert new.scale.dtype == torch.float32 and new.scale.item() == pytest.approx(1 / 24)


def test_dropouts_are_off_in_evaluation_and_right_on_average():
    x = torch.randn(1, 6).expand(4096, 6)
    for name in ("dropout", "rank_dropout"):
        new = adapted(nn.Linear(6, 2), **{name: 0.5})
        torch.manual_seed(0)
        first = new.delta(x)
        torch.manual_seed(0)
        assert torch.equal(first, new.delta(x))  # the generator decides, nothing else
        assert not torch.equal(first, new.delta(x))
        torch.testing.assert_close(first.mean(0), new.eval().delta(x)[0], atol=0.15, rtol=0.1)
        assert torch.equal(new(x), new(x))


def test_rank_dropout_is_one_mask_for_all_tokens_of_an_image():
    new = adapted(nn.Linear(6, 2), rank=8, rank_dropout=0.5)
    hidden = new._dropout(torch.ones(3, 5, 8))
    assert torch.equal(hidden, hidden[:, :1].expand_as(hidden)) and len(hidden[:, 0].unique(dim=0)) > 1
    conv = adapted(nn.Conv2d(4, 6, 3), rank=8, rank_dropout=0.5)
    hidden = conv._dropout(torch.ones(2, 8, 3, 3))
    assert torch.equal(hidden, hidden[..., :1, :1].expand_as(hidden))


def test_module_dropout_takes_the_whole_adapter_without_rescaling():
    new = adapted(nn.Linear(6, 2), module_dropout=0.5)
    x, full = torch.randn(3, 6), None
    full = new.eval().delta(x)
    new.train()
    outputs = {tuple(new.delta(x).flatten().tolist()) for _ in range(30)}
    assert outputs == {tuple(full.flatten().tolist()), tuple((full * 0).flatten().tolist())}


def test_product_norm_is_the_norm_of_the_product():
    for layer in (nn.Linear(5, 7), nn.Conv2d(4, 6, 3)):
        new = adapted(layer)
        product = new.lora_up.weight.flatten(1) @ new.lora_down.weight.flatten(1) * 0.5
        torch.testing.assert_close(new.product_norm(), product.norm())


class Block(nn.Module):
    def __init__(self, **spec):
        super().__init__()
        self.a, self.b = adapted(nn.Linear(8, 8), **spec), adapted(nn.Linear(8, 8), rank=3, split=(4, 4), **spec)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(x)))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [{}, {"dropout": 0.1, "rank_dropout": 0.2, "module_dropout": 0.3}])
@pytest.mark.parametrize("autocast", [False, True])
def test_blocks_share_a_graph_whatever_the_multiplier(spec, autocast):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    blocks = [Block(**spec), Block(**spec), Block(alpha=7.0, **spec)]
    for block in blocks:
        block.compile(backend=counter, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for multiplier in (1.0, 0.0, 0.5):
            for block in blocks:
                block.a.set_multiplier(multiplier)
                block(torch.randn(2, 3, 8, requires_grad=True)).sum().backward()
    assert counter.frame_count == 1


@pytest.mark.slow
def test_compiled_equals_eager():
    torch._dynamo.reset()
    block, x = Block(), torch.randn(2, 3, 8)
    expected = block(x)
    block.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(block(x), expected)
    block.a.set_multiplier(0.25)
    changed = block(x)
    assert not torch.allclose(changed, expected)
    with torch._dynamo.config.patch(disable=True):
        torch.testing.assert_close(block.forward(x), changed)


def test_only_layers_that_fit_are_adapted():
    spec = AdapterSpec(rank=2, alpha=1)
    assert adapter_class(nn.Linear(2, 2), spec) is LoraLinear and adapter_class(nn.Conv2d(2, 2, 1), spec) is LoraConv2d
    assert adapter_class(nn.Conv2d(2, 2, 1, groups=2), spec) is None and adapter_class(nn.LayerNorm(2), spec) is None
