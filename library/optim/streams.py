"""Optimizers whose kernels ignore the current CUDA stream."""

import contextlib
from collections.abc import Iterator

import torch
from torch.optim import Optimizer


def step_on_default_stream(optimizer: Optimizer) -> None:
    """Let an optimizer take its steps on CUDA's default stream, between what the current stream computes before and
    after.
    """
    # bitsandbytes launches its 8-bit and paged kernels on the default stream whichever stream is current. Beside
    # recorded steps, which have a stream of their own, they would read gradients before these are there: NaN or worse.
    step = contextlib.ExitStack()

    def enter(*_: object) -> None:
        step.enter_context(on_default_stream())

    def leave(*_: object) -> None:
        step.close()

    optimizer.register_step_pre_hook(enter)
    optimizer.register_step_post_hook(leave)


@contextlib.contextmanager
def on_default_stream() -> Iterator[None]:
    """Compute on CUDA's default stream within this context, after what the current stream computes and before what
    follows.
    """
    if not torch.cuda.is_initialized():  # then no other stream is current
        yield
        return
    default, current = torch.cuda.default_stream(), torch.cuda.current_stream()
    default.wait_stream(current)
    torch.cuda.set_stream(default)
    try:
        yield
    finally:
        current.wait_stream(default)
        torch.cuda.set_stream(current)
