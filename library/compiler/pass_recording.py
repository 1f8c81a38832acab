"""CUDA graphs of passes without gradients: a denoiser's pass for images is recorded once per size and replayed.

Inputs are copied into the recording's buffers and outputs are copied out, so one recording serves all steps, prompts
and seeds of a size. Weights must stay where they are. All recordings share a memory pool, apart from the training's.
"""

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from library.compiler import gpu_memory, torch_private
from library.compiler.graph_memory import GraphMemory
from library.compiler.graph_recording import Call, casts_included, root_cause
from library.compiler.torch_private import pytree
from library.config.problems import first_line

logger = logging.getLogger(__name__)

MAX_RECORDED_PASSES = 16  # sizes; others are not recorded
SPARE_BYTES = 2**29  # share of the GPU's memory left for everything outside recordings


class PassGraph(Protocol):
    """A recording of one pass."""

    def capture(self, call: Callable[[], Any]) -> Any:
        """Record what `call` launches; return its outputs, whose values the next replay computes."""

    def replay(self) -> None:
        """Launch the recorded work again."""


class PassPool(Protocol):
    """The memory that recordings share."""

    device_type: str

    def graph(self) -> PassGraph:
        """Return an empty recording in this memory."""

    def free_bytes(self) -> int:
        """Return the memory that is left on the device."""


class CudaPassGraph:
    """A CUDA graph."""

    def __init__(self, memory: GraphMemory) -> None:
        self._memory, self._graph = memory, torch.cuda.CUDAGraph()

    def capture(self, call: Callable[[], Any]) -> Any:
        """Capture into the graph. Nothing is computed before the first replay."""
        with self._memory.capturing(self._graph):
            return call()

    def replay(self) -> None:
        self._graph.replay()


class CudaPool:
    """Memory of CUDA graphs. The current stream must not be the default one."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._memory = GraphMemory()

    def graph(self) -> CudaPassGraph:
        return CudaPassGraph(self._memory)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return gpu_memory.free_memory()  # within gpu_memory_limit


class RecordedPass:
    """One recorded pass, and the buffers that it reads and writes."""

    def __init__(self, call: Callable[..., Any], flattened: Call, graph: PassGraph) -> None:
        self.inputs = [t.detach().clone() for t in flattened.tensors]
        self._graph = graph
        args, kwargs = flattened.arguments(self.inputs)
        self.outputs, self._tree = pytree.tree_flatten(graph.capture(lambda: call(*args, **kwargs)))

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Return the outputs for these inputs."""
        torch_private.foreach_copy_(self.inputs, list(tensors))
        self._graph.replay()
        # Samplers keep outputs of earlier steps, which the next replay overwrites.
        outputs = [output.clone() if isinstance(output, Tensor) else output for output in self.outputs]
        return pytree.tree_unflatten(outputs, self._tree)


class PassRecorder:
    """The recorded passes of one denoiser. The first pass of a size runs eagerly and chooses kernels, the second is
    recorded, and all others are replayed.
    """

    def __init__(self, denoiser: nn.Module, make_pool: Callable[[], PassPool] = CudaPool) -> None:
        self.recordings: dict[Hashable, RecordedPass] = {}
        self.why_not = ""  # why recording has ended
        self.replays = 0
        self._make_pool = make_pool
        self._pool: PassPool | None = None
        self._warm: set[Hashable] = set()
        denoiser.__dict__["_recorded_passes"] = self

    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of a pass, replayed if one of its size is recorded or can be."""
        with casts_included():
            if self.why_not:
                return call(*args, **kwargs)
            flattened = Call.of(args, kwargs)
            recorded = self.recordings.get(flattened.key)
            if recorded is None and flattened.key in self._warm:
                recorded = self._record(call, flattened)
            if recorded is None:
                self._warm.add(flattened.key)
                return call(*args, **kwargs)
            self.replays += 1
            return recorded.replay(flattened.tensors)

    def free(self) -> None:
        """Free all recordings. Passes are recorded again when their sizes occur next."""
        had_recordings = bool(self.recordings)
        self.recordings.clear()
        self._warm.clear()
        self._pool = None
        if had_recordings:
            gc.collect()
            with contextlib.suppress(RuntimeError, AssertionError):  # without a GPU
                torch.cuda.empty_cache()

    def free_if_short(self) -> bool:
        """Free all recordings if less than SPARE_BYTES of the device's memory are left; return whether it did."""
        if not self.recordings or self._pool is None or self._pool.free_bytes() >= SPARE_BYTES:
            return False
        self.free()
        return True

    def give_up(self, why: str, expected: bool = False) -> None:
        """Free all recordings and stop recording; `expected` if that is a decision, not a failure."""
        self.free()
        self.why_not = why
        logger.log(logging.INFO if expected else logging.WARNING, "Passes for images are not recorded: %s", why)

    def _record(self, call: Callable[..., Any], flattened: Call) -> RecordedPass | None:
        """Record a pass. Return None if it cannot be."""
        if len(self.recordings) >= MAX_RECORDED_PASSES:
            return None
        began, why, recorded = time.perf_counter(), "", None
        try:
            pool = self._pool = self._pool or self._make_pool()
            if any(tensor.device.type != pool.device_type for tensor in flattened.tensors):
                why = "an input is on the host"
            else:
                recorded = RecordedPass(call, flattened, pool.graph())
        except torch.OutOfMemoryError:
            why = "the GPU's memory is too small"
        except RuntimeError as error:
            why = f"PyTorch could not record them ({first_line(root_cause(error))})"
        if recorded is not None and self._pool and self._pool.free_bytes() < SPARE_BYTES:
            why, recorded = "they would leave too little of the GPU's memory", None
        if recorded is None:
            self.give_up(why)
            return None
        self.recordings[flattened.key] = recorded
        logger.info("Recorded a pass for images of %s in %.1f s", flattened.shape, time.perf_counter() - began)
        return recorded


def recorded_passes_of(denoiser: nn.Module) -> PassRecorder | None:
    return vars(denoiser).get("_recorded_passes")
