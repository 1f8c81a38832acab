"""The memory pool that all CUDA graphs of a denoiser share."""

import contextlib
import warnings
from collections.abc import Iterator

import torch

from library.compiler import torch_private


class GraphMemory:
    """The memory pool of all recordings of a denoiser. Warm-up passes use it too, so that they need no extra memory."""

    def __init__(self) -> None:
        self._held = torch.cuda.CUDAGraph()  # an empty graph that keeps the pool alive
        self._pool = torch.cuda.graph_pool_handle()
        with warnings.catch_warnings(action="ignore"), self.capturing(self._held):  # PyTorch warns that it is empty
            pass

    def used(self) -> contextlib.AbstractContextManager[None]:
        return torch_private.allocate_to_pool(torch.cuda.current_device(), self._pool)

    @contextlib.contextmanager
    def capturing(self, graph: "torch.cuda.CUDAGraph") -> Iterator[None]:
        """Capture what this thread launches into a graph. Other threads may load data meanwhile."""
        stream = torch.cuda.current_stream()
        capture = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        capture.__enter__()
        try:
            yield
        finally:
            try:
                capture.__exit__(None, None, None)
            except RuntimeError:
                torch_private.abandon_capture(stream.device, self._pool)
                raise
