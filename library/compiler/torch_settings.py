"""PyTorch's global options that block-wise compilation needs, set in every thread."""

import contextlib
import os
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

import torch

from library.compiler import torch_private
from library.compiler.row_kernels import make_row_choices
from library.config.compile_modes import RECORDED_MODES, TUNED_MODES

TAG = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
OWN_LIMIT = 8  # of PyTorch: graphs of one function
QUIET = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}


# Since torch 2.12 a setting holds only in the thread that set it.
# Why: docs/decisions/2026-11-22-switches-in-every-thread.md
def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


Setting = tuple[ModuleType, str, Any]  # config module, name of the option, value


class ThreadSettings(threading.local):
    """PyTorch's switches for block-wise compilation, set in every thread that needs them.

    Since torch 2.12 a setting holds only in its own thread, and backward passes run in others (pytorch#186537). So
    every block calls `hold`, which costs nothing once done.
    """

    required: ClassVar[list[Setting]] = []  # the same for all threads
    held: list[Setting] | None = None
    before: list[Setting]  # this thread's values before

    def __init__(self) -> None:
        self.before = []

    def want(self, settings: list[Setting]) -> None:
        """Set these options in every thread that compiles a block, and restore all others."""
        type(self).required = settings
        self.hold()

    def hold(self) -> None:
        """Apply the required options in this thread, and restore earlier ones."""
        if self.held is not self.required:
            for module, name, value in self.before:
                setattr(module, name, value)
            self.before = [(module, name, getattr(module, name)) for module, name, _ in self.required]
            for module, name, value in self.required:
                setattr(module, name, value)
            self.held = self.required


THREAD_SETTINGS = ThreadSettings()


def stance(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context with this stance of `torch.compile`, which is of no use while nothing is compiled."""
    return torch.compiler.set_stance(name) if torch_private.dynamo_is_loaded() else contextlib.nullcontext()


# Settings are global, so a later training or test in this process would inherit them.
# Why: docs/decisions/2026-11-22-switches-are-put-back.md
@contextlib.contextmanager
def keep_torch_settings() -> Iterator[None]:
    """Restore what compiling sets for the whole process: options, stance, stream, order of graphs.

    Other threads restore their options when they next compile. For attention kernels and matrix precision see
    `library.memory.attention.keep_attention_settings`.
    """
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    with stance("default"):
        try:
            yield
        finally:
            THREAD_SETTINGS.want([])
            if torch_private.dynamo_is_loaded():
                torch.compiler.set_stance("default")
                torch_private.keep_graphs_in_order(False)
            if torch.cuda.is_initialized():
                torch.cuda.set_stream(stream or torch.cuda.default_stream())


def limit_of(args: Any, sizes: int) -> int:
    # As many as needed; 0 is PyTorch's own limit.
    return int(args.compile_cache_size_limit) or (sizes if sizes > OWN_LIMIT else 0)


def kernels() -> str:
    """Return everything that decides which attention kernel PyTorch compiles into a graph."""
    kinds = ("cudnn", "flash", "mem_efficient", "math")
    on = [kind for kind in kinds if getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()]
    return f"{on} {torch_private.sdp_priority_order()} {torch.nn.attention.current_flash_attention_impl()}"


def wanted_settings(args: Any, device: torch.device, sizes: int = 1) -> list[Setting]:
    """Return the global switches that block-wise compilation needs."""
    dynamo, functorch, inductor, shapes = map(
        torch_private.config_module, ("dynamo", "functorch", "inductor", "shapes")
    )
    # With varying sizes inductor would otherwise make sizes constants in convolution backwards, and recompile every
    # bucket.
    # Why: docs/decisions/2026-11-20-force-channels-last.md
    settings: list[Setting] = [
        # PyTorch's cache key does not contain the attention kernel of a graph.
        (torch.compiler.config, "cache_key_tag", f"{TAG} {kernels()}".strip()),
        # Text and image lengths that happen to be equal must not be taken for the same size.
        (shapes, "use_duck_shape", False),
        # Convolutions in channels-last order also for varying sizes: otherwise inductor makes the sizes of images
        # constants in the backward of a convolution, and every bucket costs a recompilation.
        (inductor, "force_layout_optimization", True),
        (functorch, "activation_memory_budget", getattr(args, "compile_activation_budget", 1.0)),
    ]
    if hasattr(functorch, "autograd_cache_allow_custom_autograd_functions"):
        # 8-bit products have their own backward; it is part of the graph, so the cache distinguishes it.
        settings.append((functorch, "autograd_cache_allow_custom_autograd_functions", True))
    if (limit := limit_of(args, sizes)) and torch_version() < (2, 13):
        settings.append((dynamo, "recompile_limit", limit))
    # Otherwise PyTorch lists every kernel it has tried for each product, in hundreds of lines.
    for name, quiet in QUIET.items() if args.compile_mode in TUNED_MODES else ():
        if hasattr(inductor, name) and f"TORCHINDUCTOR_{name.upper()}" not in os.environ:
            settings.append((inductor, name, quiet))
    if device.type == "cuda":
        if hasattr(inductor, mixed := "triton.mix_order_reduction"):
            # It fuses both gradients of a trained norm only above some number of tokens. That becomes a guard, so that
            # smaller images cost a recompilation.
            settings.append((inductor, mixed, False))
        # Repeated dropout masks in fused random kernels, wrong in the recompute (pytorch#198333).
        recorded = args.compile_mode in RECORDED_MODES or getattr(args, "cuda_graphs", "false") != "false"
        aligned = hasattr(inductor, "align_random_eager") and not recorded
        if hasattr(inductor, "inductor_choices_class") and torch.version.hip is None:  # not measured on AMD's
            settings.append((inductor, "inductor_choices_class", make_row_choices))
        # PyTorch's own random kernels draw anew at each replay of a CUDA graph; inductor's would not.
        settings.append((inductor, "align_random_eager" if aligned else "fallback_random", True))
    return settings
