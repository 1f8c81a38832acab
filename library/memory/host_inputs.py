"""Offload the inputs of checkpointed blocks to host memory between the forward pass and the block's backward pass.

Inputs saved by a checkpoint are copied to pinned memory on a side stream while blocks compute, and prefetched on
another while the gradient of the following block is computed. So computing, these copies and those of swapped weights
overlap. Only the tensors saved for backward are replaced, around the block's call: a compiled block keeps its graph,
checkpoint included.
"""

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from library.compiler.subclass import INPUTS_ON_HOST, keep_class_name

PENDING_CALLS = 1  # calls whose copies to the host may still run when the next block begins


@dataclass(eq=False)
class _OffloadedInput:
    """One offloaded input: its host copy, and its device tensor until that is freed and after it is fetched again."""

    host: Tensor
    device: Tensor | None
    arrival: Any  # the event after the last copy; using or freeing `device` waits for it


@dataclass(eq=False)
class _Call:
    """The offloaded inputs of one call of a block, and the previous call, whose inputs the backward pass needs next.

    The reference is weak, so that a finished step's calls are freed with the graph that saved their tensors.
    """

    before: "weakref.ref[_Call] | None"
    offloaded: list[_OffloadedInput] = field(default_factory=list)
    in_backward: bool = False


# Replacing saved tensors keeps the checkpoint inside the compiled block; a second checkpoint around it would not.
# Why: docs/decisions/2026-11-23-inputs-of-blocks-wait-on-the-host.md
class HostInputs:
    """The offloaded inputs of a denoiser's blocks. Copies are exact; a CPU makes them, too."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_cuda = device, device.type == "cuda"
        self._to_host, self._to_device = (torch.cuda.Stream(device) if self.is_cuda else None for _ in range(2))
        self._last: weakref.ref[_Call] | None = None
        self._pending: deque[_Call] = deque()

    def offload_inputs_of(self, block: nn.Module) -> None:
        block.__dict__["_host_inputs"] = self
        block.__class__ = _offloading(type(block))

    @contextlib.contextmanager
    def offloading(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Within the context, save host copies of these tensors for the backward pass."""
        call = _Call(self._last)
        ready = torch.cuda.current_stream(self.device).record_event() if self.is_cuda else None
        # Saved tensors may be other objects than the arguments, so inputs are recognised by their memory.
        memory = {(x.data_ptr(), x.nbytes) for x in inputs}

        def pack(saved: Tensor) -> Any:
            if (saved.data_ptr(), saved.nbytes) in memory and (offloaded := self._offload(saved, ready)):
                call.offloaded.append(offloaded)
                return call, len(call.offloaded) - 1
            # Leaves are not copied, as swapped weights change their memory meanwhile. Other tensors are saved without
            # their autograd history, since a node that saves its own output would be a reference cycle.
            return saved if saved.is_leaf else saved.detach()

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else self._restore(*packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        if call.offloaded:
            self._last = weakref.ref(call)
            self._pending.append(call)
        while len(self._pending) > PENDING_CALLS:
            self._free(self._pending.popleft())

    def _offload(self, x: Tensor, ready: Any) -> _OffloadedInput | None:
        x = x.detach()
        host = torch.empty_like(x, device="cpu", pin_memory=self.is_cuda)
        if host.stride() != x.stride():
            return None  # not dense, and a compiled block expects the strides
        if self._to_host is None:
            return _OffloadedInput(host.copy_(x), x, None)
        self._to_host.wait_event(ready)
        with torch.cuda.stream(self._to_host):
            host.copy_(x, non_blocking=True)
        return _OffloadedInput(host, x, self._to_host.record_event())

    def _restore(self, call: _Call, number: int) -> Tensor:
        """Return an input for the backward pass of its block, and prefetch those of the next block."""
        offloaded = call.offloaded[number]
        self._fetch(offloaded)
        tensor = self._wait_for(offloaded)
        offloaded.device = None
        if not call.in_backward:
            call.in_backward = True
            call_before = call.before() if call.before else None
            for offloaded_before in call_before.offloaded if call_before and not call_before.in_backward else ():
                self._fetch(offloaded_before)
        return tensor

    def _fetch(self, offloaded: _OffloadedInput) -> None:
        if offloaded.device is not None:
            return
        if self._to_device is None:
            offloaded.device = offloaded.host.clone()
            return
        # Allocate on the compute stream, which may still use that memory.
        offloaded.device = torch.empty_like(offloaded.host, device=self.device, pin_memory=False)
        self._to_device.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._to_device):
            offloaded.device.copy_(offloaded.host, non_blocking=True)
        offloaded.arrival = self._to_device.record_event()

    def _free(self, call: _Call) -> None:
        """Free the device memory of a call's inputs once their copies to the host are done."""
        for offloaded in call.offloaded:
            if offloaded.device is not None:
                self._wait_for(offloaded)
                offloaded.device = None

    def _wait_for(self, offloaded: _OffloadedInput) -> Tensor:
        assert offloaded.device is not None
        if self.is_cuda:
            torch.cuda.current_stream(self.device).wait_event(offloaded.arrival)
        return offloaded.device


@functools.cache
def _offloading(cls: type[nn.Module]) -> type[nn.Module]:
    class Offloading(cls):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return super().__call__(*args, **kwargs)
            streams = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
            with self.__dict__["_host_inputs"].offloading(streams):
                return super().__call__(*args, **kwargs)

    return keep_class_name(Offloading, cls, INPUTS_ON_HOST)
