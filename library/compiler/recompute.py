"""Random numbers of checkpoints in a CUDA graph: a recomputed block draws the same numbers again.

A checkpoint usually resets the generator to where the block began, which a graph cannot do. In a recording, each block
that draws has its own generator state instead. The backward graph reads it, and before each replay it is set to where
the block began in the forward pass. So the draws equal those of a pass without recording.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


# Saving and restoring the generator, as checkpoints do, cannot be captured in a CUDA graph.
# Why: docs/decisions/2026-11-22-checkpoints-in-recordings.md
class RecomputeStates:
    """Generator states of one recording's checkpoints, which are identified by their order in the forward pass."""

    recording: ClassVar["RecomputeStates | None"] = None  # the one whose forward pass is running

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.cuda.default_generators[device.index or 0]
        self._capturing = False
        self._begin = self._calls = 0
        self._offsets: dict[int, int] = {}  # calls that draw -> where they begin, counted from the forward pass's begin
        self._states: dict[int, torch.Generator] = {}

    @contextlib.contextmanager
    def forward(self, capturing: bool = False) -> Iterator[None]:
        """Wrap a forward pass. Passes that are not captured detect which checkpoints draw."""
        self._calls, self._capturing = 0, capturing
        if not capturing:
            self._begin = self._generator.get_offset()
        type(self).recording = self
        try:
            yield
        finally:
            type(self).recording = None

    def options(self, how: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for the checkpoint being called, derived from `how`."""
        call, self._calls = self._calls, self._calls + 1
        inner: Callable[[], Contexts] = how.get("context_fn", lambda: (contextlib.nullcontext(),) * 2)

        def contexts() -> Contexts:
            forward, recompute = inner()
            return _both(self._first_time(call), forward), _both(self._once_more(call), recompute)

        return {**how, "preserve_rng_state": False, "context_fn": contexts}

    def register(self, graph: "torch.cuda.CUDAGraph") -> None:
        """Register the generator states with the backward graph, before it is captured."""
        for call in self._offsets:
            self._states[call] = self._generator.clone_state()
            graph.register_generator_state(self._states[call])

    def rewind(self, seed: int, begin: int) -> None:
        """Before the backward graph is replayed, set the states; `seed` and `begin` were the generator's before the
        forward pass.
        """
        for call, state in self._states.items():
            state.manual_seed(seed)
            state.set_offset(begin + self._offsets[call])

    @property
    def place(self) -> tuple[int, int]:
        return (self._generator.initial_seed(), self._generator.get_offset()) if self._states else (0, 0)

    @contextlib.contextmanager
    def _first_time(self, call: int) -> Iterator[None]:
        if self._capturing:
            yield
            return
        offset = self._generator.get_offset()
        yield
        if self._generator.get_offset() != offset:
            self._offsets[call] = offset - self._begin

    @contextlib.contextmanager
    def _once_more(self, call: int) -> Iterator[None]:
        if call not in self._offsets:
            yield
        elif self._capturing:
            now = self._generator.graphsafe_get_state()
            self._generator.graphsafe_set_state(self._states[call])
            try:
                yield
            finally:
                self._generator.graphsafe_set_state(now)
        else:
            offset = self._generator.get_offset()
            self._generator.set_offset(self._begin + self._offsets[call])
            try:
                yield
            finally:
                self._generator.set_offset(offset)


@contextlib.contextmanager
def _both(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield
