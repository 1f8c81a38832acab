"""A denoiser sharded over several processes (FSDP2): each holds some rows of every weight, its gradient and its
optimizer state.

A block's weights are gathered before it computes and freed afterwards. The optimizer is unaware of this: it steps
ordinary parameters that are this process' rows. Whole tensors are built one at a time when their values are read, only
by the first process; the others send it their rows.
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

State = dict[str, Any]  # an optimizer's state_dict

END_OF_TENSORS = -1  # sent by the first process when it needs no further tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a weight that this process holds."""

    shape: torch.Size  # of the whole weight
    first: int
    last: int  # exclusive

    def own(self, whole: Tensor) -> Tensor:
        return whole[self.first : self.last]


def rows_of_parameter(p: Tensor) -> Rows | None:
    return vars(p).get("rows")


def whole_shape(p: Tensor) -> torch.Size:
    rows = rows_of_parameter(p)
    return rows.shape if rows else p.shape


def own_part(whole: Tensor, p: Tensor) -> Tensor:
    rows = rows_of_parameter(p)
    return rows.own(whole) if rows else whole


def collected(tensor: Tensor) -> bool:
    return isinstance(tensor, LazyTensor)


# accelerate's own FSDP2 would make trained weights float32; gathering in hooks around a block's call keeps compiled
# graphs the same.
# Why: docs/decisions/2026-11-22-whole-models-in-shards.md
class ShardedModel:
    """A sharded denoiser, and the parameters that are this process' rows, by their names in the denoiser."""

    def __init__(self, denoiser: nn.Module, block_classes: Sequence[str], device: torch.device) -> None:
        """Shard the denoiser block by block onto the device. References to its whole weights keep these alive."""
        # Import late, as it takes as long as half of PyTorch.
        from torch.distributed.fsdp import fully_shard

        # It warns against in-place changes of a network's output, which never happen here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        self._rank, self._ranks, self._device = distributed.get_rank(), distributed.get_world_size(), device
        mesh = distributed.init_device_mesh(device.type, (self._ranks,))
        for module in reversed([*denoiser.modules()]):  # children before their block
            if module is not denoiser and type(module).__name__ not in block_classes:
                continue
            for p in module.parameters():
                if not p.is_contiguous():
                    p.data = p.data.contiguous()  # channels-last convolutions cannot be cut into rows
            cls = type(module)
            # The root also frees its weights after the forward pass, so that steps, resumed states and averages
            # change the only copy.
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

        denoiser.register_state_dict_post_hook(put_whole)  # saving reads the state dict

    def _rows(self, p: Any) -> Any:
        """Return a parameter that holds this process' rows of a weight."""
        # Rounded up, as FSDP2 cuts: the last processes may have fewer rows, or none.
        size = -(-p.shape[0] // self._ranks)
        first, last = (min(rank * size, p.shape[0]) for rank in (self._rank, self._rank + 1))
        with torch.no_grad():
            local: Any = nn.Parameter(p.to_local(), requires_grad=p.requires_grad)
        local.rows = Rows(p.shape, first, last)
        return local

    # ---- a step

    def expect_gradients(self, last: bool) -> None:
        """Prepare for a backward pass: gradients are exchanged in the `last` one of a step, and accumulated
        until then.
        """
        self._denoiser.set_requires_gradient_sync(last)

    def take_gradients(self) -> None:
        """After the last backward pass of a step: assign the gradients, averaged over processes, to the parameters."""
        with torch.no_grad():
            for name, p in self._weights.items():
                self.parameters[name].grad = None if p.grad is None else p.grad.to_local()
                p.grad = None

    def forget_gradients(self) -> None:
        for p in self._weights.values():
            p.grad = None

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Clip gradients to a norm over all of them, in all processes; return their norm before, float32."""
        squares = torch.zeros(2, device=self._device)  # sums for sharded and for whole parameters
        learning = [p for p in parameters if p.grad is not None]
        for whole in (False, True):
            gradients = [p.grad for p in learning if p.grad is not None and (rows_of_parameter(p) is None) == whole]
            if gradients:
                norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
                squares[int(whole)] = torch.stack(norms).square().sum()
        distributed.all_reduce(squares[:1])  # whole parameters have the same gradient in every process
        norm = squares.sum().sqrt()
        nn.utils.clip_grads_with_norm_(learning, limit, norm)
        return norm

    # ---- whole tensors

    def whole(self, name: str) -> Tensor:
        return self._lazy(self._numbers[name])

    def offer(self, local: Tensor, rows: Rows) -> Tensor:
        """Return a whole tensor, gathered when read. Collective: every process passes its rows, in the same order."""
        self._offered.append((local, rows))
        return self._lazy(len(self._offered) - 1)

    def _lazy(self, number: int) -> Tensor:
        local, rows = self._offered[number]
        return LazyTensor(rows.shape, local.dtype, lambda: self._collect(number))

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """In the first process: allow reading whole tensors within this context, while the others run `serve`."""
        self._serving = True
        try:
            yield
        finally:
            self._announce(END_OF_TENSORS)
            self._forget_offers()

    def serve(self) -> None:
        """In all other processes: send the requested rows to the first one until it sends END_OF_TENSORS."""
        while (number := self._announce(END_OF_TENSORS)) != END_OF_TENSORS:
            self._gather(number)
        self._forget_offers()

    def _forget_offers(self) -> None:
        self._serving = False
        # Weights stay offered; optimizer states are offered anew for each save.
        del self._offered[len(self._numbers) :]

    def _announce(self, number: int) -> int:
        """Broadcast a number from rank 0."""
        tensor = torch.tensor(number, device=self._device)
        distributed.broadcast(tensor, 0)
        return int(tensor)

    def _collect(self, number: int) -> Tensor:
        if not self._serving:
            raise RuntimeError("a whole tensor was requested while no other process serves it")
        self._announce(number)
        tensor = self._gather(number)
        assert tensor is not None
        return tensor

    def _gather(self, number: int) -> Tensor | None:
        """Return a whole tensor in host memory, in the first process."""
        local, rows = self._offered[number]
        size = -(-rows.shape[0] // self._ranks)
        # Collectives need equal sizes, and the last processes may have fewer rows.
        padded = torch.zeros((size, *rows.shape[1:]), dtype=local.dtype, device=self._device)
        padded[: len(local)] = local
        if self._rank:
            distributed.gather(padded)
            return None
        whole = padded.new_empty((self._ranks * size, *rows.shape[1:]))  # on the device, where copies are fast
        distributed.gather(padded, [*whole.chunk(self._ranks)])
        return whole[: rows.shape[0]].cpu()

    # ---- what an optimizer keeps

    def offered_state(self, state: State, weights: Sequence[nn.Parameter]) -> State:
        """Return an optimizer's state_dict with whole tensors in place of rows; `weights` are its parameters."""

        def offered(value: Tensor, p: nn.Parameter, rows: Rows) -> Tensor:
            return self.offer(value, rows) if value.shape == p.shape else value

        return _change_state(state, weights, offered)


def own_state(state: State, weights: Sequence[nn.Parameter]) -> State:
    """Return this process' part of a state_dict with whole tensors, for an optimizer of `weights`."""

    def cut(value: Tensor, p: nn.Parameter, rows: Rows) -> Tensor:
        return rows.own(value).to(p.device, copy=True) if value.shape == rows.shape else value

    return _change_state(state, weights, cut)


def _change_state(
    state: State, weights: Sequence[nn.Parameter], change: Callable[[Tensor, nn.Parameter, Rows], Tensor]
) -> State:
    changed: dict[int, State] = {}
    for number, values in state["state"].items():
        p, changed[number] = weights[number], dict(values)
        for key, value in values.items():
            if isinstance(value, Tensor) and (rows := rows_of_parameter(p)):
                changed[number][key] = change(value, p, rows)
    return {**state, "state": changed}
