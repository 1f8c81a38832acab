"""Which blocks stand in front of all that learns, so that no gradient has to go through them."""

from collections.abc import Iterable
from typing import Any

from torch import nn


def in_front(denoiser: nn.Module, blocks: Iterable[nn.Module], family: Any) -> set[nn.Module]:
    """The blocks that run before anything that learns does. None where nothing of the denoiser learns at all."""
    named = enumerate(denoiser.named_parameters())
    order = {id(p): (family.execution_key(path), number, p.requires_grad) for number, (path, p) in named}
    learning = [place for place in order.values() if place[-1]]
    if not learning:
        return set()
    first = min(learning)
    return {block for block in blocks if all(order[id(p)] < first for p in block.parameters())}
