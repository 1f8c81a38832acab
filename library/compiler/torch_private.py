"""Every private part of PyTorch that this program uses, to be reviewed when PyTorch is updated.

Each function says why nothing public does the same, checked against the sources of PyTorch 2.11 and 2.13; version
differences are noted. tests/test_torch_private.py and ruff (TID251) keep all other files from using such parts.
"""

import contextlib
import copyreg
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

# Why: docs/decisions/2026-11-22-private-parts-of-torch-in-one-file.md
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from library import deferred
from library.compiler.recompute import RecomputeStates

__all__ = [
    "DataDependentOutputException",  # fake tensors are public only in `torch.export`, for whole programs
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "pytree",  # flattens nested arguments; the announced `torch.utils.pytree` is missing in 2.13
]

# Exceptions of these modules mean that compiling failed; they share no public base class.
DYNAMO = "torch._dynamo"
COMPILER_MODULES = (DYNAMO, "torch._inductor", "torch._functorch")

# One kernel for many small tensors. torch.optim uses these functions, but nothing public offers them.
foreach_copy_ = torch._foreach_copy_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_


# ---- loading the compiler


def defer_dynamo() -> None:
    """Load Dynamo only if something is compiled: a training without it saves 2 s of processor time.

    Every optimizer of PyTorch loads it, to switch it off and to end a graph that is being traced.
    """
    names = {"disable": _disable, "graph_break": _break_graph, "allow_in_graph": _allow_in_graph}
    deferred.defer_package(DYNAMO, names, then=_allow_noted)


def dynamo_is_loaded() -> bool:
    return deferred.is_loaded(DYNAMO)


def _disable(function: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
    """Return the function with Dynamo switched off inside of it, from when Dynamo is loaded."""
    if function is None:
        return functools.partial(_disable, recursive=recursive, **options)
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not disabled and dynamo_is_loaded():
            disabled.append(torch._dynamo.disable(function, recursive, **options))
        return (disabled[0] if disabled else function)(*args, **kwargs)

    return call


def _break_graph() -> None:
    """Do nothing, as no graph is traced before Dynamo is loaded."""


_allowed: list[Any] = []


def _allow_in_graph(function: Any) -> Any:
    _allowed.append(function)
    return function


def _allow_noted() -> None:
    while _allowed:
        torch.compiler.allow_in_graph(_allowed.pop())


# ---- records of the compiler


def listen_to_compiler(on_start: Callable[[str], None], max_metrics: int) -> None:
    """Call `on_start` with the id ("frame/attempt") of each begun graph; buffer up to `max_metrics` metrics.

    Clears earlier metrics. `torch.compiler.reset()` ends the calls. Public are only log lines (TORCH_LOGS) and a trace
    file (TORCH_TRACE).
    """
    import torch._dynamo.callback as callback

    callback.on_compile_start(lambda args: on_start(str(args.compile_id)))
    torch._dynamo.utils.set_compilation_metrics_limit(max_metrics)
    torch._dynamo.utils.clear_compilation_metrics()
    compile_counters("graph_break").clear()


def take_compilations() -> list[Any]:
    """Return and clear the metrics (CompilationMetrics) of the graphs compiled since the last call."""
    import torch._dynamo.utils as utils

    metrics = utils.get_compilation_metrics()
    utils.clear_compilation_metrics()
    return metrics


def compile_counters(name: str) -> Any:
    """Return PyTorch's counters of a group such as "stats" or "graph_break"."""
    import torch._dynamo.utils as utils

    return utils.counters[name]


# ---- settings of the compiler


def config_module(name: str) -> ModuleType:
    """Return the config module of "dynamo", "functorch" (AOTAutograd), "inductor" or "shapes".

    `torch.compiler.config` has few of their options, and `torch.compile(options=)` only inductor's.
    """
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config
    import torch.fx.experimental._config

    return {
        "dynamo": torch._dynamo.config,
        "functorch": torch._functorch.config,
        "inductor": torch._inductor.config,
        "shapes": torch.fx.experimental._config,
    }[name]


def mark_dynamic(tensor: Tensor, dimension: int) -> None:
    """Make one dimension dynamic. `torch.compile(dynamic=True)` would make all of them so."""
    import torch._dynamo as dynamo

    dynamo.maybe_mark_dynamic(tensor, dimension)  # `mark_dynamic` raises where two lengths depend on each other


def without_base(tensor: Tensor) -> Tensor:
    """Return a tensor that is no view, with the same memory and gradient.

    A compiled graph is bound to the base of a view. Nothing public drops the base without copying.
    """
    return torch.ops.aten._unsafe_view(tensor, tensor.shape) if tensor._is_view() else tensor


def keep_graphs_in_order(on: bool) -> None:
    """Let Dynamo check a function's graphs in the order of compilation instead of last used first.

    There is no public switch (pytorch#166926) and none to query it; PyTorch starts with this off.
    """
    import torch._dynamo  # noqa: F401 - which brings `torch._C._dynamo`

    frames: Any = torch._C._dynamo.eval_frame
    frames._set_lru_cache(not on)


def same_cache_keys() -> None:
    """Make the cache keys of compiled code equal in all programs that compile the same.

    Keys contain pickled tensor metadata, and a memory format is pickled with the name of the module that first imported
    torch, which differs between programs. There is no public switch.
    """
    copyreg.pickle(torch.memory_format, lambda memory_format: (_memory_format, (str(memory_format),)))


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name.removeprefix("torch."))


