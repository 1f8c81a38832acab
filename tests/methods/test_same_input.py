"""Adapters of layers that read the same multiply it together."""

import pytest
import torch
from torch.nn import functional as F

from library import families
from library.bench import subjects
from library.methods.adapters import LoraLinear


def _by_itself(x, layers):
    return [F.linear(x, (layer.cached_factors or layer._own_factors(x))[0]) for layer in layers]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_no_tokens_are_read_by_two_products_of_adapters(family, monkeypatch):
    """In no family, and gradients are those of each layer by itself but for float32's rounding."""
    subject = subjects.FamilySubject(families.lora_script(family), {"mixed_precision": "no"}, "tiny")
    trainable = subject.make(subject.config({}), torch.device("cpu"))
    read = []
    for name, layer in trainable.components.denoiser.named_modules():
        if isinstance(layer, LoraLinear):
            torch.nn.init.normal_(layer.lora_up.weight, std=0.1)
            layer.register_forward_pre_hook(lambda _, given, name=name: read.append((name, *given)))
    torch.manual_seed(0)
    predicted = subject.predict(trainable, 64, torch.device("cpu"))

    def gradients():
        loss = predicted(trainable.components.denoiser).square().mean()
        return torch.autograd.grad(loss, list(trainable.method.parameters()), materialize_grads=True)

    together = gradients()
    alone = [(name, x) for name, x, *hidden in read if x.dim() == 3 and not hidden]
    same = {(a, b) for a, x in alone for b, y in alone if a < b and x is y}
    assert read and not same
    monkeypatch.setattr(LoraLinear, "down_projections", staticmethod(_by_itself))
    for actual, expected in zip(together, gradients(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=5e-7)
