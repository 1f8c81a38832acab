"""A denoiser that several processes hold in parts (FSDP2): each has some rows of every weight, of its gradient and of
what the optimizer keeps for it.

A block's weights are gathered before it computes and freed behind it. The optimizer knows nothing of this: it steps
ordinary parameters that are the rows of this process. A whole tensor is made one at a time, when something asks for its
numbers; only the first process does, and the others send it their rows.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from library.compiler.subclass import SHARDED, keep_class_name
from library.compiler.torch_private import LazyTensor

State = dict[str, Any]  # of an optimizer, as its state_dict

DONE = -1  # the first process sends it when it needs no further tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of a weight this process has."""

    shape: torch.Size  # of the whole weight
    first: int
    last: int  # exclusive

    def own(self, whole: Tensor) -> Tensor:
        """This process' rows of a tensor that is as large as the weight."""
        return whole[self.first : self.last]


def rows_of(p: Tensor) -> Rows | None:
    """Which rows of a weight a parameter is; None for one that is whole."""
    return vars(p).get("rows")


def whole_shape(p: Tensor) -> torch.Size:
    """The shape of the weight that a parameter is, or is a part of."""
    rows = rows_of(p)
    return rows.shape if rows else p.shape


def own_part(whole: Tensor, p: Tensor) -> Tensor:
    """This process' rows of a tensor that belongs to a parameter, such as an optimizer state."""
    rows = rows_of(p)
    return rows.own(whole) if rows else whole


def collected(tensor: Tensor) -> bool:
    """Whether a tensor is collected from all processes each time it is read."""
    return isinstance(tensor, LazyTensor)


