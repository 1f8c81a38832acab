"""Time and peak memory of a call in its steady state."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from library.compiler import blocks, cudagraph
from library.config.json_types import JsonObject
from library.config.problems import ConfigError
from library.measuring.result import OUT_OF_MEMORY

BYTES_PER_GIB = 2**30
MATRICES = {"cuda": (4096, 8192), "cpu": (512, 1024)}  # sides of the square matrices that `matmul_rate` multiplies
RATE_SECONDS = 0.4  # for each of them
MIN_REPETITIONS = 3  # measured repetitions at least
SETTLED = 1.15  # warm-up continues while a repetition is faster than the previous one by more than this


@dataclass(frozen=True)
class TimingPlan:
    """Numbers of repetitions, and a time limit."""

    steps: int = 20  # measured repetitions
    warmup: int = 3  # repetitions before them, at least
    seconds: float = 30.0  # for the measured ones, at most


@dataclass(frozen=True)
class Timing:
    """Milliseconds of each repetition, seconds of warm-up, and peak memory."""

    each: tuple[float, ...]
    warmup_seconds: float
    peak_gb: float

    @property
    def p50(self) -> float:
        return statistics.median(self.each)

    @property
    def p90(self) -> float:
        return sorted(self.each)[max(0, math.ceil(0.9 * len(self.each)) - 1)]

    def facts(self) -> JsonObject:
        """Return the times for the result file: milliseconds, seconds of warm-up, GiB."""
        return {
            "ms": {"p50": round(self.p50, 3), "p90": round(self.p90, 3), "min": round(min(self.each), 3)},
            "repetitions": len(self.each),
            "warmup_seconds": round(self.warmup_seconds, 2),
            "peak_gb": round(self.peak_gb, 3),
        }


def measure_call(call: Callable[[], Any], device: torch.device, plan: TimingPlan) -> Timing:
    """Warm up until the time is steady, then measure. Raises what `call` raises."""
    began = time.perf_counter()
    took, last = 0.0, math.inf
    for number in range(plan.warmup * 3):  # at most three times as many, should times keep falling
        took = time_call(call, device)
        if number + 1 >= plan.warmup and took > last / SETTLED:
            break
        last = took
    warmed = time.perf_counter() - began
    if device.type == "cuda":  # the allocator's cache stays, or the first repetition would allocate again
        torch.cuda.reset_peak_memory_stats(device)
    number = min(plan.steps, max(MIN_REPETITIONS, int(plan.seconds / max(took, 1e-9))))
    each, peak = (_on_gpu if device.type == "cuda" else _on_cpu)(call, device, number)
    return Timing(tuple(each), warmed, peak)


def time_call(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call, until the device has finished."""
    wait(device)
    began = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - began


def measuring_failure(error: Exception) -> str:
    """Return why something could not be measured, in one line."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return OUT_OF_MEMORY[0]
    if isinstance(error, ConfigError):
        return " ".join(str(error).splitlines())
    kind = "" if blocks.is_compile_error(error) else f"{type(error).__name__}: "
    return f"{kind}{blocks.compile_error_cause(error)}"


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Release unreferenced memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _on_gpu(call: Callable[[], Any], device: torch.device, number: int) -> tuple[list[float], float]:
    """Time with CUDA events that are read at the end: waiting after each call would add pauses of the host."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    milliseconds = [before.elapsed_time(after) for before, after in zip(events, events[1:], strict=False)]
    return milliseconds, cudagraph.peak(device) / BYTES_PER_GIB


def _on_cpu(call: Callable[[], Any], device: torch.device, number: int) -> tuple[list[float], float]:
    each, peak, process = [], 0, psutil.Process()
    for _ in range(number):
        each.append(time_call(call, device) * 1000)
        peak = max(peak, process.memory_info().rss)
    return each, peak / BYTES_PER_GIB


def measure_passes(
    passes: Iterable[tuple[Callable[[], Any], float]], repeats: int, device: torch.device
) -> tuple[float, float, float]:
    """Time passes over batches of several sizes, each weighted by its share of all batches.

    Returns the seconds of a steady pass (mean over sizes), the extra seconds of the first passes (compiling), and the
    peak of GPU memory in GiB, 0 without a GPU.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    extra, steady = 0.0, 0.0
    for call, share in passes:
        times = [time_call(call, device) for _ in range(1 + repeats)]
        usual = statistics.median(times[1:])
        extra += times[0] - usual
        steady += usual * share
    return steady, max(extra, 0.0), cudagraph.peak(device) / BYTES_PER_GIB if device.type == "cuda" else 0.0


def matmul_rate(on: torch.device, dtype: torch.dtype) -> JsonObject:
    """Return the best rate of plain matrix products of this type in TFLOP/s, the reference for utilization."""
    best: JsonObject = {"dtype": str(dtype).removeprefix("torch."), "tflops": 0.0, "size": 0}
    for size in MATRICES[on.type]:
        a, b = (torch.randn(size, size, device=on, dtype=dtype) for _ in range(2))
        plan = TimingPlan(steps=2000, seconds=RATE_SECONDS)
        # A product has 2 n^3 operations; from milliseconds to TFLOP/s.
        rate = 2 * size**3 / measure_call(lambda a=a, b=b: torch.mm(a, b), on, plan).p50 / 1e9
        if rate > best["tflops"]:
            best |= {"tflops": round(rate, 3 if rate < 10 else 1), "size": size}
    return best
