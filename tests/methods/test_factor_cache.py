"""Factors that are made once for a pass: the numbers of layers that make their own, from fewer operations."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from library.methods.adapters import AdapterSpec, adapter_class
from library.methods.factor_cache import FactorCache

SPECS = (AdapterSpec(rank=4, alpha=1.0), AdapterSpec(rank=3, alpha=2.0, split=(4, 4)), AdapterSpec(rank=6, alpha=0.7))


class Network(nn.Module):
    """Linear layers, one of them fused, and a convolution, each with an adapter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv2d(2, 2, 1)
        self.layers = nn.ModuleList(adapter_class(x, s).around(x, s) for x, s in zip(layers, SPECS, strict=True))
        self.requires_grad_(False)
        for adapter in self.layers:
            for factor in adapter.factors():
                nn.init.normal_(factor, std=0.3)
                factor.requires_grad_(True)

    def forward(self, x):
        first, second, conv = self.layers
        return conv(second(torch.tanh(first(x))).view(-1, 2, 2, 2))


def learned(network, x, kind):
    with torch.autocast("cpu", kind, enabled=kind is not None):
        answer = network(x)
    answer.float().square().mean().backward()
    return answer, [p.grad for adapter in network.layers for p in adapter.factors()]


@pytest.mark.parametrize("kind", [None, torch.bfloat16, torch.float16])
def test_numbers_and_gradients_are_those_of_layers_by_themselves(kind):
    plain, prepared, x = Network(), Network(), torch.randn(5, 8)
    FactorCache(prepared, prepared.layers)
    (expected, wanted), (answer, actual) = learned(plain, x, kind), learned(prepared, x, kind)
    assert torch.equal(answer, expected)
    for gradient, other in zip(actual, wanted, strict=True):
        assert gradient.dtype == torch.float32 and gradient.any()
        torch.testing.assert_close(gradient, other, rtol=2e-2 if kind else 1e-6, atol=1e-5)


def test_what_does_not_learn_gets_no_gradient_and_the_rest_does():
    network = Network()
    FactorCache(network, network.layers)
    for factor in network.layers[1].factors():
        factor.requires_grad_(False)
    _, gradients = learned(network, torch.randn(5, 8), torch.bfloat16)
    assert [g is not None for g in gradients] == [True, True, False, False, False, True, True]
    assert not any(t.requires_grad for t in network.layers[1].cached_factors)


def test_strength_follows_at_the_next_pass_and_steps_are_seen():
    network, x = Network(), torch.randn(5, 8)
    ready, before = FactorCache(network, network.layers), network(x)
    ready.set_multiplier(0.0)
    base = network(x)
    assert not torch.equal(base, before)
    with torch.no_grad():
        for adapter in network.layers:
            adapter.lora_up.requires_grad_(False).apply(lambda m: m.weight.zero_() if hasattr(m, "weight") else None)
    ready.set_multiplier(1.0)
    torch.testing.assert_close(network(x), base)


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_layers_neither_cast_nor_scale_any_more():
    plain, prepared, x = Network(), Network(), torch.randn(5, 8, dtype=torch.bfloat16)
    FactorCache(prepared, prepared.layers)
    counts = []
    for network in (plain, prepared):
        with torch.autocast("cpu", torch.bfloat16), Counted() as counted:
            network(x)
        counts.append({name: counted.names.count(name) for name in ("_to_copy", "mul")})
    frozen = 3 * 2  # weights and biases, which the networks of a training hold in the right type
    assert counts[0]["mul"] == 4 and counts[0]["_to_copy"] == frozen + 7
    assert counts[1] == {"_to_copy": frozen, "mul": 0}


def test_copies_are_of_what_is_learned_only():
    network, x = Network(), torch.randn(5, 8)
    FactorCache(network, network.layers)
    network(x).sum()
    again = copy.deepcopy(network)
    assert again.layers[0].cached_factors is None and torch.equal(again(x), network(x))
    assert again.layers[0].cached_factors[0].data_ptr() != network.layers[0].cached_factors[0].data_ptr()
