"""Networks are known again in another precision, and told from others."""

import json

import pytest
import torch
from torch import nn

from library.data import identity

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def network(source=torch.float32, seed=0):
    torch.manual_seed(seed)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)), nn.LayerNorm(8))
    return layers.to(source).float()  # weights as a file of that type holds them


def made(net, dtype):
    return json.loads(json.dumps(identity.fingerprint_networks(net.to(dtype))))


@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("first", TYPES)
@pytest.mark.parametrize("second", TYPES)
def test_a_network_is_the_same_in_every_precision(source, first, second):
    now = identity.fingerprint_networks(network(source).to(second))
    assert identity.is_same_network(made(network(source), first), now)
    assert not identity.is_same_network(made(network(source, seed=1), first), now)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_small_change_is_seen_in_one_precision_and_a_larger_one_in_two(dtype):
    before, after = network(), network()
    with torch.no_grad():
        for p in after.parameters():
            p.mul_(1.02)
    now = identity.fingerprint_networks(after.to(torch.float32))
    assert not identity.is_same_network(made(before, dtype), now)
    with torch.no_grad():
        slightly = network()
        slightly[7].weight[0, 0] += 1e-6
    assert not identity.is_same_network(made(network(), torch.float32), identity.fingerprint_networks(slightly))


def test_caches_of_earlier_versions_and_odd_ones():
    now = identity.fingerprint_networks(network())
    assert (
        identity.is_same_network(now["exact"], now)
        and identity.is_same_network(None, None)
        and identity.is_same_network("x", None)
    )
    odd = [
        None,
        "",
        3,
        {},
        {"type": "bfloat16"},
        {"type": "bfloat16", "marks": []},
        {"type": [], "marks": [1]},
        {"type": "bfloat16", "marks": ["1"] * 32},
        {"type": "int8", "marks": now["marks"]},
    ]
    assert not any(identity.is_same_network(made, now) for made in odd)
