"""Import inductor and start its workers on a thread while the model loads."""

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from library.compiler import cache, torch_private
from library.compiler.checks import find_compile_problems
from library.config.run_config import RunConfig

logger = logging.getLogger(__name__)


# The first graphs of FLUX.1 took 16 s instead of 21 s on an H200.
# Why: docs/decisions/2026-11-22-inductor-loads-beside-the-model.md
@contextlib.contextmanager
def prewarm_inductor(args: Any, device: torch.device) -> Iterator[None]:
    """While the body runs, import inductor on another thread, detect the device's features and start the workers.

    The body must not run models, as PyTorch's tracing is not thread-safe.
    """
    # Takes 3 to 10 s, hidden by loading a large model.
    thread = None
    if _should_prewarm(args, device):
        thread = threading.Thread(target=_compile_small_graph, args=(device.type,), name="compiler")
        thread.start()
    try:
        yield
    finally:
        if thread:
            thread.join()


def prewarm_before_steps(config: RunConfig, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Prewarm inductor for a training, unless another process may compile during its first steps."""
    compiles_elsewhere = device.type == "cuda" and not config.compile.why_not_in_background(config)
    return contextlib.nullcontext() if compiles_elsewhere else prewarm_inductor(config.compile, device)


def _should_prewarm(args: Any, device: torch.device) -> bool:
    if not args.compile or args.compile_backend != "inductor" or any(find_compile_problems(args, device)):
        return False
    cache.use_cache(getattr(args, "compile_cache_dir", None), device)
    return True


@functools.cache
def _compile_small_graph(kind: str) -> None:
    """Compile a small graph, forward and backward, once per process. A failure is reported when a block is compiled."""
    try:
        graph = torch.fx.Graph()  # operations of a block: matrix product, norm, attention, pointwise functions
        x, weight = graph.placeholder("x"), graph.placeholder("weight")
        normed = graph.call_function(F.layer_norm, (graph.call_function(F.linear, (x, weight)), (64,)))
        heads = graph.call_method("unflatten", (normed, -1, (4, 16)))
        heads = graph.call_method("transpose", (heads, 1, 2))
        attended = graph.call_function(F.scaled_dot_product_attention, (heads, heads, heads))
        graph.output((graph.call_function(F.gelu, (attended,)),))
        module = torch.fx.GraphModule(nn.Module(), graph)
        tensors = [torch.ones(2, 16, 64, device=kind), torch.ones(64, 64, device=kind, requires_grad=True)]
        (answer,) = torch_private.warm_inductor(module, tensors, processes=kind == "cuda")(*tensors)
        torch.autograd.grad(answer.sum(), tensors[1])
    except Exception as error:
        logger.debug("the compiler could not be prepared: %s", error)
