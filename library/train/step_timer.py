"""Where the time of a step goes: waiting for data, copying to the GPU to the device, computing.

On a GPU the moments are events in its own stream, so the answer is the GPU's and not that of the host, which runs
ahead; they are read when the numbers of the step have arrived anyway, and nothing waits for them.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class StepTimer:
    """Notes the moments of one step after the other."""

    device: torch.device
    _moments: list[Any] = field(default_factory=list)

    def waited(self, windows: Iterable[Any]) -> Iterator[Any]:
        """The same windows; a step begins where the next one is asked for."""
        rest = iter(windows)
        while True:
            self._moments = [self._now()]
            window = next(rest, None)
            if window is None:
                return
            self._moments.append(self._now())
            yield window

    def moved(self, batch: Any) -> Any:
        """The batch on the device."""
        self._moments.append(self._now())
        there = batch.to(self.device)
        self._moments.append(self._now())
        return there

    def ended(self) -> list[Any]:
        """The moments of the step that ends here, for `seconds`; empty where a part of it was not watched."""
        whole = len(self._moments) >= 2
        moments, self._moments = self._moments, []
        return [*moments, self._now()] if whole else []

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment


def seconds(moments: list[Any]) -> dict[str, float]:
    """Seconds of a step by where they went: data_s, transfer_s, compute_s. On a GPU, its moments must have passed."""
    if not moments:
        return {}
    begin, ready, *moves, end = moments
    data = _between(begin, ready)
    transfer = sum(_between(a, b) for a, b in zip(moves[::2], moves[1::2], strict=True))
    compute = max(0.0, _between(ready, end) - transfer)
    return {"data_s": round(data, 5), "transfer_s": round(transfer, 5), "compute_s": round(compute, 5)}


def _between(first: Any, second: Any) -> float:
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1000
