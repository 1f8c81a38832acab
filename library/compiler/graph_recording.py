"""One recording of a denoiser: the CUDA graphs of its forward and backward pass for inputs of one size."""

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from library.compiler import flat_memory
from library.compiler.graph_memory import GraphMemory
from library.compiler.recompute import RecomputeStates
from library.compiler.torch_private import pytree
from library.config.problems import first_line


@dataclass(frozen=True)
class Call:
    """The arguments of a call, flattened: its tensors, its other values, and the structure that holds them."""

    tensors: tuple[Tensor, ...]
    plain_values: tuple[Hashable, ...]
    places: tuple[bool, ...]  # which of the leaves are tensors
    tree: Any

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> "Call":
        """Flatten arguments."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        places = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return cls(tensors, tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor)), places, tree)

    @property
    def key(self) -> Hashable:
        """Key of the recordings that can replay this call."""
        kinds = tuple((tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in self.tensors)
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        return kinds, self.plain_values, self.tree, autocast

    @property
    def shape(self) -> str:
        return " x ".join(map(str, self.tensors[0].shape))

    @property
    def elements(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)

    def arguments(self, tensors: Sequence[Tensor]) -> Any:
        next_tensors, next_values = iter(tensors), iter(self.plain_values)
        return pytree.tree_unflatten([next(next_tensors if place else next_values) for place in self.places], self.tree)


class Recording:
    """The CUDA graphs of one size, forward and backward, and the memory that they read and write."""

    def __init__(
        self, call: Callable[..., Any], flattened: Call, learn: Sequence[nn.Parameter], memory: GraphMemory, passes: int
    ) -> None:
        """Run `passes` eager passes, so that compiling and the choice of kernels happen before the capture."""
        self.inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in flattened.tensors]
        self.elements = flattened.elements  # of its inputs, by which recordings are compared
        self.addresses = [p.data_ptr() for p in learn]
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.before = self.seconds = 0.0  # per pass, eager and replayed
        self.states = RecomputeStates(self.inputs[0].device)
        args, kwargs = flattened.arguments(self.inputs)
        self._call: Any = lambda: call(*args, **kwargs)
        self._targets = [*(t for t in self.inputs if t.requires_grad), *learn]
        self._random_on_host = False
        for _ in range(passes):
            torch.cuda.synchronize()
            began, rng_state = time.perf_counter(), torch.get_rng_state()
            with memory.used():
                with self.states.forward():
                    roots = [output for output in pytree.tree_leaves(self._call()) if output.requires_grad]
                self._gradients(roots, [torch.zeros_like(root) for root in roots])
            del roots
            torch.cuda.synchronize()
            self.before = time.perf_counter() - began
            self._random_on_host = not torch.equal(rng_state, torch.get_rng_state())

    @property
    def pace(self) -> str:
        # "" if no replay was timed.
        return f", {self.seconds:.3f} s a pass instead of {self.before:.3f} s" if self.seconds else ""

    def capture(self, learn: Sequence[nn.Parameter], gradients: Sequence[Tensor], memory: GraphMemory) -> str:
        """Capture both passes. Return why that is impossible, "" on success. Raises torch.OutOfMemoryError."""
        if self._random_on_host:
            # A replay would repeat the numbers of the capture.
            return "the CPU draws random numbers for each pass"
        try:
            with memory.capturing(self.forward), self.states.forward(capturing=True):
                outputs, self.tree = pytree.tree_flatten(self._call())
            roots = [output for output in outputs if output.requires_grad]
            self.grad_outputs = [torch.zeros_like(root) for root in roots]
            self.states.register(self.backward)
            with memory.capturing(self.backward):
                new_gradients = self._gradients(roots, self.grad_outputs)
                of_weights = new_gradients[len(new_gradients) - len(learn) :]
                pairs = [(to, new) for to, new in zip(gradients, of_weights, strict=True) if new is not None]
                flat_memory.copy_([to for to, _ in pairs], [new for _, new in pairs])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            cause = root_cause(error)
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            return f"PyTorch could not record them ({first_line(cause)})"
        self.has_grad = [new is not None for new in of_weights]
        self.grad_inputs = new_gradients[: len(new_gradients) - len(learn)]
        self.needs_grad = [output.requires_grad for output in outputs]
        self.outputs = [output.detach() for output in outputs]  # frees the autograd graph for the next recording
        self._call = None
        return ""

    def time(self) -> float:
        """Return the seconds that a replay of both passes takes."""
        for _ in range(2):  # the first brings the graphs to the GPU
            torch.cuda.synchronize()
            began = time.perf_counter()
            self.forward.replay()
            self.backward.replay()
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - began
        return self.seconds

    def _gradients(self, roots: list[Tensor], grad_outputs: list[Tensor]) -> Sequence[Tensor | None]:
        return torch.autograd.grad(roots, self._targets, grad_outputs, allow_unused=True)


def root_cause(error: BaseException) -> BaseException:
    """Return the error that failed a capture: leaving a failed one raises again."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


@contextlib.contextmanager
def casts_included() -> Iterator[None]:
    """Disable autocast's cache of cast weights."""
    # A cast made before the capture would be missing from the graph.
    was_enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
