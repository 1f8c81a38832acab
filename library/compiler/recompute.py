"""Random numbers of checkpoints inside a CUDA graph: a block that is computed again draws what it drew at first.

Usually a checkpoint puts the generator back where the block began, which no graph can do. In a recording each block
that draws gets a state of the generator of its own instead. The graph of the backward pass reads it, and before each
replay it is set to where the block began in the forward pass. So the draws are those of a pass without recording.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


# Why: docs/decisions/2026-11-22-checkpoints-in-recordings.md
class RecomputeStates:
    """What the checkpoints of one recording draw. Calls of checkpoints are known by their order in the forward pass."""

    recording: ClassVar["RecomputeStates | None"] = None  # whose forward pass runs just now

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.cuda.default_generators[device.index or 0]
        self._capturing = False
        self._begin = self._calls = 0
        self._offsets: dict[int, int] = {}  # calls that draw -> where they begin, counted from the forward pass's begin
        self._states: dict[int, torch.Generator] = {}

    @contextlib.contextmanager
    def forward(self, capturing: bool = False) -> Iterator[None]:
        """Around a forward pass. Those that are not captured find out which checkpoints draw."""
        self._calls, self._capturing = 0, capturing
        if not capturing:
            self._begin = self._generator.get_offset()
        type(self).recording = self
        try:
            yield
        finally:
            type(self).recording = None

    def options(self, how: dict[str, Any]) -> dict[str, Any]:
        """Arguments for the checkpoint that is called now, instead of `how`."""
        call, self._calls = self._calls, self._calls + 1
        inner: Callable[[], Contexts] = how.get("context_fn", lambda: (contextlib.nullcontext(),) * 2)

        def contexts() -> Contexts:
            forward, again = inner()
            return _both(self._first_time(call), forward), _both(self._once_more(call), again)

        return {**how, "preserve_rng_state": False, "context_fn": contexts}

    def register(self, graph: "torch.cuda.CUDAGraph") -> None:
        """Before the backward pass is captured in this graph."""
        for call in self._offsets:
            self._states[call] = self._generator.clone_state()
            graph.register_generator_state(self._states[call])

    def rewind(self, seed: int, begin: int) -> None:
        """Before the backward pass is replayed: the generator had this seed and offset when the forward pass began."""
        for call, state in self._states.items():
            state.manual_seed(seed)
            state.set_offset(begin + self._offsets[call])

    @property
    def place(self) -> tuple[int, int]:
        """Seed and offset of the generator now."""
        return (self._generator.initial_seed(), self._generator.get_offset()) if self._states else (0, 0)

    @contextlib.contextmanager
    def _first_time(self, call: int) -> Iterator[None]:
        if self._capturing:
            yield
            return
        before = self._generator.get_offset()
        yield
        if self._generator.get_offset() != before:
            self._offsets[call] = before - self._begin

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
