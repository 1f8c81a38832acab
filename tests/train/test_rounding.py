"""Half precision that learns from small updates, and optimizers that step one bundle of weights at a time."""

import copy
import math
import weakref
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from library import families
from library.compiler.torch_private import GradScaler
from library.config.building import build_config
from library.config.problems import ConfigError
from library.families.sdxl.options import SdxlTrain
from library.optim import fused_step, optimizers, stochastic_rounding
from library.optim.stochastic_rounding import StepRNG, write_rounded

HERE = torch.device("cpu")


def rounded(numbers, throws=1):
    into, dice = torch.empty_like(numbers, dtype=torch.bfloat16), StepRNG(0)
    results = []
    for i in range(throws):
        write_rounded(into, numbers, dice.generator_for(HERE, i, 0))
        results.append(into.double())
    return torch.stack(results)


def test_rounding_is_right_on_average_and_to_a_neighbour():
    numbers = torch.randn(64, 8) * torch.logspace(-30, 30, 8)
    results = rounded(numbers, 2000)
    # Rounding to either neighbour has a standard deviation of at most half their distance: 2^-8 of the number.
    error = (results.mean(0) - numbers.double()).abs() / numbers.abs()
    assert error.max() < 5 * 2**-8 / math.sqrt(2000)
    assert ((results - numbers).abs() <= numbers.abs() * 2**-7).all()


def test_what_bfloat16_can_hold_stays():
    numbers = torch.tensor([0.0, -0.0, 1.0, -2.5, 1e-38, float("inf"), -float("inf"), 3.0e38]).bfloat16().float()
    result = rounded(numbers, 20)
    finite = numbers.isfinite()
    assert (result[:, finite] == numbers.double()[finite]).all()
    assert not result[:, ~finite].isfinite().any()


def test_nan_is_never_rounded_away():
    bits = [0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -(2**22)]  # a GPU's NaN is the first, a CPU's the last
    assert rounded(torch.tensor(bits, dtype=torch.int32).view(torch.float32), 20).isnan().all()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4, 4)])
def test_shapes_and_layouts(shape):
    numbers = torch.randn(shape)
    if len(shape) == 4:
        numbers = numbers.to(memory_format=torch.channels_last)
    into = torch.empty_like(numbers, dtype=torch.bfloat16)
    write_rounded(into, numbers, StepRNG(0).generator_for(HERE, 0, 0))
    torch.testing.assert_close(into.float(), numbers, rtol=2**-7, atol=0)


def test_the_dice_know_seed_step_and_weight():
    def throw(seed, step, number):
        return torch.rand(4, generator=StepRNG(seed).generator_for(HERE, step, number)).tolist()

    assert throw(1, 2, 3) == throw(1, 2, 3)
    assert len({tuple(throw(*which)) for which in [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)]}) == 4


# ---- optimizers


class Learner:
    """A model of two groups, in half precision where that is asked for."""

    denoiser, block_classes, factor_caches = None, (), ()

    def __init__(self, dtype=torch.float32, scale=1.0):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)).to(dtype)
        with torch.no_grad():
            for p in self.model.parameters():
                p.fill_(scale)

    def groups(self):
        first, *others = self.model
        return [
            {"params": list(first.parameters()), "lr": 0.25, "name": "first"},
            {"params": [p for layer in others for p in layer.parameters()], "lr": 0.5, "name": "rest"},
        ]

    def parameters(self):
        return [p for group in self.groups() for p in group["params"]]


def config(**values):
    return build_config(SdxlTrain, values, notes=[])


HALF = {"full_bf16": True, "mixed_precision": "bf16"}
ADAFACTOR = {"optimizer_type": "Adafactor", "optimizer_args": ["relative_step=False", "scale_parameter=False"]}


def gradients(method, step=0, scale=1.0):
    chance = torch.Generator().manual_seed(step)
    for p in method.parameters():
        p.grad = (torch.randn(p.shape, generator=chance) * scale).to(p.dtype)


