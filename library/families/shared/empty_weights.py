"""Build networks and layers without initialising their weights, which a file provides later."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from accelerate import init_empty_weights
from torch.nn import init


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Build networks on the meta device within this context, without initialising weights. Buffers are real."""
    # Random initialisation took most of the time, even on the meta device.
    with without_random_init(), init_empty_weights(include_buffers=False):
        yield


@contextlib.contextmanager
def without_random_init() -> Iterator[None]:
    """Build layers without initialisation or random draws within this context; the caller assigns the weights."""
    patched: list[tuple[Any, str, Any]] = [
        (init, name, function) for name, function in vars(init).items() if name.endswith("_") and name[0] != "_"
    ]
    if transformers := sys.modules.get("transformers.modeling_utils"):  # holds its own references to torch's functions
        patched.append((transformers.PreTrainedModel, "init_weights", transformers.PreTrainedModel.init_weights))
    for place, name, _ in patched:
        setattr(place, name, lambda first, *_, **__: first)  # the tensor, or the network
    try:
        yield
    finally:
        for place, name, function in patched:
            setattr(place, name, function)
