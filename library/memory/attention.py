"""The order of PyTorch's attention kernels, which of them support a model's calls, and two related switches.

PyTorch selects a kernel at every eager call of scaled_dot_product_attention, and in compiled code once, at compile
time. So the order is set for the whole process, before anything is compiled.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from library import packages
from library.compiler import torch_private
from library.compiler.subclass import wanted_type
from library.config.problems import ConfigError, Problem
from library.families.shared.attention import replace_masks
from library.memory import padded_attention

KERNELS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
# Newer flash attention that replaces PyTorch's own, and its name there.
NEWER_FLASH = {"flash3": "FA3", "flash4": "FA4"}
# 24 heads of 128 over 4608 tokens on an H200, both passes: cuDNN 1.7 ms, flash 3.3 ms, memory-efficient 6.7 ms.
# Why: docs/decisions/2026-11-20-cudnn-attention-on-9-0.md
# By compute capability, from the fastest kernel in training to the one that always works. cuDNN's was measured
# 1.7 to 2.3 times as fast as flash attention on Hopper, and slower on Ampere and on RTX PRO cards
# (huggingface/transformers#48163), so all others keep PyTorch's own order.
ORDERS: dict[tuple[int, int], tuple[str, ...]] = {(9, 0): ("cudnn", "flash", "efficient", "math")}
# Kernels that can leave out padding without a mask. Memory-efficient attention takes a mask at little cost.
# Why: docs/decisions/2026-11-29-padding-without-masks.md
UNMASKED = ("cudnn", "flash")
MIN_CUDNN = 90000  # versions before 9 had wrong gradients for some strides (pytorch#138581)
PADDED = (torch.ops.kohya.padded_scaled_dot_product, torch.ops.kohya.padded_scaled_dot_product.default)
PYTORCHS_ORDER = "PyTorch's order"
_chosen = contextlib.ExitStack()  # undoes `prefer`; global, as PyTorch's switches are


def prefer(device: torch.device, kernel: str = "auto", option: str = "attention_kernel") -> str:
    """Put a kernel first, with `auto` the fastest for this GPU; return its name for the run's record, "" for none.

    The others remain for shapes and masks that the first does not support. Raises ConfigError about `option`, which
    chose the kernel, if this machine lacks it. Lasts until the next call or the end of `keep_attention_settings`.
    """
    if problem := missing_kernel(device, kernel, option):
        raise ConfigError(problem)
    _chosen.close()
    _replace_flash(kernel, option, device)
    first = _set_order(device, kernel)
    if device.type == "cuda" and torch.cuda.is_available():
        _leave_out_masks(device)
    return first


def missing_kernel(device: torch.device, kernel: str, option: str = "attention_kernel") -> Problem | None:
    """Return the problem of an option that chooses a kernel which this machine lacks."""
    if kernel == "auto" or kernel in offered(device):
        return None
    choices = ", ".join(["auto", *offered(device)])
    template = ": there is no {kernel} on this machine; choose one of {known}"
    return packages.missing_kernel_package(option, kernel) or Problem(
        option, template, kernel=kernel, known=choices, fix={option: "auto"}
    )


def _set_order(device: torch.device, kernel: str) -> str:
    """Put a kernel first; return its name for the run's record, "" for none."""
    if device.type != "cuda":
        if kernel == "math":  # the CPU has flash attention and math, in this order
            _chosen.enter_context(sdpa_kernel(SDPBackend.MATH))
        return KERNELS.get(kernel, "")
    if kernel != "auto":
        order = ("flash" if kernel in NEWER_FLASH else kernel,)
    elif not (order := ORDERS.get(torch.cuda.get_device_capability(device), ()) if _has_cudnn() else ()):
        return PYTORCHS_ORDER
    if torch.cuda.is_available():
        # PyTorch sets its own order at the first call on a GPU, which would overwrite an earlier choice.
        tiny = torch.zeros(1, 1, 8, 64, dtype=torch.float16, device=device)
        F.scaled_dot_product_attention(tiny, tiny, tiny)
    first = [getattr(SDPBackend, KERNELS[name]) for name in order]
    # An order instead of a switch, as some calls fit only other kernels, such as the VAE's wide heads.
    # Why: docs/decisions/2026-11-20-attention-kernels-in-an-order.md
    remaining = [SDPBackend(number) for number in torch_private.sdp_priority_order() if SDPBackend(number) not in first]
    _chosen.enter_context(sdpa_kernel(first + remaining, set_priority=True))
    return kernel.upper() if kernel in NEWER_FLASH else KERNELS[order[0]]


def _leave_out_masks(device: torch.device) -> None:
    """Leave out padding without masks if the preferred kernel can."""
    call = torch.zeros(3, 1, 1, 8, padded_attention.LARGEST_HEAD, dtype=torch.float16, device=device)
    with warnings.catch_warnings(action="ignore"):
        first = torch_private.fused_sdp_choice(*call.requires_grad_())
    name = next((name for name in UNMASKED if getattr(SDPBackend, KERNELS[name]).value == first), "")
    if name and torch.version.hip is None:
        replace_masks(padded_attention.attention_by(name))
        _chosen.callback(replace_masks, None)


