"""Data parallelism: average the gradients of all processes, and broadcast the weights before the first step.

DistributedDataParallel wraps networks, and its hooks and bookkeeping surround every forward pass. Here nothing wraps a
network: the only collectives of a step are those for its gradients, after or during the last backward pass. So each
process may use CUDA graphs or not, independently of the others.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from library.compiler.torch_private import foreach_copy_
from library.methods import TrainingMethod

Shape = tuple[torch.Size, tuple[int, ...]]  # shape and strides of a tensor

BUCKET_BYTES = 200 * 2**20  # of gradients in one all-reduce
IN_FLIGHT = 2  # concurrent all-reduces; each needs a second copy of its gradients


class Bucket:
    """Parameters of one dtype whose gradients are sent together."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters, self.shapes = parameters, shapes_of(parameters)
        self.missing = {id(p) for p in parameters}  # parameters that have no gradient yet in this backward pass

    def send(self, ranks: int) -> "SentBucket":
        """Start to average the gradients. A missing gradient counts as zero in this process."""
        sent = SentBucket(self.parameters, self.shapes)
        sent.flags.fill_(1)
        for number, (view, p) in enumerate(zip(sent.views, self.parameters, strict=True)):
            if p.grad is None:
                view.zero_()
                sent.flags[number].zero_()
        copy_all([(view, p.grad) for view, p in zip(sent.views, self.parameters, strict=True) if p.grad is not None])
        sent.flat.mul_(1 / ranks)  # scale before summing, as the sum could overflow fp16
        sent.work = torch.distributed.all_reduce(sent.flat, async_op=True)
        return sent


class SentBucket:
    """A bucket whose all-reduce is running: the flattened gradients, followed by a flag for each parameter that has
    one.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shapes: Sequence[Shape]) -> None:
        self.parameters, total = parameters, sum(p.numel() for p in parameters)
        self.flat = parameters[0].new_empty(total + len(parameters))
        self.views, self.flags = views_of(self.flat, shapes), self.flat[total:]
        self.work: Any = None

    def receive(self) -> None:
        """Store the means as gradients. A parameter without a gradient in any process keeps None."""
        self.work.wait()
        pairs = [(p.grad, view) for p, view in zip(self.parameters, self.views, strict=True) if p.grad is not None]
        copy_all(pairs)
        # Reading the flags synchronises with the device, so only a process that lacks gradients does.
        if len(pairs) < len(self.parameters):
            for p, view, has_gradient in zip(self.parameters, self.views, self.flags.tolist(), strict=True):
                if p.grad is None and has_gradient:
                    p.grad = view.clone()


# DDP's hooks surround every forward pass and copy thousands of small gradients one by one; results are bit-equal.
# Why: docs/decisions/2026-11-22-gradients-without-ddp.md
class GradientAverager:
    """Averages the gradients of trained parameters by the same collectives in the same order in every process."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: int) -> None:
        """`parameters` roughly in the order in which gradients arrive, the same in all processes."""
        self._ranks, self._last, self._due = ranks, False, 0
        self._sent: deque[SentBucket] = deque()
        self.buckets = [Bucket(parameters_of_bucket) for parameters_of_bucket in group_tensors(parameters)]
        if len(self.buckets) > 1:  # send the first while the others are computed
            for bucket in self.buckets:
                for p in bucket.parameters:
                    p.register_post_accumulate_grad_hook(self._hook(bucket))

    @property
    def begun(self) -> bool:
        # A step whose gradients were sent cannot be repeated.
        return self._due > 0

    def expect(self, last: bool) -> None:
        """Prepare for a backward pass; gradients are sent only in the `last` one of a step."""
        self._last = last
        for bucket in self.buckets:
            bucket.missing = {id(p) for p in bucket.parameters}

    def finish(self) -> None:
        """Wait for the averages after the last backward pass of a step."""
        self._last = False
        self._send(len(self.buckets))
        while self._sent:
            self._sent.popleft().receive()
        self._due = 0

    @torch.no_grad()
    def _send(self, end: int) -> None:
        """Send the buckets before `end` that are not sent yet."""
        for bucket in self.buckets[self._due : end]:
            # Wait for the oldest, to bound the memory of gradients in flight.
            if len(self._sent) == IN_FLIGHT:
                self._sent.popleft().receive()
            self._sent.append(bucket.send(self._ranks))
        self._due = max(self._due, end)

    def _hook(self, bucket: Bucket) -> Any:
        def arrived(p: nn.Parameter) -> None:
            bucket.missing.discard(id(p))
            if self._last and not bucket.missing:  # send in order: a later bucket waits for the earlier ones
                ready = (n for n, other in enumerate(self.buckets) if other.missing)
                self._send(next(ready, len(self.buckets)))

        return arrived


def parameters_by_arrival(method: TrainingMethod) -> list[nn.Parameter]:
    """Return trained parameters roughly in the order of their gradients: last layers first, denoiser before text
    encoders.
    """
    whole = method.denoiser or nn.Module()
    in_denoiser = {id(p) for p in whole.parameters()}
    return sorted(reversed(method.parameters()), key=lambda p: id(p) not in in_denoiser)


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors in place with the values of the first process."""
    for group in group_tensors(list(tensors)):
        flat = group[0].new_empty(sum(t.numel() for t in group))
        views = views_of(flat, shapes_of(group))
        foreach_copy_(views, group)
        torch.distributed.broadcast(flat, 0)
        foreach_copy_(group, views)


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if pairs:  # PyTorch refuses empty lists
        foreach_copy_([to for to, _ in pairs], [new for _, new in pairs])


def group_tensors(tensors: Sequence[Any]) -> Iterator[list[Any]]:
    """Group tensors by dtype into about BUCKET_BYTES each, in the order in which groups are complete."""
    open_groups: dict[torch.dtype, list[Any]] = {}
    for tensor in tensors:
        group = open_groups.setdefault(tensor.dtype, [])
        group.append(tensor)
        if sum(t.nbytes for t in group) >= BUCKET_BYTES:
            yield open_groups.pop(tensor.dtype)
    yield from open_groups.values()


def shapes_of(tensors: Iterable[Tensor]) -> list[Shape]:
    return [(tensor.shape, torch.empty_like(tensor, device="meta").stride()) for tensor in tensors]


def views_of(flat: Tensor, shapes: Iterable[Shape]) -> list[Tensor]:
    """Return consecutive parts of a flat tensor as views with these shapes."""
    tensors, begin = [], 0
    for shape, stride in shapes:
        tensors.append(flat.as_strided(shape, stride, begin))
        begin += shape.numel()
    return tensors
