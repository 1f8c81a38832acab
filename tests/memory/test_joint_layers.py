"""Layers of U-Nets that read the same input are one product, with the same outputs and gradients."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from library import families
from library.bench import subjects
from library.compiler import torch_private
from library.families.shared import joint_layers
from library.methods.adapters import LoraLinear
from tests import training

CPU = torch.device("cpu")
UNETS = ["sdxl_train_network", "train_network"]


@pytest.fixture
def joined(monkeypatch):
    """Let a CPU do what a GPU does."""
    monkeypatch.setattr(joint_layers, "JOINED_ON", {"cpu", "cuda"})


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        self.number += function.overloadpacket is torch.ops.aten.baddbmm
        return function(*args, **kwargs or {})


def _model(script, **options):
    subject = subjects.FamilySubject(script, {"mixed_precision": "no", **options}, "tiny")
    trainable = subject.make(subject.config({}), CPU)
    for layer in trainable.components.denoiser.modules():
        if isinstance(layer, LoraLinear):
            torch.nn.init.normal_(layer.lora_up.weight, std=0.1)
    torch.manual_seed(0)
    return trainable, subject.predict(trainable, 64, CPU)


def _gradients(trainable, predict):
    prediction = predict(trainable.components.denoiser)
    weights = list(trainable.method.parameters())
    return prediction, torch.autograd.grad(prediction.square().mean(), weights, materialize_grads=True)


@pytest.mark.parametrize("script", UNETS)
def test_outputs_and_gradients_are_those_of_single_layers_in_fewer_products(joined, script):
    trainable, predict = _model(script)
    unet = trainable.components.denoiser
    names, values = list(unet.state_dict()), {name: p.clone() for name, p in unet.named_parameters()}
    with Products() as before:
        wanted, wanted_gradients = _gradients(trainable, predict)
    unet.join_layers()
    with Products() as after:
        actual, gradients = _gradients(trainable, predict)
    assert after.number < 0.8 * before.number
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
    assert list(unet.state_dict()) == names
    assert all(torch.equal(p, values[name]) for name, p in unet.named_parameters())


@pytest.mark.parametrize("script", training.LORAS)
def test_gradients_of_factors_have_their_factors_order_in_memory(joined, script, monkeypatch):
    """PyTorch copies lists of tensors at once only if all pairs have equal strides."""
    pairs = []

    def copy_(into, values):
        pairs.extend((to.stride(), new.stride()) for to, new in zip(into, values, strict=True))
        for to, new in zip(into, values, strict=True):
            to.copy_(new)

    trainable, predict = _model(script, mixed_precision="bf16")
    getattr(trainable.components.denoiser, "join_layers", lambda: None)()
    monkeypatch.setattr(torch_private, "foreach_copy_", copy_)
    _gradients(trainable, predict)
    assert pairs and all(one == other for one, other in pairs)


@pytest.mark.parametrize("script", UNETS)
def test_trainings_learn_the_same(demo, squares, tmp_path, script, monkeypatch):
    """Eagerly, checkpointed and compiled; blocks share their graphs as before."""
    options = {
        "train_data_dir": squares,
        "max_train_steps": 2,
        "mixed_precision": "no",
        **training.STEADY.get(script, {}),
    }
    compiled = {"compile": True, "compile_backend": "aot_eager", "compile_blocks": training.FEW[script]}
    ways = {"eager": {}, "checkpointed": {"gradient_checkpointing": True}, "compiled": compiled}

    def outcome(name, **more):
        return training.train(training.config_of(demo, script, **options, **more, output_dir=tmp_path / name))

    wanted = outcome("single")
    monkeypatch.setattr(joint_layers, "JOINED_ON", {"cpu"})
    for way, more in ways.items():
        joint = outcome(way, **more)
        assert joint.losses == pytest.approx(wanted.losses, rel=1e-4), way
        learned = joint.tensors()
        for name, tensor in wanted.tensors().items():
            torch.testing.assert_close(learned[name].float(), tensor.float(), rtol=0.05, atol=1e-4)


def test_what_cannot_be_joined_stays_as_it_is(joined):
    """Layers that drop values or that are trained, a layer of another class, and weights that were moved away."""
    trainable, predict = _model("sdxl_train_network", network_dropout=0.5)
    unet = trainable.components.denoiser
    unet.join_layers()
    assert all(attention.joint is None for attention in _attentions(unet))
    predict(unet)
    assert all(attention.text_projected is None for attention in _attentions(unet))

    trainable, predict = _model("sdxl_train_network")
    unet = trainable.components.denoiser
    wanted = predict(unet)
    unet.join_layers()
    first = next(attention for attention in _attentions(unet) if attention.joint)
    for layer in (first.to_q, _reader(unet).to_k):
        layer.__class__ = type(
            "Other", (type(layer),), {"forward": lambda self, x, hidden=None: super(LoraLinear, self).forward(x) * 0}
        )
    assert not torch.allclose(predict(unet), wanted, atol=1e-3)  # the other class has its say

    trainable, predict = _model("sdxl_train_network")
    unet = trainable.components.denoiser
    wanted = predict(unet)
    unet.join_layers()
    for p in unet.parameters():
        p.data = p.data * 0
    assert not torch.allclose(predict(unet), wanted, atol=1e-3)
    assert all(attention.joint is None for attention in _attentions(unet))


def _attentions(unet):
    return [module for module in unet.modules() if hasattr(module, "to_q")]


def _reader(unet):
    return next(attention for attention in _attentions(unet) if attention.is_cross_attention)


@pytest.mark.parametrize(
    "options", [{"blocks_to_swap": 2}, {"fp8_base": True}, {"compile": True, "compile_scope": "model"}]
)
def test_swapped_quantized_and_whole_graphs_are_not_joined(joined, options):
    from library.memory.prepare import prepare_denoiser

    script = "sdxl_train_network"
    subject = subjects.FamilySubject(script, {"mixed_precision": "bf16", "compile_backend": "eager", **options}, "tiny")
    config = subject.config({})
    trainable = subject.make(config, CPU)
    trainable.components.denoiser.requires_grad_(False)
    with contextlib.suppress(NotImplementedError):
        prepare_denoiser(trainable.components.denoiser, families.family_for(config), config, CPU, ((64, 64),))
    assert not any(attention.joint for attention in _attentions(trainable.components.denoiser))