# Why: docs/decisions/2026-11-22-whole-models-in-shards.md
class ShardedModel:
    """A denoiser in shards, and the parameters that are this process' rows of it, by their names in the denoiser."""

    def __init__(self, denoiser: nn.Module, block_classes: Sequence[str], device: torch.device) -> None:
        """Shard the denoiser, block by block, onto the device. References to its whole weights keep these alive."""
        # Loaded late: it takes as long as half of PyTorch.
        from torch.distributed.fsdp import fully_shard

        # Which says that nothing may change in place what a network answers, as nothing does here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        self._rank, self._ranks, self._device = distributed.get_rank(), distributed.get_world_size(), device
        mesh = distributed.init_device_mesh(device.type, (self._ranks,))
        for module in reversed([*denoiser.modules()]):  # children before their block
            if module is not denoiser and type(module).__name__ not in block_classes:
                continue
            for p in module.parameters():
                if not p.is_contiguous():
                    p.data = p.data.contiguous()  # convolutions in another order cannot be cut into rows
            cls = type(module)
            # The outermost module lets go as well after the forward pass: what a step, a resumed state or an average
            # changes is then all that there is.
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
            keep_class_name(type(module), cls, SHARDED)
        self._denoiser: Any = denoiser
        self._weights: dict[str, Any] = dict(denoiser.named_parameters())
        self.parameters = {name: self._rows(p) for name, p in self._weights.items()}
        self._numbers = {name: number for number, name in enumerate(self.parameters)}
        self._offered: list[tuple[Tensor, Rows]] = [(p.detach(), p.rows) for p in self.parameters.values()]
        self._serving = False

        def put_whole(module: nn.Module, tensors: dict[str, Tensor], *prefix_and_metadata: str | State) -> None:
            for name in tensors.keys() & self._numbers.keys():
                tensors[name] = self.whole(name)

        denoiser.register_state_dict_post_hook(put_whole)  # what it is saved by

    def _rows(self, p: Any) -> Any:
        """A parameter that is this process' rows of a weight."""
        size = -(-p.shape[0] // self._ranks)
        first, last = (min(rank * size, p.shape[0]) for rank in (self._rank, self._rank + 1))
        with torch.no_grad():
            own: Any = nn.Parameter(p.to_local(), requires_grad=p.requires_grad)
        own.rows = Rows(p.shape, first, last)
        return own

    # ---- a step

    def expect_gradients(self, last: bool) -> None:
        """Before a backward pass: gradients are exchanged in the `last` one of a step, and added up here until then."""
        self._denoiser.set_requires_gradient_sync(last)

    def take_gradients(self) -> None:
        """After the last backward pass of a step: hand the gradients, means of all processes', to the parameters."""
        with torch.no_grad():
            for name, p in self._weights.items():
                self.parameters[name].grad = None if p.grad is None else p.grad.to_local()
                p.grad = None

    def forget_gradients(self) -> None:
        """Drop the gradients of a backward pass outside of a step."""
        for p in self._weights.values():
            p.grad = None

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Clip gradients to a norm over all of them, in all processes; returns the norm they had, float32."""
        squares = torch.zeros(2, device=self._device)  # of sharded parameters, and of whole ones
        learning = [p for p in parameters if p.grad is not None]
        for whole in (False, True):
            some = [p.grad for p in learning if p.grad is not None and (rows_of(p) is None) == whole]
            if some:
                norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in some]
                squares[int(whole)] = torch.stack(norms).square().sum()
        distributed.all_reduce(squares[:1])
        norm = squares.sum().sqrt()
        nn.utils.clip_grads_with_norm_(learning, limit, norm)
        return norm

    # ---- whole tensors

    def whole(self, name: str) -> Tensor:
        """A weight as a tensor that is collected when its numbers are asked for."""
        return self._lazy(self._numbers[name])

    def offer(self, own: Tensor, rows: Rows) -> Tensor:
        """A whole tensor, collected when read. Every process calls this with its rows, in the same order."""
        self._offered.append((own, rows))
        return self._lazy(len(self._offered) - 1)

    def _lazy(self, number: int) -> Tensor:
        own, rows = self._offered[number]
        return LazyTensor(rows.shape, own.dtype, lambda: self._collect(number))

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """In the first process: whole tensors can be collected inside. The others are in `serve` meanwhile."""
        self._serving = True
        try:
            yield
        finally:
            self._announce(DONE)
            self._forget_offers()

    def serve(self) -> None:
        """In all other processes: send the first one the rows it asks for, until it sends DONE."""
        while (number := self._announce(DONE)) != DONE:
            self._gather(number)
        self._forget_offers()

    def _forget_offers(self) -> None:
        self._serving = False
        del self._offered[len(self._numbers) :]

    def _announce(self, number: int) -> int:
        """What the first process says."""
        said = torch.tensor(number, device=self._device)
        distributed.broadcast(said, 0)
        return int(said)

    def _collect(self, number: int) -> Tensor:
        if not self._serving:
            raise RuntimeError("a whole tensor was asked for while no other process serves it")
        self._announce(number)
        found = self._gather(number)
        assert found is not None
        return found

    def _gather(self, number: int) -> Tensor | None:
        """A whole tensor in host memory, in the first process."""
        own, rows = self._offered[number]
        size = -(-rows.shape[0] // self._ranks)
        padded = torch.zeros((size, *rows.shape[1:]), dtype=own.dtype, device=self._device)
        padded[: len(own)] = own
        if self._rank:
            distributed.gather(padded)
            return None
        whole = padded.new_empty((self._ranks * size, *rows.shape[1:]))  # on the device, as copies there are fast
        distributed.gather(padded, [*whole.chunk(self._ranks)])
        return whole[: rows.shape[0]].cpu()

    # ---- what an optimizer keeps

    def offered_state(self, state: State, weights: Sequence[nn.Parameter]) -> State:
        """An optimizer's state_dict with whole tensors in place of rows; `weights` are its parameters."""

        def offered(value: Tensor, p: nn.Parameter, rows: Rows) -> Tensor:
            return self.offer(value, rows) if value.shape == p.shape else value

        return _changed(state, weights, offered)


def own_state(state: State, weights: Sequence[nn.Parameter]) -> State:
    """What this process has of a state_dict with whole tensors, whose optimizer steps `weights`."""

    def own(value: Tensor, p: nn.Parameter, rows: Rows) -> Tensor:
        return rows.own(value).to(p.device, copy=True) if value.shape == rows.shape else value

    return _changed(state, weights, own)


def _changed(
    state: State, weights: Sequence[nn.Parameter], change: Callable[[Tensor, nn.Parameter, Rows], Tensor]
) -> State:
    found: dict[int, State] = {}
    for number, values in state["state"].items():
        p, found[number] = weights[number], dict(values)
        for key, value in values.items():
            if isinstance(value, Tensor) and (rows := rows_of(p)):
                found[number][key] = change(value, p, rows)
    return {**state, "state": found}