def stepped(method, steps, optimizer=None, first=0, **values):
    optimizer = optimizer or optimizers.make_optimizer(method, config(**values), 7)
    for step in range(first, first + steps):
        gradients(method, step)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("half", [HALF, {"mixed_precision": "bf16"}], ids=["full_bf16", "loaded in bf16"])
@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "SGD", "AdamW8bit"])
def test_small_updates_add_up(name, half):
    """400 steps of a thousandth of what the nearest bfloat16 could show move a weight by the right sum on average."""
    rate, more = 2**-19 * (16 if name == "SGD" else 1), ADAFACTOR if name == "Adafactor" else {"optimizer_type": name}
    if name == "AdamW8bit":
        pytest.importorskip("bitsandbytes")
        more = {
            **more,
            "optimizer_args": ["weight_decay=0", "min_8bit_size=16"],
        }  # states in 8 bits in a model this small
    elif name != "Adafactor":
        more = {**more, "optimizer_args": ["weight_decay=0"]}

    def moved(dtype, **values):
        method = Learner(dtype)
        optimizer = optimizers.make_optimizer(method, config(**more, **values), 7)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for _ in range(400):
            for p in method.parameters():
                p.grad = torch.full_like(p, 0.0625 if name == "SGD" else 1.0)
            optimizer.step()
        return torch.cat([p.detach().float().flatten() for p in method.parameters()]).mean().item() - 1

    exact = moved(torch.float32)
    assert exact < -5e-4
    assert moved(torch.bfloat16, **half) == pytest.approx(exact, rel=0.25)
    if hasattr(torch.optim, name) and name != "Adafactor":
        plain = Learner(torch.bfloat16)
        torch_optimizer = getattr(torch.optim, name)(plain.parameters(), lr=rate, weight_decay=0)
        for _ in range(400):
            for p in plain.parameters():
                p.grad = torch.full_like(p, 0.0625 if name == "SGD" else 1.0)
            torch_optimizer.step()
        assert all((p == 1).all() for p in plain.parameters()), "what this is for"


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_a_state_of_one_optimizer_of_all_weights_continues_in_bundles(name):
    """States of fine-tunes that load in bf16 were saved so before their weights were stepped in bundles."""
    values = (ADAFACTOR if name == "Adafactor" else {"optimizer_type": name}) | {"mixed_precision": "bf16"}
    method = Learner(torch.bfloat16)
    before = stepped(method, 5, optimizers._construct_optimizer(config(**values), method.groups()))
    state = copy.deepcopy(before.state_dict())
    state["param_groups"][1]["lr"] = 0.125  # where its schedule was
    after = optimizers.make_optimizer(method, config(**values), 7)
    after.load_state_dict(state)
    assert after.steps == 5 and [group["lr"] for group in after.param_groups] == [0.25, 0.125]
    loaded = {
        id(p): bundle.optimizer.state[master_param]
        for bundle in after.bundles
        for (_, p), master_param in zip(bundle.weights, bundle.master_params, strict=True)
    }
    for p in method.parameters():
        assert loaded[id(p)].keys() == before.state[p].keys()
        for key, value in before.state[p].items():
            assert torch.equal(torch.as_tensor(loaded[id(p)][key]).float(), torch.as_tensor(value).float()), key
    stepped(method, 2, after, first=5)
    assert all(p.isfinite().all() for p in method.parameters())
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ConfigError, match="another optimizer"):
        after.load_state_dict(state)


def test_half_weights_follow_the_float32_ones():
    wide, half = Learner(), Learner(torch.bfloat16)
    stepped(wide, 20)
    stepped(half, 20, **HALF)
    for a, b in zip(wide.parameters(), half.parameters(), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=0, atol=0.5)


def test_the_optimizer_remembers_matrices_in_bfloat16_and_the_rest_exactly():
    optimizer = stepped(Learner(torch.bfloat16), 1, **HALF)
    kinds = {
        (value.dim(), value.dtype)
        for bundle in optimizer.bundles
        for state in bundle.optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    }
    assert kinds == {(2, torch.bfloat16), (1, torch.float32)}


