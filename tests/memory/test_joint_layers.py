"""Layers of U-Nets that read the same input are one product, with the same outputs and gradients."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from library import families
from library.bench import subjects
from library.compiler import torch_private
from library.families.shared import joint_layers
from library.memory.prepare import prepare_denoiser, restored_after
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


def test_adapters_that_drop_values_stay_as_they_are(joined):
    trainable, predict = _model("sdxl_train_network", network_dropout=0.5)
    unet = trainable.components.denoiser
    unet.join_layers()
    predict(unet)
    assert all(attention.joint is None and attention.text_projected is None for attention in _attentions(unet))


class _Nothing(LoraLinear):
    def forward(self, input, hidden=None):
        return self.base(input) * 0


def _change_class(attention, name):
    getattr(attention, name).__class__ = _Nothing


def _replace(attention, name):
    setattr(attention, name, torch.nn.Sequential(getattr(attention, name), torch.nn.Threshold(torch.inf, 0.0)))


def _move_weight(attention, name):
    weight = getattr(attention, name).weight
    weight.data = weight.data.clone()


@pytest.mark.parametrize("change", [_change_class, _replace, _move_weight])
def test_a_layer_that_was_changed_is_computed_by_itself_until_it_is_as_before(joined, change):
    """As files do it that are applied for pictures."""
    trainable, predict = _model("sdxl_train_network")
    unet = trainable.components.denoiser
    wanted = predict(unet)
    unet.join_layers()
    joint = next(attention for attention in _attentions(unet) if attention.joint)
    changed = [(joint, "to_v"), (next(a for a in _attentions(unet) if a.is_cross_attention), "to_k")]
    before = [(attention, name, getattr(attention, name)) for attention, name in changed]
    kept = [(layer, type(layer), layer.weight.data) for _, _, layer in before]
    for attention, name in changed:
        change(attention, name)
    assert torch.allclose(predict(unet), wanted, atol=1e-4) == (change is _move_weight)
    assert joint.joint is None and changed[1][0].text_projected is None
    for attention, name, layer in before:
        setattr(attention, name, layer)
    for layer, cls, weight in kept:
        layer.__class__, layer.weight.data = cls, weight
    torch.testing.assert_close(predict(unet), wanted, rtol=1e-4, atol=1e-5)
    assert joint.joint is not None and changed[1][0].text_projected is not None


def test_after_a_trial_each_layer_has_its_own_weight(joined):
    """A setting that is tried next may swap blocks, or compile the model as a whole."""
    trainable, predict = _model("sdxl_train_network")
    unet, family = trainable.components.denoiser, trainable.family
    wanted, sizes = predict(unet), [p.untyped_storage().nbytes() for p in unet.parameters()]
    config = subjects.FamilySubject("sdxl_train_network", {"mixed_precision": "no"}, "tiny").config({})
    with restored_after(unet, family):
        prepare_denoiser(unet, family, config, CPU, ((8, 8),))
        predict(unet)
        assert any(attention.text_projected for attention in _attentions(unet))
    assert not any(attention.joint or attention.text_projected for attention in _attentions(unet))
    assert [p.untyped_storage().nbytes() for p in unet.parameters()] == sizes
    torch.testing.assert_close(predict(unet), wanted, rtol=1e-4, atol=1e-5)  # convolutions are channels last now


@pytest.mark.parametrize("arguments", [["algo=lokr"], ["algo=lora", "bypass_mode=True"], ["algo=full"]])
def test_layers_of_lycoris_stay_as_they_are(demo, squares, tmp_path, joined, arguments):
    options = {"train_data_dir": squares, "max_train_steps": 1, "mixed_precision": "no"}
    lycoris = {"network_module": "lycoris.kohya", "network_args": arguments, "output_dir": tmp_path}
    assert training.train(training.config_of(demo, UNETS[0], **options, **lycoris)).losses


def _attentions(unet):
    return [module for module in unet.modules() if hasattr(module, "to_q")]


@pytest.mark.parametrize(
    "options", [{"blocks_to_swap": 2}, {"fp8_base": True}, {"compile": True, "compile_scope": "model"}]
)
def test_swapped_quantized_and_whole_graphs_are_not_joined(joined, options):
    script = "sdxl_train_network"
    subject = subjects.FamilySubject(script, {"mixed_precision": "bf16", "compile_backend": "eager", **options}, "tiny")
    config = subject.config({})
    trainable = subject.make(config, CPU)
    trainable.components.denoiser.requires_grad_(False)
    with contextlib.suppress(NotImplementedError):
        prepare_denoiser(trainable.components.denoiser, families.family_for(config), config, CPU, ((64, 64),))
    assert not any(attention.joint for attention in _attentions(trainable.components.denoiser))
