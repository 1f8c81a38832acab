"""Gradients averaged over processes: two of them, each with batches of its own, against both in one."""

import json

import pytest

from tests.training import ranks

CODE = """
import copy, json, sys
from types import SimpleNamespace
import torch
from torch import nn
from library.distributed import gradients

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
gradients.BUCKET_BYTES = int(sys.argv[1])
sent = []
all_reduce = torch.distributed.all_reduce
torch.distributed.all_reduce = lambda tensor, **how: (sent.append(tensor.numel()), all_reduce(tensor, **how))[1]

class Branches(nn.Module):  # whose gradients come in another order in the second process, which also lacks some
    def __init__(self):
        super().__init__()
        self.never, self.seldom = nn.Linear(6, 4), nn.Linear(6, 4)
        self.left, self.right = nn.Linear(6, 4), nn.Conv2d(6, 4, 3).to(memory_format=torch.channels_last)
        self.rounded = nn.Linear(6, 4).to(torch.bfloat16)

    def forward(self, x, rank):
        parts = [self.left, self.wide, lambda x: self.rounded(x.bfloat16()).float()]
        parts = parts[::-1] if rank else [*parts, self.seldom]
        return sum((part(x) ** 2).sum() for part in parts)

    def wide(self, x):
        return self.right(x[:, :, None, None].expand(-1, -1, 3, 3))

def batch(rank, number):  # of sizes that differ
    return torch.randn(2 + rank + number, 6, generator=torch.Generator().manual_seed(10 * rank + number))

torch.manual_seed(rank)
model = Branches()
gradients.broadcast([p.detach() for p in model.parameters()])
alone, both = [copy.deepcopy(model) for _ in range(2)], {}
averager = gradients.GradientAverager([*reversed([*model.parameters()])], 2)
begun, equal = [], []
for step in range(3):
    for network in (model, *alone):
        network.zero_grad(set_to_none=True)
    for number in range(2):
        averager.expect(last=number == 1)
        model(batch(rank, 2 * step + number), rank).backward()
        begun.append(averager.begun)
    averager.finish()
    for other, network in enumerate(alone):
        for number in range(2):
            network(batch(other, 2 * step + number), other).backward()
    for (name, p), *found in zip(model.named_parameters(), *(n.parameters() for n in alone), strict=True):
        mine = [q.grad if q.grad is not None else torch.zeros_like(q) for q in found]
        wanted = None if all(q.grad is None for q in found) else mine[0] / 2 + mine[1] / 2
        equal.append(p.grad is None if wanted is None else p.grad is not None and torch.equal(p.grad, wanted))
    lacking = [name for name, p in model.named_parameters() if p.grad is None]
sums = [p.detach().double().sum().item() for p in model.parameters()]
print(json.dumps({"equal": equal, "begun": begun, "sent": len(sent), "lacking": lacking, "weights": sums,
                  "buckets": len(averager.buckets)}), flush=True)
torch.distributed.destroy_process_group()
"""

AGREEING = """
import json
from types import SimpleNamespace
from torch import nn
from accelerate import Accelerator
from library.train.compiling.precompile import Precompiler
from library.distributed.world import World

world = World.__new__(World)
world.accelerator = Accelerator(cpu=True)
world.rank, world.ranks = world.accelerator.process_index, 2
told = []
for failing in ({}, {1: "the GPU's memory is too small"}, {0: "they do not pay", 1: "it"}):
    denoiser = nn.Identity()
    given_up = []
    denoiser.__dict__["_recorder"] = SimpleNamespace(why_not=failing.get(world.rank, ""), give_up=given_up.append)
    Precompiler.agree_on_recording(SimpleNamespace(_world=world), denoiser)
    told.append(given_up)
print(json.dumps(told), flush=True)
"""


def answers(*arguments):
    """What both processes print in their last lines."""
    gradients = []
    for process in ranks(["-c", *arguments]):
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said
        gradients.append(json.loads(said.splitlines()[-1]))
    return gradients


@pytest.mark.parametrize(("size", "buckets"), [(2**20, 2), (64, 5)])
def test_gradients_are_the_mean_of_all_processes(size, buckets):
    """In one message for each dtype after the backward pass, or in many from within the last one of a step."""
    for gradients in (two := answers(CODE, size)):
        assert all(gradients["equal"]) and gradients["lacking"] == ["never.weight", "never.bias"]
        assert gradients["buckets"] >= buckets and gradients["sent"] == 3 * gradients["buckets"]
        assert not any(gradients["begun"][::2])  # nothing is sent before the last batch of a step
    assert two[0]["weights"] == two[1]["weights"]
    if buckets > 2:
        assert all(two[0]["begun"][1::2])


def test_one_process_that_cannot_record_keeps_the_others_from_it():
    first, second = answers(AGREEING)
    assert first == [[], ["process 1 cannot record them: the GPU's memory is too small"], []]
    assert second == [[], [], []]