def test_full_fp16_steps_in_float32():
    """In float16 the squares of small gradients are 0, and AdamW divides by them."""
    method = Learner(torch.float16)
    optimizer = optimizers.make_optimizer(method, config(full_fp16=True, mixed_precision="fp16"), 0)
    gradients(method, scale=1e-4)
    optimizer.step()
    for p, rate in zip(method.parameters(), [0.25] * 2 + [0.5] * 4, strict=True):
        assert p.dtype == torch.float16
        assert ((p.float() - 1).abs() < 1.05 * rate).all()


def test_the_scaler_takes_gradients_in_float16():
    method = Learner(torch.float16)
    optimizer = optimizers.make_optimizer(method, config(full_fp16=True, mixed_precision="fp16"), 0)
    gradients(method)
    expected = [p.grad / 8 for p in method.parameters()]
    usual = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler = GradScaler("cpu", half=True, on_host=False, init_scale=8.0)
    usual.scale(torch.zeros(1)), scaler.scale(torch.zeros(1))
    with pytest.raises(ValueError, match="FP16"):
        usual.unscale_(optimizer)
    before = [p.detach().clone() for p in method.parameters()]
    scaler.unscale_(optimizer)
    torch.testing.assert_close([p.grad for p in method.parameters()], expected)
    scaler.step(optimizer)
    scaler.update()
    assert not any(torch.equal(p, q) for p, q in zip(method.parameters(), before, strict=True))
    method.parameters()[0].grad = torch.full_like(method.parameters()[0], float("inf"))
    before = [p.detach().clone() for p in method.parameters()]
    scaler.step(optimizer)
    assert all(torch.equal(p, q) for p, q in zip(method.parameters(), before, strict=True)), "skipped"


@pytest.mark.parametrize("values", [HALF, {**HALF, **ADAFACTOR}, {"fused_optimizer_groups": 2}])
def test_a_saved_state_goes_on_bit_for_bit(values):
    dtype = torch.bfloat16 if values.get("full_bf16") else torch.float32
    straight, first, second = Learner(dtype), Learner(dtype), Learner(dtype)
    stepped(straight, 5, **values)
    state = stepped(first, 2, **values).state_dict()
    for p, q in zip(second.parameters(), first.parameters(), strict=True):
        p.data.copy_(q.data)
    optimizer = optimizers.make_optimizer(second, config(**values), 7)
    optimizer.load_state_dict(state)
    kinds = {
        v.dtype for b in optimizer.bundles for s in b.optimizer.state.values() for v in s.values() if torch.is_tensor(v)
    }
    assert (torch.bfloat16 in kinds) == (values == HALF)
    stepped(second, 3, optimizer, first=2)
    assert all((p == q).all() for p, q in zip(straight.parameters(), second.parameters(), strict=True))


def test_a_state_of_another_optimizer_is_refused_in_a_sentence():
    plain = stepped(Learner(), 1)
    optimizer = optimizers.make_optimizer(Learner(torch.bfloat16), config(**HALF), 0)
    with pytest.raises(ConfigError, match="resume"):
        optimizer.load_state_dict(plain.state_dict())


def test_rates_are_those_of_the_whole():
    method = Learner()
    optimizer = optimizers.make_optimizer(method, config(optimizer_type="SGD", fused_optimizer_groups=3), 0)
    optimizer.param_groups[1]["lr"] = 0.125
    for p in method.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [p.flatten()[0].item() for p in method.parameters()] == [0.75] * 2 + [0.875] * 4


def test_tensors_are_counted_out_to_bundles_and_a_new_rate_begins_one():
    optimizer = optimizers.make_optimizer(Learner(), config(fused_optimizer_groups=3), 0)
    assert [[number for number, _ in b.weights] for b in optimizer.bundles] == [[0, 1], [2, 3], [4, 5]]
    optimizer = optimizers.make_optimizer(Learner(), config(fused_optimizer_groups=2), 0)
    assert [[number for number, _ in b.weights] for b in optimizer.bundles] == [[0, 1], [2, 3, 4], [5]]


