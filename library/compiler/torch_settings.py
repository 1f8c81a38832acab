"""PyTorch's global options that block-wise compilation needs, set in every thread."""

import contextlib
import os
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

import torch

from library.compiler import torch_private
from library.imports import without_collecting

TAG = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
OWN_LIMIT = 8  # of PyTorch: graphs of one function
# Modes that record CUDA graphs, and what blocks are compiled with then: the whole model is recorded, not each block.
RECORDED = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}

TRIED = ("max-autotune", "max-autotune-no-cudagraphs")  # modes that try many kernels
QUIET = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}


# Why: docs/decisions/2026-11-22-switches-in-every-thread.md
def torch_version() -> tuple[int, int]:
    """PyTorch's version, major and minor."""
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


Setting = tuple[ModuleType, str, Any]  # config module, name of the option, value


class ThreadSettings(threading.local):
    """PyTorch's switches for compiling, as block-wise compilation needs them.

    Since torch 2.12 a value that is set holds in its own thread only, and backward passes run in others
    (pytorch#186537). So every block asks for `hold` when it is called, which costs nothing where it has been done.
    """

    wanted: ClassVar[list[Setting]] = []  # the same for all threads
    held: list[Setting] | None = None
    before: list[Setting]  # what stood there in this thread

    def __init__(self) -> None:
        self.before = []

    def want(self, wanted: list[Setting]) -> None:
        """Set these options in every thread that compiles a block, and restore all others."""
        type(self).wanted = wanted
        self.hold()

    def hold(self) -> None:
        """Set the wanted options in this thread, and restore those of before."""
        if self.held is not self.wanted:
            for module, name, value in self.before:
                setattr(module, name, value)
            self.before = [(module, name, getattr(module, name)) for module, name, _ in self.wanted]
            for module, name, value in self.wanted:
                setattr(module, name, value)
            self.held = self.wanted


THREAD_SETTINGS = ThreadSettings()


# Why: docs/decisions/2026-11-22-switches-are-put-back.md
@contextlib.contextmanager
def keep_torch_settings() -> Iterator[None]:
    """Whatever compiling sets for the whole process is afterwards as it was: options, stance, stream, order of graphs.

    Threads of backward passes put their options back when they next compile. For the kernels of attention and the
    precision of products there is `library.memory.attention.keep_attention_settings`.
    """
    before = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    with without_collecting():  # loads the tracing, as every optimizer does
        stance = torch.compiler.set_stance("default")
    with stance:
        try:
            yield
        finally:
            THREAD_SETTINGS.want([])
            torch_private.keep_graphs_in_order(False)
            if torch.cuda.is_initialized():
                torch.cuda.set_stream(before or torch.cuda.default_stream())


def limit_of(args: Any, sizes: int) -> int:
    """How many graphs one block may have: as asked for, or as many as it needs; 0 where PyTorch's own limit does."""
    return int(args.compile_cache_size_limit) or (sizes if sizes > OWN_LIMIT else 0)


def kernels() -> str:
    """Everything by which PyTorch chooses a kernel of attention when it makes a graph."""
    kinds = ("cudnn", "flash", "mem_efficient", "math")
    on = [kind for kind in kinds if getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()]
    return f"{on} {torch_private.sdp_priority_order()} {torch.nn.attention.current_flash_attention_impl()}"


def wanted_settings(args: Any, device: torch.device, sizes: int = 1) -> list[Setting]:
    """Global switches that block-wise compilation needs."""
    dynamo, functorch, inductor, shapes = map(
        torch_private.config_module, ("dynamo", "functorch", "inductor", "shapes")
    )
    # Why: docs/decisions/2026-11-20-force-channels-last.md
    wanted: list[Setting] = [
        # Which kernel of attention is in a graph is not in PyTorch's key to it.
        (torch.compiler.config, "cache_key_tag", f"{TAG} {kernels()}".strip()),
        # Text and image lengths that happen to be equal must not be taken for the same size.
        (shapes, "use_duck_shape", False),
        # Convolutions in channels-last order also for varying sizes: otherwise inductor makes the sizes of images
        # constants in the backward of a convolution, and every bucket costs a recompilation.
        (inductor, "force_layout_optimization", True),
        (functorch, "activation_memory_budget", getattr(args, "compile_activation_budget", 1.0)),
    ]
    if hasattr(functorch, "autograd_cache_allow_custom_autograd_functions"):
        # Products in 8 bits have a gradient of their own; it is in the graph, by which the cache knows it.
        wanted.append((functorch, "autograd_cache_allow_custom_autograd_functions", True))
    if (limit := limit_of(args, sizes)) and torch_version() < (2, 13):
        wanted.append((dynamo, "recompile_limit", limit))
    # Of each product PyTorch lists all kernels that it has tried: hundreds of lines, which say nothing of the training.
    for name, quiet in QUIET.items() if args.compile_mode in TRIED else ():
        if hasattr(inductor, name) and f"TORCHINDUCTOR_{name.upper()}" not in os.environ:
            wanted.append((inductor, name, quiet))
    if device.type == "cuda":
        if hasattr(inductor, mixed := "triton.mix_order_reduction"):
            # Gradients of norms that learn, with those of what they norm in one kernel: only above a number of tokens,
            # which becomes a guard, so that smaller images cost a recompilation.
            wanted.append((inductor, mixed, False))
        # Repeated dropout masks in fused random kernels, wrong in the recompute (pytorch#198333).
        recorded = args.compile_mode in RECORDED or getattr(args, "cuda_graphs", "false") != "false"
        aligned = hasattr(inductor, "align_random_eager") and not recorded
        # A recording knows PyTorch's own random kernels, which draw anew each time it is played.
        wanted.append((inductor, "align_random_eager" if aligned else "fallback_random", True))
    return wanted
