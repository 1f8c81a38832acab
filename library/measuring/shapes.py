"""FLOPs of a network and the inputs of its blocks, computed on a copy that has shapes but no memory."""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from library.compiler.torch_private import FakeTensorMode, pytree

log = logging.getLogger(__name__)

Call = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a block


class FakeTensorContext:
    """Fake tensors: shapes, types and devices without values, which take neither memory nor time."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        # Attention by matrix products counts alike on every device.
        with self._mode, sdpa_kernel(SDPBackend.MATH):
            yield

    def copy(self, model: nn.Module, device: torch.device, eight_bits: torch.dtype) -> nn.Module:
        """Return the network with fake tensors; weights stored in 8 bits get the type `eight_bits`."""
        copies: dict[int, Any] = {}

        def like(x: Tensor) -> Tensor:
            small = x.is_floating_point() and x.itemsize == 1
            return torch.empty(x.shape, device=device, dtype=eight_bits if small else x.dtype)

        with self._mode:
            for p in model.parameters():
                copies[id(p)] = nn.Parameter(like(p), requires_grad=p.requires_grad)
            for buffer in model.buffers():
                copies[id(buffer)] = like(buffer)
        return copy.deepcopy(model, copies)


def flops(call: Callable[[], Any], quietly: bool = False) -> int | None:
    """Return the floating-point operations of a call's matrix products and convolutions; None if they
    cannot be counted.
    """
    try:
        with FlopCounterMode(display=False) as counter:
            call()
    except Exception as error:
        if not quietly:
            log.warning("FLOPs cannot be counted: %s", str(error).partition("\n")[0])
        return None
    return counter.get_total_flops() or None


def called_blocks(model: nn.Module, kinds: Iterable[str], call: Callable[[], Any]) -> dict[str, tuple[str, Call]]:
    """Return the arguments of the middle block of each class: class -> (path in the model, arguments)."""
    middle_blocks, caught, hooks = dict(_middle(model, kinds)), {}, []
    for kind, (path, block) in middle_blocks.items():

        def keep(_: Any, args: Any, kwargs: Any, kind: str = kind, path: str = path) -> None:
            caught.setdefault(kind, (path, without_memory((args, kwargs))))

        hooks.append(block.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return caught


def _middle(model: nn.Module, kinds: Iterable[str]) -> Iterator[tuple[str, tuple[str, nn.Module]]]:
    for kind in kinds:
        group = [(path, m) for path, m in model.named_modules() if type(m).__name__ == kind]
        if group:
            yield kind, group[len(group) // 2]


def without_memory(call: Call) -> Call:
    """Return the arguments with their tensors on the meta device."""

    def light(x: Any) -> Any:
        return torch.empty_like(x, device="meta").requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    return pytree.tree_map(light, call)


def made_real(call: Call, device: torch.device) -> Call:
    """Return the arguments with random values for meta tensors; `requires_grad` is kept."""

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dtype == torch.bool:
            return torch.ones(value.shape, dtype=torch.bool, device=device)
        if not (value.is_floating_point() or value.is_complex()):
            return torch.zeros(value.shape, dtype=value.dtype, device=device)
        return torch.randn(value.shape, dtype=value.dtype, device=device).requires_grad_(value.requires_grad)

    return pytree.tree_map(real, call)


def forward_backward(block: nn.Module, call: Call, autocast: Callable[[], Any]) -> None:
    """Run a block forward and backward; gradients are discarded."""
    args, kwargs = call
    with autocast():
        outputs = [x for x in pytree.tree_leaves(block(*args, **kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    ready = [getattr(layer, "ready", None) for layer in block.modules()]
    for value in (*pytree.tree_leaves((call, ready)), *block.parameters()):
        if isinstance(value, Tensor):
            value.grad = None