def test_large_weights_are_widened_one_at_a_time(monkeypatch):
    monkeypatch.setattr(fused_step, "WIDENED", 100)
    optimizer = optimizers.make_optimizer(Learner(torch.bfloat16), config(**HALF), 0)
    assert [[number for number, _ in b.weights] for b in optimizer.bundles] == [[0, 1], [2, 3], [4, 5]]


class Operations(TorchDispatchMode):
    """Counts what is called, by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def half_weights(count):
    torch.manual_seed(0)
    shapes = [(), (7,), (6, 4), (2, 3, 4, 4)]
    return [nn.Parameter(torch.randn(shapes[i % len(shapes)]).bfloat16()) for i in range(count)]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor], ids=["AdamW", "Adafactor"])
def test_small_weights_round_together_as_one_by_one(monkeypatch, make):
    def trained(most):
        monkeypatch.setattr(stochastic_rounding, "SMALL", most)
        weights = half_weights(12)
        weights[3].data = weights[3].data.to(memory_format=torch.channels_last)
        optimizer = fused_step.PartitionedOptimizer(
            [{"params": weights, "lr": 0.01}], fused_step.bundles_by_size, make, 5
        )
        for step in range(4):
            chance = torch.Generator().manual_seed(step)
            for number, p in enumerate(weights):
                if (number + step) % 5:  # some weights have no gradient
                    p.grad = torch.randn(p.shape, generator=chance).bfloat16()
            optimizer.step()
            optimizer.zero_grad()
        states = [bundle.optimizer.state[m] for bundle in optimizer.bundles for m in bundle.master_params]
        return weights, [value for state in states for value in state.values() if torch.is_tensor(value)]

    for alone, together in zip(trained(0), trained(2**18), strict=True):
        assert len(alone) == len(together) > 12 - 1
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(alone, together, strict=True))


def test_rounding_small_weights_draws_once_for_each_tensor_and_copies_all_at_once():
    def operations(count):
        weights = half_weights(count)
        optimizer = fused_step.PartitionedOptimizer(
            [{"params": weights, "lr": 0.01}], fused_step.bundles_by_size, partial(torch.optim.AdamW, foreach=True), 5
        )
        for _ in range(2):  # the second step finds states
            for p in weights:
                p.grad = torch.ones_like(p)
            with Operations() as counted:
                optimizer.step()
        assert counted.calls["aten.random_"] == count + 2 * (count // 2), "weights, and two states of each matrix"
        # AdamW reads the number of steps of each weight on the host.
        of_each = {"aten.view", "aten.detach", "aten.new_empty", "aten.random_", "aten._local_scalar_dense"}
        return {name: number for name, number in counted.calls.items() if name not in of_each}

    assert operations(80) == operations(8)


# ---- steps within the backward pass


def backward(method, step):
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
    (method.model(x).square().sum() * 1e-3).backward()


@pytest.mark.parametrize(
    "values", [{**ADAFACTOR, "fused_backward_pass": True}, {"fused_optimizer_groups": 2}, {"fused_optimizer_groups": 9}]
)
def test_early_steps_give_the_same_weights(values):
    plain, early = Learner(scale=0.1), Learner(scale=0.1)
    options = {name: value for name, value in values.items() if name.startswith("optimizer")}
    after, within = (
        optimizers.make_optimizer(plain, config(**options)),
        optimizers.make_optimizer(early, config(**values)),
    )
    within.step_early(0.0)
    for step in range(4):
        for method, optimizer in ((plain, after), (early, within)):
            backward(method, step)
            if optimizer is within:
                assert all(p.grad is None for p in method.parameters())
            optimizer.step()
            optimizer.zero_grad()
    assert all((p == q).all() for p, q in zip(plain.parameters(), early.parameters(), strict=True))


def test_each_gradient_is_clipped_alone():
    method = Learner(scale=0.5)
    before = [p.detach().clone() for p in method.parameters()]
    optimizer = optimizers.make_optimizer(method, config(optimizer_type="SGD", fused_optimizer_groups=2))
    optimizer.step_early(1e-3)
    backward(method, 0)
    moves = [(p - q).norm().item() for p, q in zip(method.parameters(), before, strict=True)]
    assert moves == pytest.approx([0.25e-3] * 2 + [0.5e-3] * 4, rel=1e-3)
    assert optimizer.norm() > 1e-3 * math.sqrt(6)
    assert optimizer.norm() is None


def most_alive(method, optimizer):
    """The most bytes of gradients that existed at once during a backward pass, wherever they are held."""
    alive, most = [], 0

    def note(p):
        nonlocal most
        alive.append((weakref.ref(p.grad), p.grad.nbytes))
        most = max(most, sum(size for gradient, size in alive if gradient() is not None))

    for p in method.parameters():
        p.register_post_accumulate_grad_hook(note)
    if isinstance(optimizer, fused_step.PartitionedOptimizer) and not optimizer.bundles[0].waiting:
        optimizer.step_early(1.0)
    backward(method, 0)
    return most


def test_gradients_do_not_pile_up():
    def most(**values):
        method = Learner()
        return most_alive(method, optimizers.make_optimizer(method, config(**values)))

    sizes = [p.numel() * 4 for p in Learner().parameters()]
    assert most() == sum(sizes)
    assert most(**ADAFACTOR, fused_backward_pass=True) <= max(sizes) + 4 * 8
    assert most(fused_optimizer_groups=3) == max(sizes) + 4 * 8


def test_a_step_that_is_done_again_counts_once():
    """When compiling fails in the backward pass, some bundles have been stepped already."""
    method, once = Learner(scale=0.1), Learner(scale=0.1)
    for trained, times in ((method, 2), (once, 1)):
        optimizer = optimizers.make_optimizer(trained, config(optimizer_type="SGD", fused_optimizer_groups=9))
        optimizer.step_early(0.0)
        for _ in range(times):
            backward(trained, 0)
            optimizer.zero_grad()
        optimizer.step()
    assert all((p == q).all() for p, q in zip(method.parameters(), once.parameters(), strict=True))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**ADAFACTOR, "fused_backward_pass": True, "fused_optimizer_groups": 2}, "choose one"),
        ({"fused_optimizer_groups": 2, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps = 1"),
        ({"fused_optimizer_groups": 2, "mixed_precision": "fp16"}, "bf16"),
        ({"fused_backward_pass": True}, "Adafactor"),
    ],
)
def test_what_does_not_go_together_is_reported(values, words):
    with pytest.raises(ConfigError, match=words):
        config(**values)


def test_optimizers_that_look_at_all_weights_round_to_the_nearest_and_that_is_reported():
    notes = list(optimizers.optimizer_notes(config(**HALF, optimizer_type="Prodigy", learning_rate=1)))
    assert any("nearest" in str(note) for note in notes)
    assert not list(optimizers.optimizer_notes(config(**HALF)))


@pytest.mark.parametrize("script", [name for name in families.RUNS if name.endswith("_train")])
@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdam", "AdamWScheduleFree", "AdamW8bit", "AdamW", "Adafactor"])
def test_a_fine_tune_in_half_precision_is_reported_where_its_optimizer_rounds_to_the_nearest(script, name):
    kind = families.config_class(script)
    in_half = families.facts_of(kind.family).trained_in_compute_dtype
    for precision in ("bf16", "no"):
        chosen = build_config(kind, {"optimizer_type": name, "mixed_precision": precision}, notes=[])
        told = any("nearest" in str(note) for note in optimizers.optimizer_notes(chosen, in_half))
        rounds = name in ("Prodigy", "DAdaptAdam", "AdamWScheduleFree")
        assert told == (rounds and in_half and precision == "bf16")


def test_paged_states_stay_where_the_driver_keeps_them():
    method = Learner(torch.bfloat16)
    made = stepped(method, 1, optimizer_type="AdamW", **HALF)
    (bundle, *_) = made.bundles
    state = bundle.optimizer.state[bundle.master_params[0]]
    paged = torch.ones(8, 8)
    paged.is_paged = True
    state["paged"] = paged
    stepped(method, 1, made, first=1)
    assert state["paged"] is paged and paged.dtype == torch.float32
