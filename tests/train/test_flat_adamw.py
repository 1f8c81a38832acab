"""The fused AdamW over runs of weights: equal to PyTorch's own to the last bit, with its states."""

import copy
import functools
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from library.compiler import flat_memory
from library.config.building import build_config
from library.families.flux.options import FluxLora
from library.optim import optimizers
from library.optim.flat_adamw import FlatAdamW, clip_norm
from tests.training import LORA_OF_EACH_KIND, config_of, train

# Multiples of 16: on a CPU the rest of a tensor is computed without vector instructions, and rounded in another way.
SHAPES = [(4, 8), (16, 16), (3, 16), (8, 4), (64,), (16,)]
SETTINGS = {
    "plain": {},
    "decay": {"weight_decay": 0.3, "eps": 1e-6, "betas": (0.8, 0.9)},
    "maximized": {"maximize": True},
    "amsgrad": {"amsgrad": True},
    "not fused": {"fused": False},
}

CAN_LIE, APART = flat_memory.can_lie, lambda _tensor: False


class Learner:
    """Weights in two groups of different rates, by PyTorch's AdamW or in one buffer by ours."""

    def __init__(self, flat, **settings):
        torch.manual_seed(0)
        self.weights, self.flat = [nn.Parameter(torch.randn(shape)) for shape in SHAPES], flat
        if flat:
            flat_memory.move_together(self.weights)
        self.settings = {"fused": True, **settings}
        self.begin()

    def begin(self):
        groups = [{"params": self.weights[:4], "lr": 1e-2}, {"params": self.weights[4:], "lr": 3e-3}]
        self.optimizer = (FlatAdamW if self.flat else torch.optim.AdamW)(groups, **self.settings)

    def step(self, seed, without=(), apart=False, found_inf=None, limit=0.0):
        generator = torch.Generator().manual_seed(seed)
        gradients = flat_memory.like(self.weights)
        for number, (p, gradient) in enumerate(zip(self.weights, gradients, strict=True)):
            gradient.copy_(torch.randn(p.shape, generator=generator))
            p.grad = None if number in without else gradient.clone() if apart else gradient
        if limit:
            clip_norm(self.weights, limit, gathered=True)
        if found_inf is not None:
            self.optimizer.found_inf = torch.tensor(found_inf)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self):
        return copy.deepcopy(self.optimizer.state_dict()["state"])

    def saved(self):
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)


def assert_equal(one, other):
    for p, q in zip(one.weights, other.weights, strict=True):
        assert torch.equal(p, q)
    ours, theirs = one.state(), other.state()
    assert ours.keys() == theirs.keys()
    for number, values in theirs.items():
        assert ours[number].keys() == values.keys()
        assert all(torch.equal(ours[number][name], value) for name, value in values.items())


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_and_states_are_those_of_pytorchs_own(name):
    flat, plain = Learner(True, **SETTINGS[name]), Learner(False, **SETTINGS[name])
    for seed in range(4):
        for learner in (flat, plain):
            learner.step(seed, limit=1.0 if seed == 2 else 0.0)
    assert_equal(flat, plain)
    assert len(flat.optimizer._runs) == (0 if name in ("amsgrad", "not fused") else 2)


@pytest.mark.parametrize("backwards", [False, True])
def test_gradients_may_be_missing_elsewhere_or_not_finite(backwards):
    steps = [
        {"found_inf": 1.0},
        {"apart": True},
        {},
        {"without": (4, 5)},  # all of a group
        {"found_inf": 0.0},
        {"without": (1,)},
        {},
        {"without": range(6)},
        {"found_inf": 1.0},
        {},
    ]
    flat, plain = Learner(True), Learner(False)
    for seed, how in enumerate(steps[::-1] if backwards else steps):
        for learner in (flat, plain):
            learner.step(seed, **how)
        assert_equal(flat, plain)


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_states_are_exchanged_with_pytorchs_own(before, after):
    """Those of before this class, and those that an older version reads."""
    saving, whole = Learner(before), Learner(False)
    for seed in range(3):
        saving.step(seed)
        whole.step(seed)
    loading = Learner(after)
    loading.step(7)  # which the state replaces
    for p, q in zip(loading.weights, saving.weights, strict=True):
        p.data.copy_(q)
    loading.optimizer.load_state_dict(saving.saved())
    for seed in range(3, 6):
        loading.step(seed)
        whole.step(seed)
    assert_equal(loading, whole)
    if after:
        assert [len(run.weights) for run in loading.optimizer._runs] == [4, 2]


