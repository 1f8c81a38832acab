"""Prefetching, and functions applied to many items at once, on threads.

Threads instead of processes: decoding, resizing and reading release the GIL, nothing is copied or pickled, and Windows
needs no second start of Python and torch.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from library.config.problems import Message, Report

T = TypeVar("T")
R = TypeVar("R")

THREADS = 4  # enough to hide the latency of network drives; local reads are bound by the interpreter
SLICE = 256  # items per task: a task for each would cost more than many items do
NAMELESS = Message("")


def spread(
    work: Callable[[T], R], items: Sequence[T], report: Report | None = None, phase: Message = NAMELESS
) -> list[R]:
    """Apply a function to every item on several threads, and return the results in order."""

    def several(start: int) -> list[R]:
        return [work(item) for item in items[start : start + SLICE]]

    done: list[R] = []
    for results in ahead(several, range(0, len(items), SLICE), THREADS if len(items) > SLICE else 0):
        done.extend(results)
        if report:
            report(phase, len(done), len(items))
    return done


def ahead(
    work: Callable[[T], R], items: Iterable[T], workers: int, depth: int = 0, pool: ThreadPoolExecutor | None = None
) -> Iterator[R]:
    """Yield work(item) for each item in order, computing up to `depth` (or 2 per worker) of them ahead.

    With 0 workers the work runs on the caller's thread. A passed pool is left running.
    """
    if workers <= 0:
        yield from map(work, items)
        return
    executor = pool or ThreadPoolExecutor(workers)
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(executor.submit(work, item))
            if len(waiting) >= (depth or 2 * workers):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        if pool is None:
            executor.shutdown(wait=True, cancel_futures=True)


def num_workers(requested: int) -> int:
    return max(0, min(requested, os.cpu_count() or 1))