def forget_compiled_call(module: nn.Module) -> None:
    """Undo `module.compile()`; there is no public way."""
    module._compiled_call_impl = None


def allow_in_place_checkpoints() -> None:
    # Our checkpointed blocks have no in-place operations, which the warning is about.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


# ---- the tool chain


def default_cache_dir() -> str:
    """Return inductor's default cache folder, which it also writes into the environment."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def cpp_compiler() -> str:
    """Return the C++ compiler that inductor uses on a CPU. Raises inductor's own exceptions if there is none."""
    import torch._inductor.cpp_builder as builder

    return builder.get_cpp_compiler()


def has_triton() -> bool:
    """Return whether Triton is installed and supports this GPU."""
    import torch.utils._triton as triton

    return triton.has_triton()


def import_inductor() -> tuple[ModuleType, ModuleType]:
    """Import inductor's worker pool and entry point; other threads may run models meanwhile.

    PyTorch imports them with the first graph, which then waits; no public function does it earlier.
    """
    from torch._inductor import async_compile, compile_fx

    return async_compile, compile_fx


def warm_inductor(graph: torch.fx.GraphModule, tensors: Sequence[Tensor], processes: bool) -> Any:
    """Compile a graph with inductor alone and return the compiled callable; `processes` starts the worker pool first.

    `torch.compile` would trace, which no thread may do while another runs models.
    """
    async_compile, compile_fx = import_inductor()
    if processes:
        async_compile.AsyncCompile.warm_pool()
        async_compile.AsyncCompile.use_process_pool()  # the first task starts the processes
    return compile_fx.compile_fx(graph, list(tensors))


# ---- kernels


def sdp_priority_order() -> list[int]:
    """Return the numbers of attention kernels (SDPBackend) by priority.

    `sdpa_kernel(set_priority=True)` sets the order; nothing public returns it.
    """
    return torch._C._get_sdp_priority_order()


def fused_sdp_choice(*arguments: Any, **keywords: Any) -> int:
    """Return the number of the kernel (SDPBackend) that scaled_dot_product_attention would use. Raises RuntimeError if
    none fits.

    `torch.backends.cuda.can_use_*_attention` ignore the CPU, cuDNN's priority and disabled kernels.
    """
    return torch._fused_sdp_choice(*arguments, **keywords)