@contextlib.contextmanager
def keep_attention_settings() -> Iterator[None]:
    """Restore on exit whatever this module sets for the whole process."""
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        _chosen.close()
        _replace_flash("auto", "attention_kernel", torch.device("cpu"))
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark = benchmark


def _has_cudnn() -> bool:
    return (torch.backends.cudnn.version() or 0) >= MIN_CUDNN


def offered(device: torch.device) -> tuple[str, ...]:
    """Return the kernels that this machine may have, probably fastest first; an AttentionRecorder shows which support a
    model's calls.
    """
    if device.type == "cpu":
        return ("flash", "math")
    if device.type != "cuda":
        return ()
    newer = tuple(name for name in NEWER_FLASH if packages.has_kernel(name))
    return (*(name for name in KERNELS if name != "cudnn" or _has_cudnn()), *newer)


def _replace_flash(kernel: str, option: str, device: torch.device) -> None:
    """Replace PyTorch's flash attention by a newer one, or restore it. Raises ConfigError on failure."""
    current = torch.nn.attention.current_flash_attention_impl()
    implementation = NEWER_FLASH.get(kernel)
    if implementation == current:
        return
    if current:
        torch.nn.attention.restore_flash_attention_impl()
    if not implementation:
        return
    try:
        torch.nn.attention.activate_flash_attention_impl(implementation)
        _try_flash(device)
    except Exception as error:  # a package built for another GPU or PyTorch may raise anything
        if torch.nn.attention.current_flash_attention_impl():
            torch.nn.attention.restore_flash_attention_impl()
        raise ConfigError(
            Problem(option, ": {kernel} cannot be used here ({error}); use auto", kernel=kernel, error=error)
        ) from error


def _try_flash(device: torch.device) -> None:
    """Run both passes once: PyTorch may be unable to read the results of a package that can be imported.

    flash-attn-4 4.0.0b36 returns more of them than PyTorch 2.13 unpacks.
    """
    call = torch.zeros(3, 1, 1, 128, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        q, k, v = call
        F.scaled_dot_product_attention(q, k, v).sum().backward()


class AttentionRecorder(TorchFunctionMode):
    """Records for every attention call in its context which kernel PyTorch selects and which others support it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.usual: set[int] = set()  # the kernels that PyTorch selected
        self.able: set[str] = set()  # kernels that support some of the calls
        self.unable: dict[str, str] = {}  # kernels that support none so far, and why

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self._record(*args, **kwargs or {})
        elif func in PADDED:
            q, k, v = args[:3]
            self._record(q[:, : k.shape[1]], k, v)
        return func(*args, **kwargs or {})

    def others(self) -> list[str]:
        return [name for name in offered(self.device) if name in self.unable or self._changes(name)]

    def why_not(self, kernel: str | None) -> str:
        return "" if kernel in self.able else self.unable.get(kernel or "", "")

    def _changes(self, name: str) -> bool:
        newer = name in NEWER_FLASH
        number = int(getattr(SDPBackend, KERNELS["flash" if newer else name]))
        return name in self.able and (newer or self.usual != {number})

    def _record(self, *positional: Any, **keywords: Any) -> None:
        positional = tuple(map(_as_computed, positional))
        keywords = {name: _as_computed(value) for name, value in keywords.items()}
        self.usual.add(torch_private.fused_sdp_choice(*positional, **keywords))
        for name in offered(self.device):
            if name in self.able:  # one call suffices, and the check is not free
                continue
            backend = getattr(SDPBackend, KERNELS["flash" if name in NEWER_FLASH else name])
            if why := _refused(backend, positional, keywords):
                self.unable[name] = why
            else:
                self.able.add(name)
                self.unable.pop(name, None)


def _refused(kernel: SDPBackend, positional: Any, keywords: Any) -> str:
    """Return why a kernel does not support a call, "" if it does."""
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(kernel):
        warnings.simplefilter("always")
        try:
            if torch_private.fused_sdp_choice(*positional, **keywords) == kernel.value:
                return ""
        except RuntimeError as none_is_left:
            caught.append(warnings.WarningMessage(str(none_is_left), RuntimeWarning, "", 0))
    # PyTorch warns about all kernels at once; keep the lines about this one.
    lines = [str(warning.message).partition(" (Triggered")[0].strip() for warning in caught]
    reasons = [line for line in lines if not line.endswith("because:") and "disabled" not in line]
    return reasons[0] if reasons else "cannot compute the attention of this model"


def _as_computed(x: Any) -> Any:
    """Cast an attention input to the dtype in which autocast computes."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    return x.detach().to(wanted_type(x)).requires_grad_(x.requires_grad)


def switches(options: Any) -> None:
    torch.set_float32_matmul_precision("high" if options.cuda_allow_tf32 else "highest")
    torch.backends.cudnn.benchmark = options.cuda_cudnn_benchmark
