"""Block swapping: some blocks stay in host memory, and are copied to the device when they run.

The host has the authoritative copy of a weight in pinned memory; the device has a few slots, each as large as the
largest swapped block, that are used in rotation. The next block is prefetched on a side stream while the current one
computes. All of this happens around the block's call, so that a compiled block stays one graph with its Linear layers.
Blocks are checkpointed, since a slot may be overwritten between forward and backward.

Frozen weights are only copied to the device. Trained weights have two modes. Either gradients are copied to the host as
soon as they are complete, and the optimizer steps there, between backward and the next forward. Or weights are stepped
on the device, within the backward pass, and written back while the next block computes.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from library.compiler.subclass import SWAPPED, behaviours_of, keep_class_name
from library.memory import host_memory

SLOTS = 2  # one in use, one being filled
LEAVING = 1  # additional slot for trained weights that are being copied to the host
ALIGNMENT = 256  # bytes, as kernels expect aligned weights
MODULATION = "_modulation"  # the attribute of a block by which it finds its OffloadedModulation


def choose_blocks(denoiser: nn.Module, counts: dict[str, int]) -> list[nn.Module]:
    """Return the blocks to swap: `counts` of each class, evenly spread."""
    # Transfers then overlap with the computation of resident blocks.
    chosen: list[nn.Module] = []
    for kind, count in counts.items():
        blocks = [m for m in denoiser.modules() if type(m).__name__ == kind]
        count = min(count, len(blocks))
        chosen += [blocks[(2 * i + 1) * len(blocks) // (2 * count)] for i in range(count)]
    return chosen


# Slots per shape of block would take 0.26 GiB more for FLUX.1 and save no time, as one block computes while one is
# copied.
# Why: docs/decisions/2026-11-20-swapped-weights-live-on-the-host.md
class Swap:
    """The swapped blocks of a denoiser."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        device: torch.device,
        stepped_on: str = "",
        apart: Collection[nn.Parameter] = (),
        parts: Callable[[nn.Module], Iterable[nn.Parameter]] | None = None,
    ) -> None:
        """`stepped_on` is where the optimizer steps trained blocks, "host" or "device". Adapters stay resident.

        `parts` returns the weights of a block that are swapped, by default all its matrices; those `apart` are not.
        """
        parts, kept = parts or functools.partial(find_matrices, learns=bool(stepped_on)), {id(p) for p in apart}
        pin = device.type == "cuda"
        self.blocks = [_Packed(block, [p for p in parts(block) if id(p) not in kept], pin) for block in blocks]
        self.device, self.stepped_on = device, stepped_on
        # Two streams, as a GPU copies in both directions at the same time.
        self.stream, self.leaving = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self._order: list[int] = []  # call order of the blocks, as observed so far
        self._slots = _Slots(self.blocks, device, SLOTS + LEAVING if stepped_on == "device" else SLOTS)

    @property
    def weights(self) -> list[nn.Parameter]:
        return [p for packed in self.blocks for p, _, _ in packed.parts]

    def place(self, denoiser: nn.Module, apart: Collection[nn.Parameter] = ()) -> None:
        """Move everything but the swapped weights and those `apart` to the device, and release unused memory."""
        hidden = {id(p) for p in (*self.weights, *apart)}
        for module in denoiser.modules():
            for p in module.parameters(recurse=False):
                if id(p) not in hidden:
                    p.data = p.data.to(self.device)
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.device)
        if hidden and self.device.type == "cuda":
            torch.cuda.empty_cache()  # rounding weights has left unused memory

    def attach(self, denoiser: nn.Module) -> None:
        """Fetch each block's weights when it is called, and again when its gradient is computed."""
        denoiser.__dict__["_swap"] = self
        kinds = {type(packed.block) for packed in self.blocks}
        if self.stepped_on == "host":
            for packed in self.blocks:
                packed.offload_gradients()
        for index, packed in enumerate(self.blocks):
            packed.block.__dict__["_swap"] = (self, index)
        for module in denoiser.modules():
            if type(module) in kinds:  # resident blocks, too, as blocks of one class share their graphs
                fetch_when_called(module)

    def use(self, index: int, forward: bool) -> None:
        """Make a block's weights available on the device, and prefetch those of the next one."""
        slot = self._fetch(index)
        if slot.filled is not None:  # wait for this slot only, as the next block's copy may already run
            torch.cuda.current_stream(self.device).wait_event(slot.filled)
        if self.stepped_on == "device" and not forward:
            self._write_back(but=self.blocks[index])
            self.blocks[index].changes = True
        # The first forward pass shows the order, which only the denoiser knows.
        if forward and index not in self._order:
            self._order.append(index)
        # Backward visits the blocks in reverse order.
        following = self._order.index(index) + (1 if forward else -1)
        if 0 <= following < len(self._order):
            self._fetch(self._order[following])

    def sync_to_host(self) -> None:
        """Update host memory after the backward pass, and wait for all copies.

        If the optimizer steps on the host, weights and gradients are then there, as `p` and `p.grad`.
        """
        self._slots.write_back()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.stepped_on == "host":
            self._slots.clear()  # the optimizer will change the host's copies
            for packed in self.blocks:
                packed.hand_over_gradients()

    def forget_gradients(self) -> None:
        for packed in self.blocks:
            packed.gradients.clear()

    def undo(self) -> None:
        """Restore ordinary tensors in host memory, without gradient hooks."""
        self._slots.write_back()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._slots.clear()
        for packed in self.blocks:
            packed.remove_grad_hooks()

    def _fetch(self, index: int) -> "_Slot":
        packed = self.blocks[index]
        if slot := self._slots.holding(packed):
            return slot
        if self.stream is None:
            return self._slots.fill(packed)
        # Whatever still reads the slot was queued on the compute stream before this call, except for:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        # ... copies back to the host, of this block and of the slot's previous owner.
        for swapped in (packed, self._slots.next.owner):
            if swapped is not None and swapped.written is not None:
                self.stream.wait_event(swapped.written)
        with torch.cuda.stream(self.stream):
            slot = self._slots.fill(packed)
            slot.filled = self.stream.record_event()
        return slot

    def _write_back(self, but: "_Packed") -> None:
        """Copy updated weights to the host, except those of the computing block."""
        for slot in self._slots.slots:
            if slot.owner is None or slot.owner is but or not slot.owner.changes:
                continue
            if self.leaving is None:
                slot.flush()
                continue
            self.leaving.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.leaving):
                slot.flush()
                slot.owner.written = self.leaving.record_event()


