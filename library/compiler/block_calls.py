"""Descriptions of block inputs, from which another process can compile the blocks without their weights.

A call is described by the shapes, types and strides of its arguments. Graphs depend on nothing else, so the training
finds in PyTorch's cache what a replay of the call has compiled.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from library.compiler.subclass import COMPILED, behaviours_of
from library.compiler.torch_private import pytree
from library.config.json_types import JsonObject, JsonValue


@dataclass(frozen=True, eq=False)
class BlockCall:
    """A call of one block: its path, its class, its inputs, and the autocast state around it."""

    path: str  # in the denoiser
    kind: str
    arguments: JsonValue  # (args, kwargs), see `encoded`
    autocast: str  # the type, "" without
    cached_casts: bool

    def as_json(self) -> JsonObject:
        return asdict(self)  # BlockCall(**values) rebuilds it in another process

    @property
    def largest_tensor(self) -> int:
        """Return the bytes of the largest argument."""
        argument = decode_argument(self.arguments, torch.device("meta"))
        return max((t.nbytes for t in pytree.tree_leaves(argument) if isinstance(t, Tensor)), default=0)


class NotDescribed(ValueError):
    """A block has an input that is neither a tensor nor a plain value."""


@contextlib.contextmanager
def noted(denoiser: nn.Module) -> Iterator[list[BlockCall]]:
    """Collect the calls that blocks to be compiled get in this context, one per graph. The blocks run eagerly."""
    blocks = {module: path for path, module in denoiser.named_modules() if COMPILED in behaviours_of(module)}
    seen_calls: set[tuple[type[nn.Module], str]] = set()
    calls: list[BlockCall] = []

    # A hook comes after the entry of a block, so it sees the inputs that a graph gets.
    def note(block: nn.Module, args: Any, kwargs: Any) -> None:
        argument = encode_argument([list(args), kwargs])
        if (key := (type(block), json.dumps(argument))) not in seen_calls:
            seen_calls.add(key)
            # Graphs depend on autocast, too: its dtype and whether casts are cached.
            device = next(t.device.type for t in pytree.tree_leaves(args) if isinstance(t, Tensor))
            dtype = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
            cached = torch.is_autocast_cache_enabled()
            calls.append(BlockCall(blocks[block], type(block).__name__, argument, dtype, cached))

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def encode_argument(value: Any) -> JsonObject:
    """Return arguments as JSON: a tensor is its shape, strides, type, and whether it requires a gradient."""
    if isinstance(value, Tensor):
        return {"tensor": [list(value.shape), list(value.stride()), str(value.dtype), value.requires_grad]}
    if isinstance(value, dict):
        return {"dict": {name: encode_argument(inner) for name, inner in value.items()}}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [encode_argument(inner) for inner in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    raise NotDescribed(type(value).__name__)


def decode_argument(value: Any, device: torch.device) -> Any:
    """Rebuild arguments from their description, with random numbers in the tensors."""
    ((kind, content),) = value.items()
    if kind == "dict":
        return {name: decode_argument(inner, device) for name, inner in content.items()}
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](decode_argument(inner, device) for inner in content)
    if kind == "plain":
        return content
    shape, strides, dtype, learns = content
    tensor = torch.empty_strided(shape, strides, dtype=_dtype(dtype), device=device)
    tensor = tensor.normal_() if tensor.dtype.is_floating_point else tensor.zero_()
    return tensor.requires_grad_(learns)


def repeat(denoiser: nn.Module, call: BlockCall, device: torch.device) -> None:
    """Run one block on arguments rebuilt from `call`, forward and backward, so that it is compiled. Gradients are
    discarded.
    """
    block = denoiser.get_submodule(call.path)
    args, kwargs = decode_argument(call.arguments, device)
    dtype = _dtype(call.autocast) if call.autocast else None
    with torch.autocast(device.type, dtype, enabled=bool(call.autocast), cache_enabled=call.cached_casts):
        for hook in denoiser._forward_pre_hooks.values():  # adapters scale their factors once per pass (FactorCache)
            hook(denoiser, ())
        if (begin_pass := getattr(denoiser, "begin_pass", None)) and "encoder_hidden_states" in kwargs:
            begin_pass(kwargs["encoder_hidden_states"])
        answers = pytree.tree_leaves(block(*args, **kwargs))
    ends = [answer for answer in answers if isinstance(answer, Tensor) and answer.requires_grad]
    input_tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    # The backward graph depends on which inputs and weights need gradients.
    targets = [t for t in (*input_tensors, *block.parameters()) if t.requires_grad]
    if ends and targets:
        torch.autograd.grad(ends, targets, [torch.zeros_like(end) for end in ends], allow_unused=True)


def costliest_first(calls: list[BlockCall], denoiser: nn.Module) -> list[BlockCall]:
    """Sort calls by their share of a step, largest first, estimated as the weights of all blocks of the class; calls of
    one class stay together."""
    alike = Counter(type(module) for module in denoiser.modules())
    costs, total = {}, Counter[str]()
    for call in calls:
        block = denoiser.get_submodule(call.path)
        costs[call] = alike[type(block)] * sum(p.numel() for p in block.parameters())
        total[call.kind] += costs[call]
    return sorted(calls, key=lambda call: (-total[call.kind], call.kind, -costs[call]))


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))
