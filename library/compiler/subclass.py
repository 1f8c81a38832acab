"""Replace the class of a block by a subclass; parameters, their names and the module tree stay.

All blocks of a class get the same subclass, so that they keep sharing compiled graphs, which PyTorch caches by the code
object of `forward`.
"""

import functools
import types
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

FOUR_BIT = "4-bit weights"
EIGHT_BIT = "8-bit weights"
CHECKPOINTED = "checkpointed"
CHECKPOINTED_KEEPING_ATTENTION = "checkpointed, attention kept"
CHECKPOINTED_UNTIL_COMPILED = "checkpointed until compiled"
CHECKPOINTED_OUTSIDE = "checkpointed from outside"
CHECKPOINTS = (CHECKPOINTED, CHECKPOINTED_KEEPING_ATTENTION, CHECKPOINTED_UNTIL_COMPILED, CHECKPOINTED_OUTSIDE)
INPUTS_ON_HOST = "inputs on the host"
COMPILED = "compiled"
SWAPPED = "swapped"
SHARDED = "sharded"
RECORDED_AS_GRAPHS = "recorded as CUDA graphs"
# All behaviours that may wrap a module's own class, from the inside out. `keep_class_name` refuses any other order: a
# checkpoint around a compiled block would recompute outside its graph, and a block compiled around its swapping would
# have the fetching of weights in its graph.
INSIDE_OUT = (
    FOUR_BIT,
    EIGHT_BIT,
    *CHECKPOINTS,
    INPUTS_ON_HOST,
    COMPILED,
    SWAPPED,
    SHARDED,
    RECORDED_AS_GRAPHS,
)
_BEHAVIOURS: dict[type[nn.Module], str] = {}  # of subclasses, which live as long as the process


# A wrapper would change parameter names, and hide the class from families and LyCORIS.
# Why: docs/decisions/2026-11-22-blocks-change-class.md
def keep_class_name(subclass: type[nn.Module], cls: type[nn.Module], behaviour: str = "") -> type[nn.Module]:
    """Give a subclass the name of the block's class, by which families, adapters and the compiler identify it.

    `behaviours_of` returns its `behaviour`.
    """
    if behaviour:
        inner = {_BEHAVIOURS[ancestor] for ancestor in cls.__mro__ if ancestor in _BEHAVIOURS}
        later = sorted(inner & {*INSIDE_OUT[INSIDE_OUT.index(behaviour) + 1 :]})
        assert not later, f"{cls.__name__} is {', '.join(later)} already and cannot be {behaviour} inside that"
        _BEHAVIOURS[subclass] = behaviour
    if "forward" in vars(subclass):
        # Subclasses made by one function share its code, so blocks of different classes would look like recompilations
        # of each other.
        subclass.forward = clone_code(vars(subclass)["forward"])
    subclass.__name__, subclass.__qualname__, subclass.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return subclass


def behaviours_of(module: nn.Module) -> set[str]:
    return {_BEHAVIOURS[cls] for cls in type(module).__mro__ if cls in _BEHAVIOURS}


def class_inside(cls: type[nn.Module], behaviours: Collection[str]) -> type[nn.Module]:
    """Return the class of a module without these behaviours, which must be its outermost ones."""

    def has_any(ancestor: type) -> bool:
        return any(_BEHAVIOURS.get(base) in behaviours for base in ancestor.__mro__)

    return next(ancestor for ancestor in cls.__mro__ if not has_any(ancestor))


@functools.cache
def with_forward(cls: type[nn.Module], answer: Callable[[Any, Tensor], Tensor], behaviour: str = EIGHT_BIT) -> Any:
    """Return a subclass of a layer that computes `answer(layer, input)`; an adapter around it stays."""

    class Answering(cls):
        pass

    setattr(Answering, "base" if hasattr(cls, "base") else "forward", lambda self, input: answer(self, input))
    return keep_class_name(Answering, cls, behaviour)


def wanted_type(input: Tensor) -> torch.dtype:
    """Return the dtype that a layer computes in: autocast's if that is on, else the input's."""
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype


def with_gradient(images: Tensor) -> Tensor:
    """Return the images, requiring a gradient even if they need none, for a GroupNorm with trained weights."""
    if images.device.type != "cpu" or images.requires_grad or not torch.is_grad_enabled():
        return images
    # Without it PyTorch's native backward crashes the process on a CPU (channels last, torch 2.13).
    return images.detach().requires_grad_(True)


def clone_code(function: types.FunctionType) -> types.FunctionType:
    """Copy a function with its own code object, by which PyTorch keeps compiled graphs.

    Predicted graph counts rely on this: Dynamo looks graphs up by code object (2.11 and 2.13), so blocks share graphs
    if and only if they share this copy. tests/compile/test_counts.py checks it.
    """
    # PyTorch keeps graphs per code object and allows 8; SDXL has twelve shapes of ResNet block in one class.
    # Why: docs/decisions/2026-11-20-one-forward-per-block-shape.md
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
