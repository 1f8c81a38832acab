"""The two sets of weights of a schedule-free optimizer: those of its steps, and their average."""

import contextlib
from collections.abc import Iterator, Sequence

import torch


def train_mode(optimizer: torch.optim.Optimizer) -> None:
    if callable(switch := getattr(optimizer, "train", None)):
        switch()


def eval_mode(optimizer: torch.optim.Optimizer) -> None:
    if callable(switch := getattr(optimizer, "eval", None)):
        switch()


@contextlib.contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Use the averaged weights of a schedule-free optimizer within this context, for samples, validation and saving.

    Afterwards the weights are those from before, bit for bit.
    """
    if not callable(getattr(optimizer, "eval", None)):
        yield
        return
    # The optimizer computes them back from the average, with another rounding, so that each image would change what
    # is learned.
    with kept([p for group in optimizer.param_groups for p in group["params"]]):
        eval_mode(optimizer)
        try:
            yield
        finally:
            train_mode(optimizer)


@contextlib.contextmanager
def kept(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Keep weights in CPU memory within this context, and restore them bit for bit at its end."""
    weights = [p.detach().to("cpu", copy=True) for p in parameters]
    try:
        yield
    finally:
        fill(parameters, weights)


@torch.no_grad()
def fill(parameters: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    for p, value in zip(parameters, values, strict=True):
        p.copy_(value)