def find_matrices(block: nn.Module, learns: bool = False) -> list[nn.Parameter]:
    """Return the matrices of a block: the frozen ones, or all of a trained block. Vectors, which are small, stay on
    the device.
    """
    return [p for p in block.parameters() if (learns or not p.requires_grad) and p.dim() >= 2]


def find_trainable_swap(denoiser: nn.Module) -> Swap | None:
    """Return the Swap of a denoiser whose swapped blocks are trained, else None; the optimizer has to follow it."""
    swap = getattr(denoiser, "_swap", None)
    return swap if swap and swap.stepped_on and swap.blocks else None


class _Packed:
    """The swapped weights of one block in one host buffer."""

    def __init__(self, block: nn.Module, moving: Sequence[nn.Parameter], pin: bool) -> None:
        self.block, self.pin = block, pin
        self.changes = False  # whether the device's copy is newer than the host's
        self.written: Any = None  # event after its last copy to the host on the side stream
        self.gradients: dict[nn.Parameter, Tensor] = {}  # of the current step, in host memory
        self._spare: dict[nn.Parameter, Tensor] = {}  # memory of the previous step's gradients
        self._hook_handles: list[Any] = []
        self.parts: list[tuple[nn.Parameter, int, Tensor]] = []
        size = sum(_padded(p.nbytes) for p in moving)
        self.host = host_memory.pinned(size) if pin else torch.empty(size, dtype=torch.uint8)
        offset = 0
        for p in moving:
            view = _view(self.host, offset, p)
            view.copy_(p.data)
            p.data = view
            self.parts.append((p, offset, view))
            offset += _padded(p.nbytes)

    def point_at(self, memory: Tensor | None) -> None:
        for p, offset, view in self.parts:
            p.data = view if memory is None else _view(memory, offset, view)

    def offload_gradients(self) -> None:
        """Copy each gradient to the host as soon as it is complete."""
        for p, _, _ in self.parts:
            if p.requires_grad:
                self._hook_handles.append(p.register_post_accumulate_grad_hook(self._offload_gradient))

    def remove_grad_hooks(self) -> None:
        for handle in self._hook_handles:
            handle.remove()

    def _offload_gradient(self, p: nn.Parameter) -> None:
        gradient, p.grad = p.grad, None
        assert gradient is not None  # the hook runs once it is complete
        host_gradient = self.gradients.get(p)
        if host_gradient is None:
            host_gradient = self._spare.pop(p, None)
            if host_gradient is None:
                host_gradient = torch.empty_like(gradient, device="cpu", pin_memory=self.pin)
            self.gradients[p] = host_gradient
        else:  # add to an earlier batch of this step on the device, in stream order
            gradient += host_gradient.to(gradient.device, non_blocking=True)
        host_gradient.copy_(gradient, non_blocking=True)

    def hand_over_gradients(self) -> None:
        """Assign the gradients to `p.grad` for an optimizer on the host. Their memory is reused in the next step."""
        for p, gradient in self.gradients.items():
            p.grad = gradient
        self._spare, self.gradients = self.gradients, {}


