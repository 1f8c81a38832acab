"""Tensors one after another in one buffer: found by their addresses, and the same numbers from fewer kernels."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from library.compiler import cudagraph, flat_memory
from library.compiler.plan import CompilePlan
from library.optim.flat_adamw import FlatAdamW
from tests.training import LORAS

WITH_CONVOLUTIONS = ("sdxl_train_network", "train_network")
SHAPES = (3, 5), (64,), (2, 4, 3, 3), (7, 9), (16, 8)

CAN_LIE, APART = flat_memory.can_lie, lambda _tensor: False


def weights(shapes=SHAPES, dtype=torch.float32):
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    made[2].data = made[2].data.to(memory_format=torch.channels_last)
    return made


def members(*lists, **kinds):
    return [run.members for run in flat_memory.find_runs(*lists, **kinds)]


def test_gathered_weights_keep_all_but_their_addresses():
    plain, gathered = weights(), weights()
    flat_memory.move_together([gathered[n] for n in (1, 0, 2, 4, 3)])
    for p, q in zip(plain, gathered, strict=True):
        assert torch.equal(p, q) and p.stride() == q.stride() and q.requires_grad and q.is_leaf and not q._is_view()
        assert (q.data_ptr() - gathered[1].data_ptr()) % (flat_memory.ALIGNED * 4) == 0
    assert members(plain) == [[0], [1], [2], [3], [4]] and members(gathered) == [[1, 0, 2, 4, 3]]
    (run,) = flat_memory.find_runs(gathered)
    run.flat[0].mul_(2)
    assert all(torch.equal(2 * p, q) for p, q in zip(plain, gathered, strict=True))
    assert run.flat[0].abs().sum() == pytest.approx(sum(q.abs().sum().item() for q in gathered), rel=1e-6)


def test_a_run_ends_where_the_kind_the_order_or_the_memory_is_another():
    gathered, others = weights(), weights()
    flat_memory.move_together(gathered)
    flat_memory.move_together(others)
    assert members(gathered, kinds=[None, None, 2.0, 2.0, 1.0]) == [[0, 1], [2, 3], [4]]
    assert members([*gathered, *others]) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert members(gathered, flat_memory.like(gathered)) == [[0, 1, 2, 3, 4]]
    assert members(gathered, [torch.empty_like(p) for p in gathered]) == [[0], [1], [2], [3], [4]]
    assert members([gathered[n] for n in (4, 3, 1, 0)]) == [[1, 0], [3, 2]]
    gathered[1].data = gathered[1].data.clone()
    assert members(gathered) == [[0], [1], [2, 3, 4]]
    for elsewhere in (copy.deepcopy(others), [p.to("meta") for p in others]):
        assert members(elsewhere) == [[0], [1], [2], [3], [4]]


def test_a_run_does_not_reach_into_the_memory_behind_its_own():
    memory = bytearray(4096)
    halves = [torch.frombuffer(memory, dtype=torch.float32, count=512, offset=at) for at in (0, 2048)]
    parts = [part for half in halves for part in half.split(128)]
    assert members(parts) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("together", [False, True])
def test_copies_lie_like_what_they_are_of(together, monkeypatch):
    monkeypatch.setattr(flat_memory, "can_lie", CAN_LIE if together else APART)
    gathered = weights()
    flat_memory.move_together(gathered)
    copies = flat_memory.like(gathered)
    with torch.no_grad():
        flat_memory.copy_(copies, gathered)
    assert members(gathered, copies) == ([[0, 1, 2, 3, 4]] if together else [[0], [1], [2], [3], [4]])
    for p, twin in zip(gathered, copies, strict=True):
        assert torch.equal(p, twin) and p.stride() == twin.stride() and not twin._is_view()
    assert flat_memory.like([]) == [] and flat_memory.copy_([], []) is None


def test_gradients_that_are_kept_for_the_next_batch_lie_like_their_weights():
    layers = nn.ModuleList(nn.Linear(8, 16, bias=False) for _ in range(3))
    flat_memory.move_together([*layers.parameters()])
    recorder = cudagraph.GraphedModel(layers, CompilePlan())
    recorder.trained = [*layers.parameters()]
    recorder.gradients = flat_memory.like(recorder.trained)
    for p, shared in zip(recorder.trained[1:], recorder.gradients[1:], strict=True):  # the first learns elsewhere
        p.grad = shared.fill_(1).detach()
    with Kernels() as kernels:
        recorder.keep_gradients()
    assert recorder.trained[0].grad is None and kernels.tensors == {"_foreach_copy_": 1}
    kept = [p.grad for p in recorder.trained[1:]]
    recorder.gradients[1].zero_()
    assert members(recorder.trained[1:], kept) == [[0, 1]] and all(gradient.eq(1).all() for gradient in kept)


class Kernels(TorchDispatchMode):
    """How many tensors are passed to what takes lists of them."""

    def __init__(self):
        super().__init__()
        self.tensors = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if args and isinstance(args[0], list | tuple) and name.startswith(("_foreach", "_fused")):
            self.tensors[name] = self.tensors.get(name, 0) + len(args[0])
        return function(*args, **(kwargs or {}))


def trained(model, gathers, steps=3):
    """Weights and gradients after steps of the fused optimizer, and what its kernels took in the last of them."""
    groups = model.method.groups()
    for factors in model.method.factor_caches if gathers else ():
        factors.gather(groups)
    optimizer, found = (FlatAdamW if gathers else torch.optim.AdamW)(groups, lr=1e-3, fused=True), []
    for _ in range(steps):
        for height in (8, 16):  # gradients of two batches
            with Kernels() as passes:
                model.loss((height, 8)).backward()
        gradients = [p.grad for p in model.method.parameters() if p.grad is not None]
        with Kernels() as step:
            optimizer.step()
        optimizer.zero_grad()
        found = [passes.tensors, step.tensors]
    return [*model.method.state_dict().values(), *gradients], found, len(gradients)


@pytest.mark.parametrize("script", LORAS)
def test_a_lora_in_one_memory_learns_the_same_from_few_kernels(script, model_of):
    values = {"mixed_precision": "bf16", "network_args": ["loraplus_lr_ratio=4"]}
    if script in WITH_CONVOLUTIONS:
        values["network_args"] += ["conv_dim=2", "conv_alpha=1"]  # another strength
    expected, (many, _), number = trained(model_of(script, **values), False)
    actual, (few, step), _ = trained(model_of(script, **values), True)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    # Where the last block's text needs no gradient, runs end at its factors.
    assert number > 30 and step["_fused_adamw_"] == step["_foreach_add_"] <= 4
    # Gradients arrive from every layer.
    assert many["_foreach_copy_"] >= 2 * number and few["_foreach_copy_"] <= number + 4
    assert few.get("_foreach_mul_", 0) <= 8 and few.get("_foreach_mul", 0) <= 2
