"""Making a denoiser fit and fly for a while, to see how fast that is, and undoing it."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def undone(denoiser: nn.Module, block_classes: tuple[str, ...]) -> Iterator[None]:
    """Afterwards blocks are what they were before: nothing recomputes, swaps or is compiled.

    Layers that are stored in 8 bits stay so, and weights stay on the device, where the next preparation wants them.
    """
    modules = [denoiser, *(module for module in denoiser.modules() if type(module).__name__ in block_classes)]
    classes, names = [type(module) for module in modules], [set(vars(module)) for module in modules]
    hooks = dict(denoiser._forward_pre_hooks)
    try:
        yield
    finally:
        if swap := vars(denoiser).get("_swap"):
            swap.undo()
        denoiser._forward_pre_hooks.clear()
        denoiser._forward_pre_hooks.update(hooks)
        for module, cls, known in zip(modules, classes, names, strict=True):
            module.__class__ = cls
            for name in set(vars(module)) - known:
                del vars(module)[name]