def scaled_mm(left: Tensor, right: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Multiply 8-bit matrices with a scale per row and per column, on a GPU -> bfloat16.

    The public torch.nn.functional.scaled_mm calls `_scaled_mm_v2`, for which inductor of 2.11 has no kernel.
    """
    return torch._scaled_mm(left, right, scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16, use_fast_accum=True)


def int_mm(left: Tensor, right: Tensor) -> Tensor:
    """Multiply int8 matrices, summing in int32. `torch.mm` of int8 would return int8."""
    return torch._int_mm(left, right)


def eager_backend(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """Compile with the backend "eager", with checkpoints that draw the same random numbers when recomputed.

    PyTorch's own leaves that to later compiler stages, and "eager" has none: the recomputed block had another dropout
    mask, and gradients were silently wrong.
    """
    operation = torch.ops.higher_order.tag_activation_checkpoint
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=operation):
                node.target = _checkpoint
            module.recompile()
    return graph.forward


def _checkpoint(function: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    operator: Any = torch.ops.higher_order.tag_activation_checkpoint
    checkpoint_options, function_arguments = operator.divide_kwargs(kwargs)
    if "_checkpoint_context_fn" in function.meta:
        checkpoint_options["context_fn"] = function.meta["_checkpoint_context_fn"]
    checkpoint_options |= {"use_reentrant": False, "preserve_rng_state": True}
    states = RecomputeStates.recording
    return checkpoint(
        function, *args, **states.options(checkpoint_options) if states else checkpoint_options, **function_arguments
    )


# ---- memory


@contextlib.contextmanager
def allocate_to_pool(device: int, pool: Any) -> Iterator[None]:
    """Take all GPU memory from the pool of a CUDA graph, which must exist, within this context.

    The public `torch.cuda.use_mem_pool` covers one thread only, and backward passes run in others.
    """
    torch._C._cuda_beginAllocateToPool(device, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def abandon_capture(device: torch.device, pool: Any) -> None:
    """Clean up after a capture that failed to end, which PyTorch still considers active.

    Otherwise its memory would never be freed, and the GPU's generator would refuse to draw.
    """
    torch._C._cuda_endAllocateToPool(device.index, pool)
    torch._C._cuda_releasePool(device.index, pool)
    torch.cuda.default_generators[device.index].graphsafe_set_state(torch.Generator(device))


# ---- training


class GradScaler(torch.amp.GradScaler):
    """A gradient scaler for cases that the public one does not support.

    `half` accepts float16 gradients. `on_host` is for gradients in host memory: the public scaler copies its values
    there without synchronising (torch 2.11 to 2.13, _MultiDeviceReplicator).
    """

    def __init__(self, device: str, half: bool, on_host: bool, init_scale: float = 2.0**16) -> None:
        super().__init__(device, init_scale)
        self._half, self._on_host = half, on_host

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        if self._on_host:
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16 or self._half)


def process_store() -> "torch.distributed.Store":
    """Return the store by which the processes found each other. Waiting on it has no timeout, unlike public
    collectives.
    """
    return torch.distributed.distributed_c10d._get_default_store()


def process_store_of_thread() -> "torch.distributed.Store":
    """Return a second connection to `process_store`, as a waiting thread blocks its own connection for all others."""
    store: Any = process_store()
    return store.clone()


def copy_all(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each tensor into the one at its place in `into`, in few kernels."""
    torch._foreach_copy_(list(into), list(values))


class LazyTensor(Tensor):
    """A tensor in host memory whose values are computed on every access.

    Shape and dtype are fixed. There is no public base class for tensors without memory.
    """

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, make: Callable[[], Tensor]) -> "LazyTensor":
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)

    def __init__(self, shape: torch.Size, dtype: torch.dtype, make: Callable[[], Tensor]) -> None:
        self.make = make

    @classmethod
    def __torch_function__(cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None):
        with torch._C.DisableTorchFunctionSubclass():  # results are ordinary tensors
            return func(*args, **(kwargs or {}))

    @classmethod  # declared by PyTorch as a function that passes everything through
    # pyrefly: ignore[bad-override]
    def __torch_dispatch__(cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None):
        arguments, keywords = pytree.tree_map_only(cls, lambda lazy: lazy.make(), (args, kwargs or {}))
        return func(*arguments, **keywords)