def test_weights_of_unequal_steps_are_stepped_by_themselves():
    saving, whole = Learner(False), Learner(False)
    for seed in range(2):
        saving.step(seed, without=(0,))
        whole.step(seed, without=(0,))
    saving.step(2)
    whole.step(2)
    loading = Learner(True)
    for p, q in zip(loading.weights, saving.weights, strict=True):
        p.data.copy_(q)
    loading.optimizer.load_state_dict(saving.saved())
    loading.step(3)
    whole.step(3)
    assert_equal(loading, whole)
    assert [len(run.weights) for run in loading.optimizer._runs] == [2]


def test_weights_that_have_moved_are_stepped_where_they_are():
    flat, plain = Learner(True), Learner(False)
    for seed in range(3):
        for learner in (flat, plain):
            learner.step(seed)
        flat.weights[seed].data = flat.weights[seed].data.clone()
    assert_equal(flat, plain)


def test_flat_adamw_is_chosen_for_gathered_weights_on_a_gpu(monkeypatch):
    config = build_config(FluxLora, {"learning_rate": 0.5}, notes=[])

    def chosen(config, dtype, caches=("the denoiser's",)):
        weight = nn.Parameter(torch.zeros(2, 2, dtype=dtype))
        monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
        groups = [{"params": [weight], "lr": 0.5, "name": "all"}]
        try:
            return optimizers.make_optimizer(SimpleNamespace(groups=lambda: groups, factor_caches=caches), config)
        finally:
            monkeypatch.undo()

    assert type(chosen(config, torch.float32)) is FlatAdamW
    assert type(chosen(config, torch.float32, ())) is torch.optim.AdamW
    parts = chosen(config, torch.bfloat16).bundles  # steps copies
    assert {type(part.optimizer) for part in parts} == {torch.optim.AdamW} and parts[0].optimizer.defaults["fused"]
    own = build_config(FluxLora, {"learning_rate": 0.5, "optimizer_args": ["fused=True"]}, notes=[])
    assert type(chosen(own, torch.float32)) is torch.optim.AdamW


@pytest.mark.parametrize("script", LORA_OF_EACH_KIND)
def test_a_training_and_its_states_are_the_same(script, demo, squares, tmp_path, monkeypatch):
    """With the fused optimizer, which a training on a CPU does not choose. A state of each resumes with the other."""
    monkeypatch.setattr(optimizers, "load_subclass", lambda *_: functools.partial(FlatAdamW, fused=True))
    values = {"train_data_dir": squares, "gradient_accumulation_steps": 2, "ema_decay": 0.9, "save_state": True}
    values |= {"save_every_n_steps": 2, "scale_weight_norms": 0.01, "network_args": ["loraplus_lr_ratio=4"], "seed": 3}
    outcomes = []
    for together in (False, True):
        folder = tmp_path / str(together)
        monkeypatch.setattr(flat_memory, "can_lie", CAN_LIE if together else APART)
        outcomes.append(train(config_of(demo, script, output_dir=folder, max_train_steps=4, **values)))
        monkeypatch.setattr(flat_memory, "can_lie", APART if together else CAN_LIE)
        (state,) = folder.glob("*-step00000002-state")
        again = {"output_dir": tmp_path / f"again {together}", "resume": str(state), "max_train_steps": 4}
        outcomes.append(train(config_of(demo, script, **values | again)))
    first, *others = [outcome.tensors() for outcome in outcomes]
    assert all(torch.equal(other[name], tensor) for other in others for name, tensor in first.items())
    assert len({tuple(outcome.losses[-2:]) for outcome in outcomes}) == 1
