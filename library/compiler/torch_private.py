"""Every private part of PyTorch that this program uses, in one place: what to look at when PyTorch is updated.

Each function says why nothing public does the same. All of it was read in the sources of PyTorch 2.11 and 2.13; where
the two differ, or a part is known to be younger or older, the function says so. tests/test_torch_private.py and ruff
(TID251) see that no other file reaches for such parts.
"""

import contextlib
import copyreg
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

from library.compiler.recompute import RecomputeStates

__all__ = [
    "DataDependentOutputException",  # tensors without memory are public in `torch.export` only, for whole programs
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "pytree",  # takes nested arguments apart; `torch.utils.pytree` is announced, and not there in 2.13
]

# Whose exceptions mean that a compilation failed; they share no public base class.
COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "torch._functorch")

# Many small tensors in one kernel, as torch.optim does it. Public optimizers use them, nothing public offers them.
foreach_copy_ = torch._foreach_copy_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_


# ---- what the compiler did


def listen_to_compiler(on_start: Callable[[str], None], kept: int) -> None:
    """Call `on_start` with the id ("frame/attempt") of each graph that is begun; keep up to `kept` metrics of graphs.

    What came before is forgotten. Public are only log lines (TORCH_LOGS) and a trace in a file (TORCH_TRACE).
    `torch.compiler.reset()` ends the calls.
    """
    import torch._dynamo.callback as callback

    callback.on_compile_start(lambda args: on_start(str(args.compile_id)))
    torch._dynamo.utils.set_compilation_metrics_limit(kept)
    torch._dynamo.utils.clear_compilation_metrics()
    compile_counters("graph_break").clear()


def take_compilations() -> list[Any]:
    """The metrics (CompilationMetrics) of what was compiled since the last call."""
    import torch._dynamo.utils as utils

    metrics = utils.get_compilation_metrics()
    utils.clear_compilation_metrics()
    return metrics


def compile_counters(name: str) -> Any:
    """PyTorch's own counts of "stats", "graph_break" and the like, by what was counted."""
    import torch._dynamo.utils as utils

    return utils.counters[name]


# ---- what the compiler is told


