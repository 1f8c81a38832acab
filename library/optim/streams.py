"""Optimizers whose kernels ignore the current CUDA stream."""

import torch
from torch.optim import Optimizer


def step_on_default_stream(optimizer: Optimizer) -> None:
    """Let an optimizer take its steps on CUDA's default stream, between what the current stream computes before and
    after.
    """
    # bitsandbytes launches its 8-bit and paged kernels on the default stream whichever stream is current. Beside
    # recorded steps, which have a stream of their own, they would read gradients before these are there: NaN or worse.
    streams: list[torch.cuda.Stream] = []

    def enter(*step: object) -> None:
        streams.append(torch.cuda.current_stream())
        torch.cuda.default_stream().wait_stream(streams[-1])
        torch.cuda.set_stream(torch.cuda.default_stream())

    def leave(*step: object) -> None:
        streams[-1].wait_stream(torch.cuda.default_stream())
        torch.cuda.set_stream(streams.pop())

    optimizer.register_step_pre_hook(enter)
    optimizer.register_step_post_hook(leave)
