"""Sum up a profiler's table per step: shares of the kinds of operations, launches, waits, copies and casts.

Loads no torch, so that tests can pass invented tables.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from library.config.json_types import JsonObject

MAX_OPERATIONS_SHOWN = 25  # operations in the result
# Kinds of operations by name, of the host's (aten::) and of the device's kernels; the first that fits counts.
KINDS: tuple[tuple[str, str], ...] = (
    ("bookkeeping", r"^autograd::|AccumulateGrad|Backward\d+$"),
    ("matrix products", r"triton_(tem|mm)"),
    ("compiled kernels", r"triton_|compiled|inductor|cpp_fused|graph_\d"),
    (
        "copies",
        r"memcpy|memset|aten::(copy_|_to_copy|clone|contiguous|pin_memory)|copy_kernel|nchwtonhwc|nhwctonchw",
    ),
    ("attention", r"scaled_dot_product|sdpa|flash|fmha|attention|attn"),
    ("convolution", r"conv(?!ert)|winograd|implicit_gemm|fprop|dgrad|wgrad"),
    ("optimizer", r"optimizer|multi_tensor|_fused_adam|_foreach|fused_adam"),
    (
        "matrix products",
        r"gemm|gemv|aten::(add|b|badd)?b?mm\b|aten::(linear|matmul|dot|mv|addmv)\b|mkl\w*::_?\w*linear|cutlass|cublas|"
        r"nvjet|scaled_mm|splitk",
    ),
    (
        "norms and reductions",
        r"norm|reduce|softmax|rowwisemoments|gammabeta|fusedparams|internalgradients|aten::(sum|mean|var|std|amax|max\b)",
    ),
    (
        "elementwise",
        r"elementwise|catarray|upsample|aten::(add|mul|sub|rsub|div|silu|gelu|neg|exp|erf|sigmoid|tanh|relu|leaky_relu|"
        r"threshold|cat|stack|where|fill_|zero_|sqrt|pow|cos|sin|abs|sign|log|reciprocal|round|floor|maximum|minimum|(eq|ne|lt|le|gt|ge)\b|"
        r"rsqrt|square|clamp|lerp|index|gather|scatter|roll|flip|normal_|randn?|upsample)",
    ),
    ("bookkeeping", r"aten::"),
)
LAUNCHES = r"cu(da)?LaunchKernel|cudaGraphLaunch"
SYNCS = r"cuda(Stream|Device|Event)Synchronize|cuStreamSynchronize"
READS = r"aten::_local_scalar_dense"
NOT_WORK = r"^(ProfilerStep|cudaDeviceGetAttribute|Activity Buffer|Lazy Function)|\[memory\]"
CASTS = r"aten::_to_copy"


@dataclass(frozen=True)
class ProfileRow:
    """One operation of the profiler's table: calls and microseconds over all steps, on the device or on the host."""

    name: str
    count: int
    us: float
    on_device: bool = False


def kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.I)), "other")


def summary(rows: Iterable[ProfileRow], steps: int, step_ms: float, device: str) -> JsonObject:
    """Sum up a profiler's table per step: shares by kind, the longest operations, launches, syncs, copies and casts.

    `step_ms` is the time of a step without the profiler. On a GPU shares are of the time in which it works, and the
    rest of the step is idle; on a CPU they are of the host's time.
    """
    all_rows = [row for row in rows if not re.search(NOT_WORK, row.name)]
    sees_gpu = device == "cuda" and any(row.on_device for row in all_rows)
    working = [row for row in all_rows if row.on_device == sees_gpu]
    total = sum(row.us for row in working) or 1.0
    kinds: dict[str, float] = defaultdict(float)
    for row in working:
        kinds[kind(row.name)] += row.us
    busy = total / 1000 / steps
    # The profiler's own waiting at its end is not a step's.
    syncs = max(_count(all_rows, SYNCS) - 1, 0) // steps
    operations = [
        {
            "name": row.name[:120],
            "kind": kind(row.name),
            "calls": round(row.count / steps, 1),
            "ms": round(row.us / 1000 / steps, 4),
            "share": round(row.us / total, 4),
        }
        for row in sorted(working, key=lambda r: -r.us)[:MAX_OPERATIONS_SHOWN]
    ]
    return {
        "steps": steps,
        "step_ms": round(step_ms, 3),
        "busy_ms": round(busy, 3),
        "idle": round(max(0.0, 1 - busy / step_ms), 4) if sees_gpu and step_ms else None,
        "blind": device == "cuda" and not sees_gpu,  # the profiler had no access to the GPU
        "kinds": {name: round(us / total, 4) for name, us in sorted(kinds.items(), key=lambda k: -k[1])},
        "operations": operations,
        "launches": _count(all_rows, LAUNCHES) // steps,
        "syncs": syncs,
        # Each waits for the GPU; others read values on the host, such as an optimizer's step count.
        "reads": min(_count(all_rows, READS) // steps, syncs),
        "casts": _count(all_rows, CASTS) // steps,
        "copies": {
            way: _copies(working, pattern, steps, total)
            for way, pattern in (("to device", "HtoD"), ("to host", "DtoH"), ("within", "DtoD|aten::copy_|copy_kernel"))
        },
    }


def _count(rows: Iterable[ProfileRow], pattern: str) -> int:
    return sum(row.count for row in rows if re.search(pattern, row.name))


def _copies(rows: Iterable[ProfileRow], pattern: str, steps: int, total: float) -> dict[str, float]:
    matching = [row for row in rows if re.search(pattern, row.name)]
    spent = sum(row.us for row in matching)
    return {
        "calls": sum(row.count for row in matching) // steps,
        "ms": round(spent / 1000 / steps, 4),
        "share": round(spent / total, 4),
    }