@dataclass(eq=False)
class _Slot:
    """Device memory, the block whose weights it holds, and the event after their copy (on a GPU)."""

    memory: Tensor
    owner: _Packed | None = None
    filled: Any = None

    def flush(self) -> None:
        """Update the owner's copy on the host."""
        if self.owner is not None and self.owner.changes:
            self.owner.host.copy_(self.memory[: self.owner.host.numel()], non_blocking=True)
            self.owner.changes = False


class _Slots:
    """Device memory that swapped blocks use in rotation, least recently used first."""

    def __init__(self, blocks: Sequence[_Packed], device: torch.device, number: int) -> None:
        size = max((packed.host.numel() for packed in blocks), default=0)
        self.slots = [_Slot(torch.empty(size, dtype=torch.uint8, device=device)) for _ in blocks[:number]]

    @property
    def next(self) -> _Slot:
        return self.slots[0]

    def holding(self, packed: _Packed) -> _Slot | None:
        """Return the slot of a block that is on the device, and mark it as just used."""
        slot = next((slot for slot in self.slots if slot.owner is packed), None)
        if slot is not None:
            self._used(slot)
        return slot

    def fill(self, packed: _Packed) -> _Slot:
        """Copy a block's weights into the next slot."""
        slot = self.next
        slot.flush()
        if slot.owner is not None:
            slot.owner.point_at(None)
        # The previous owner now points at the host, so it never sees the slot's new content.
        slot.memory[: packed.host.numel()].copy_(packed.host, non_blocking=True)
        packed.point_at(slot.memory)
        slot.owner = packed
        self._used(slot)
        return slot

    def write_back(self) -> None:
        for slot in self.slots:
            slot.flush()

    def clear(self) -> None:
        """Make all blocks use their host copies again."""
        for slot in self.slots:
            if slot.owner is not None:
                slot.owner.point_at(None)
            slot.owner = None

    def _used(self, slot: _Slot) -> None:
        self.slots.remove(slot)
        self.slots.append(slot)


def fetch_when_called(block: nn.Module) -> None:
    """Make a block fetch its weights, and those of its modulation, when it is called."""
    if SWAPPED not in behaviours_of(block):
        block.__class__ = swapped(type(block))


@functools.cache
def swapped(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of the block that fetches its weights when called."""

    class Swapped(cls):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if MODULATION in self.__dict__:
                args = self.__dict__[MODULATION].add_products(self, args)
            if "_swap" not in self.__dict__:
                return super().__call__(*args, **kwargs)
            swap, index = self.__dict__["_swap"]
            swap.use(index, forward=True)
            result = super().__call__(*args, **kwargs)
            for output in result if isinstance(result, tuple) else (result,):
                if output.grad_fn is not None:
                    # Runs right before the block's own backward. A hook keeps the tensor; a wrapper would make it
                    # a view, for which the next block would be compiled again.
                    output.grad_fn.register_prehook(lambda _: swap.use(index, forward=False))
            return result

    return keep_class_name(Swapped, cls, SWAPPED)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _view(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    return memory[offset : offset + like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())