def config_module(name: str) -> ModuleType:
    """The options of "dynamo", "functorch" (AOTAutograd), "inductor" or "shapes".

    `torch.compiler.config` has few of them, and `torch.compile(options=)` only inductor's.
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
    """Let the size of a dimension vary. `torch.compile(dynamic=True)` would let all of them."""
    import torch._dynamo as dynamo

    dynamo.maybe_mark_dynamic(tensor, dimension)  # `mark_dynamic` raises where two lengths depend on each other


def without_base(tensor: Tensor) -> Tensor:
    """The tensor, and if it is a view one that is none, with the same memory and gradient.

    A compiled graph is bound to the base of a view. Nothing public drops the base without copying.
    """
    return torch.ops.aten._unsafe_view(tensor, tensor.shape) if tensor._is_view() else tensor


def keep_graphs_in_order(on: bool) -> None:
    """Let Dynamo check the graphs of a function in the order in which they were compiled, not the last used first.

    There is no public switch (pytorch#166926), and none that says how it stands: off is how PyTorch starts.
    """
    import torch._dynamo  # noqa: F401 - which brings `torch._C._dynamo`

    frames: Any = torch._C._dynamo.eval_frame
    frames._set_lru_cache(not on)


def same_cache_keys() -> None:
    """Let the keys of compiled code be the same in all programs that compile the same.

    Pickled facts of tensors are part of a key, and a memory format is pickled with the name of the module that imported
    torch first, which is another one in each program. There is no public switch.
    """
    copyreg.pickle(torch.memory_format, lambda kept: (_memory_format, (str(kept),)))


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name.removeprefix("torch."))


def forget_compiled_call(module: nn.Module) -> None:
    """Undo `module.compile()`, which has no public way back."""
    module._compiled_call_impl = None


def allow_in_place_checkpoints() -> None:
    """No warning of operations in place from selective checkpoints, whose blocks here have none."""
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


# ---- the tool chain


def default_cache_dir() -> str:
    """Where inductor keeps compiled code if nobody says otherwise, which it writes into the environment by itself."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def cpp_compiler() -> str:
    """The C++ compiler that inductor takes on a CPU. Raises where there is none: exceptions of inductor's own."""
    import torch._inductor.cpp_builder as builder

    return builder.get_cpp_compiler()


def has_triton() -> bool:
    """Whether Triton is installed and knows this GPU."""
    import torch.utils._triton as triton

    return triton.has_triton()


def import_inductor() -> tuple[ModuleType, ModuleType]:
    """Import what makes a graph, of the cache too, into code of this process; other threads may run models meanwhile.

    PyTorch imports it with the first graph, which waits for it; nothing public does. The modules of its helpers and of
    its entry point.
    """
    from torch._inductor import async_compile, compile_fx

    return async_compile, compile_fx


def warm_inductor(graph: torch.fx.GraphModule, tensors: Sequence[Tensor], processes: bool) -> Any:
    """Compile a graph with inductor alone, and return what answers; `processes` starts its helpers before.

    `torch.compile` would trace, which no thread may do while another one runs models.
    """
    async_compile, compile_fx = import_inductor()
    if processes:
        async_compile.AsyncCompile.warm_pool()
        async_compile.AsyncCompile.use_process_pool()  # its first task lets it make its processes
    return compile_fx.compile_fx(graph, list(tensors))


# ---- kernels


def sdp_priority_order() -> list[int]:
    """Numbers of the attention kernels (SDPBackend) in the order in which PyTorch asks them.

    `sdpa_kernel(set_priority=True)` changes the order; nothing public tells it.
    """
    return torch._C._get_sdp_priority_order()


def fused_sdp_choice(*given: Any, **named: Any) -> int:
    """The number of the kernel (SDPBackend) that would answer scaled_dot_product_attention. RuntimeError if none could.

    `torch.backends.cuda.can_use_*_attention` say nothing about the CPU, cuDNN's order and what is switched off.
    """
    return torch._fused_sdp_choice(*given, **named)


def scaled_mm(left: Tensor, right: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Product of matrices in 8 bits with a scale for each row and each column, on a GPU -> bfloat16.

    The public torch.nn.functional.scaled_mm calls `_scaled_mm_v2`, which inductor of 2.11 has no kernel of its own for.
    """
    return torch._scaled_mm(left, right, scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16, use_fast_accum=True)


def int_mm(left: Tensor, right: Tensor) -> Tensor:
    """Product of int8 matrices, summed in int32. `torch.mm` of int8 would answer in int8."""
    return torch._int_mm(left, right)


def eager_backend(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """The backend "eager", whose checkpoints draw again what they drew at first.

    PyTorch's own leaves that to what later stages make of random numbers, and "eager" has none: what is computed again
    in the backward pass had other dropout, and gradients were wrong without a word.
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
    how, own = operator.divide_kwargs(kwargs)
    if "_checkpoint_context_fn" in function.meta:
        how["context_fn"] = function.meta["_checkpoint_context_fn"]
    how |= {"use_reentrant": False, "preserve_rng_state": True}
    states = RecomputeStates.recording
    return checkpoint(function, *args, **states.options(how) if states else how, **own)


# ---- memory


@contextlib.contextmanager
def allocate_to_pool(device: int, pool: Any) -> Iterator[None]:
    """Inside, all memory of a GPU is taken from the pool of a CUDA graph, which has to exist.

    The public `torch.cuda.use_mem_pool` looks at one thread, and backward passes run in others.
    """
    torch._C._cuda_beginAllocateToPool(device, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def abandon_capture(device: torch.device, pool: Any) -> None:
    """Clean up after a capture that could not be ended: PyTorch believes that it still goes on.

    Its memory would never be given back, and the generator of the GPU would refuse to draw.
    """
    torch._C._cuda_endAllocateToPool(device.index, pool)
    torch._C._cuda_releasePool(device.index, pool)
    torch.cuda.default_generators[device.index].graphsafe_set_state(torch.Generator(device))


# ---- training


class GradScaler(torch.amp.GradScaler):
    """A gradient scaler for weights that the public one has no way for.

    `half` accepts gradients in float16. `on_host` is for gradients in host memory: the public scaler copies its numbers
    there without waiting for them (torch 2.11 to 2.13, _MultiDeviceReplicator).
    """

    def __init__(self, device: str, half: bool, on_host: bool, init_scale: float = 2.0**16) -> None:
        super().__init__(device, init_scale)
        self._half, self._on_host = half, on_host

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        if self._on_host:
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16 or self._half)


def process_store() -> "torch.distributed.Store":
    """The store by which processes found each other. Waiting at it has no timeout, unlike all public collectives."""
    return torch.distributed.distributed_c10d._get_default_store()


def process_store_of_thread() -> "torch.distributed.Store":
    """The same by a connection of its own: a thread that waits at the store keeps all others from that connection."""
    store: Any = process_store()
    return store.clone()


class LazyTensor(Tensor):
    """A tensor in host memory whose numbers are made by a function each time an operation asks for them.

    Shape and dtype are known before. There is no public base class for tensors without memory of their own.
    """

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, make: Callable[[], Tensor]) -> "LazyTensor":
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)

    def __init__(self, shape: torch.Size, dtype: torch.dtype, make: Callable[[], Tensor]) -> None:
        self.make = make

    @classmethod
    def __torch_function__(cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None):
        with torch._C.DisableTorchFunctionSubclass():  # answers are ordinary tensors
            return func(*args, **(kwargs or {}))

    @classmethod  # which PyTorch declares as a function that passes all by
    # pyrefly: ignore[bad-override]
    def __torch_dispatch__(cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None):
        given, named = pytree.tree_map_only(cls, lambda lazy: lazy.make(), (args, kwargs or {}))
        return func(*given, **named)
