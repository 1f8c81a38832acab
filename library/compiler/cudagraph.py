"""CUDA graphs of a whole denoiser: forward and backward are recorded once per size and replayed.

With a small batch a fast GPU waits for the processor, which launches some 10,000 kernels in a step of SDXL. PyTorch's
own recordings (`reduce-overhead` of inductor) belong to each compiled block and are repeated whenever a graph is called
with the weights of another block, so blocks that share graphs never stop recording. Here the whole denoiser is one
recording, compiled or not.

A recording reads and writes fixed addresses: inputs are copied into its buffers, weights must not move, and gradients
go to buffers shared by all sizes. Passes without gradients, eager steps for comparison, and a second forward pass
before the backward pass of the first are not recorded. If recording fails or runs out of memory, all recordings are
freed and the training continues without.
"""

import gc
import logging
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from library.compiler import flat_memory, gpu_memory, torch_private
from library.compiler.graph_memory import GraphMemory
from library.compiler.graph_recording import Call, Recording, casts_included
from library.compiler.pass_recording import recorded_passes_of
from library.compiler.plan import CompilePlan, PlanState
from library.compiler.subclass import RECORDED_AS_GRAPHS, keep_class_name
from library.compiler.torch_private import pytree

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Eager passes before the first recording: the first compiles and allocates, the second is timed. Further sizes need one
# pass, which chooses their kernels.
WARMUP_PASSES, PASSES_OF_OTHER_SIZES = 2, 1
MAX_SIZES = 64  # recorded sizes; others run eagerly
MAX_REPLAY_SHARE = 0.97  # with cuda_graphs = auto, record only if a replay takes at most this share of an eager pass
BEYOND_LIMIT = "they would take more of the GPU's memory than gpu_memory_limit allows"
NO_ROOM_FOR_OPTIMIZER = "they would leave too little of the GPU's memory for the optimizer"
SPARE_BYTES = 2**29  # share of the GPU's memory left for everything outside recordings


def leave_default_stream() -> None:
    """Switch this thread to another CUDA stream. Call it before any gradient exists."""
    # The default stream cannot be captured. Autograd binds the gradients of weights to the stream on which they are
    # first accumulated: by DDP before the first step, or by eager steps.
    if torch.cuda.is_available() and torch.cuda.current_stream() == torch.cuda.default_stream():
        torch.cuda.synchronize()
        torch.cuda.set_stream(torch.cuda.Stream())


# Inductor records per compiled block and again for each block that shares it: a FLUX.1 step took 17 s (H200).
# Why: docs/decisions/2026-11-22-cuda-graphs-of-the-whole-denoiser.md
def record_denoiser_calls(denoiser: nn.Module, plan: CompilePlan, reserve: int | None = None) -> None:
    """Record every call of a denoiser that needs gradients, once per size, and replay it afterwards.

    With a `reserve` (bytes for the optimizer's states), record only while that much memory stays free and a replay is
    faster.
    """
    leave_default_stream()
    denoiser.__dict__["_recorder"] = GraphedModel(denoiser, plan, reserve)
    denoiser.__class__ = _recorded(type(denoiser))


def recorder_of(denoiser: nn.Module) -> "GraphedModel | None":
    return vars(denoiser).get("_recorder")


def with_room(denoiser: nn.Module, call: Callable[[], T]) -> T:
    """Return the result of `call`. If it runs out of GPU memory, free all recordings of the denoiser and call it again;
    they are made again later. Without recordings lift gpu_memory_limit.
    """
    recorder, passes = recorder_of(denoiser), recorded_passes_of(denoiser)
    while True:
        try:
            return call()
        except torch.OutOfMemoryError:
            recorded = bool(recorder and recorder.recordings), bool(passes and passes.recordings)
            if not any(recorded) and not lift_memory_limit(recorder):
                raise
        # Outside the handler, whose error keeps tensors alive.
        if passes and recorded[1]:
            passes.free()
        if recorder and recorded[0]:
            recorder.make_room()


def lift_memory_limit(recorder: "GraphedModel | None") -> bool:
    """Lift gpu_memory_limit, so that what did not fit within it may be recorded; return whether there was a limit."""
    lifted = gpu_memory.lift()
    if lifted and recorder and recorder.lacks_memory:
        recorder.begin_again()
    return lifted


def peak(device: torch.device) -> int:
    """Return peak bytes of tensors on a GPU, or if more, the current bytes with those that recordings keep between
    steps.
    """
    # The two are not added: the peak comes from passes before a recording, which then takes over their memory.
    segments = (s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] != (0, 0))
    idle_bytes = sum(s["total_size"] - s["allocated_size"] for s in segments if s["device"] == (device.index or 0))
    return max(torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device) + idle_bytes)


def _recorded(cls: type[nn.Module]) -> type[nn.Module]:
    class Recorded(cls):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            recorder = self.__dict__.get("_recorder")
            if recorder is None or not torch.is_grad_enabled() or recorder.plan.measuring:
                return super().__call__(*args, **kwargs)
            # Even if recording has ended: compiled graphs depend on autocast's settings, which must not change.
            with casts_included():
                return recorder(super().__call__, args, kwargs)

    return keep_class_name(Recorded, cls, RECORDED_AS_GRAPHS)


@dataclass(frozen=True, slots=True)
class NotRecorded:
    """Why a size was not recorded. `expected`: by decision, not by failure."""

    why: str
    out_of_memory: bool = False
    lacks_memory: bool = False  # more GPU memory would have helped
    expected: bool = False


class GraphedModel:
    """The recordings of one denoiser. They share a memory pool, as only one is replayed at a time."""

    def __init__(self, denoiser: nn.Module, plan: CompilePlan, reserve: int | None = None) -> None:
        self.plan = plan
        self.denoiser: Callable[[], Any] = weakref.ref(denoiser)
        self.recordings: dict[Hashable, Recording] = {}
        self.trained: list[nn.Parameter] = []
        self.gradients: list[Tensor] = []  # of the trained parameters; recordings write them
        self.size_limit = MAX_SIZES
        self.why_not = ""  # why recording has ended
        self.recording_seconds = 0.0  # spent so far, including failed attempts
        self.lacks_memory = False  # whether a lack of GPU memory ended it, of which other steps may need less
        # Frees optional other users of GPU memory; returns False if there are none.
        self.free_others: Callable[[], bool] = lambda: False
        self.automatic = reserve is not None
        self._reserve, self._paid = reserve, False
        self._memory: GraphMemory | None = None
        self._busy: Callable[[], Any] = lambda: None  # tells whether a forward pass waits for its backward pass

    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the denoiser's output, replayed if a recording for these inputs exists or can be made."""
        if self.why_not:
            return call(*args, **kwargs)
        flattened = Call.of(args, kwargs)
        # A second forward pass before the backward pass of the first would overwrite its buffers.
        if self._busy() is not None or any(t.device.type != "cuda" for t in flattened.tensors):
            return call(*args, **kwargs)
        recording = self.recordings.get(flattened.key) or self.record(call, flattened)
        if recording and [p.data_ptr() for p in self.trained] != recording.addresses:
            recording = self.give_up("weights have moved since they were recorded")
        if recording is None:
            return call(*args, **kwargs)
        in_flight = _InFlight(recording, self)
        self._busy = weakref.ref(in_flight)
        learned = [t for t in (*flattened.tensors, *self.trained) if t.requires_grad]
        outputs = _Replay.apply(in_flight, flattened.tensors, *learned)
        return pytree.tree_unflatten(list(outputs), recording.tree)

    def end_pass(self) -> None:
        self._busy = lambda: None

    def drop_reserve(self) -> None:
        # The optimizer has allocated its states, so no reserve is needed any more.
        self._reserve = self._reserve and 0

    def keep_gradients(self) -> None:
        """Copy gradients out of the shared buffers, before the next replay overwrites them."""
        pairs = zip(self.trained, self.gradients, strict=True)
        # After the first replay of a step the gradient is the shared buffer itself.
        held = [(p, to) for p, to in pairs if p.grad is not None and p.grad.data_ptr() == to.data_ptr()]
        copies = flat_memory.like([gradient for _, gradient in held])
        flat_memory.copy_(copies, [gradient for _, gradient in held])
        for (p, _), gradient in zip(held, copies, strict=True):
            p.grad = gradient

    def record(self, call: Callable[..., Any], flattened: Call) -> Recording | None:
        """Record a size. Return None if it has to run eagerly, because of the size limit or of GPU memory.

        Random generators keep their state.
        """
        if len(self.recordings) >= self.size_limit:
            return None
        began, others = time.perf_counter(), len(self.recordings)
        outcome = self._try_to_record(call, flattened)
        while isinstance(outcome, NotRecorded) and outcome.lacks_memory and self.free_others():
            self._release(self.size_limit)
            outcome = self._try_to_record(call, flattened)
        if isinstance(outcome, NotRecorded) and outcome.out_of_memory and self._is_larger_than_others(flattened):
            # Nothing that smaller sizes have allocated is large enough for this one, but they fit into its memory.
            self._release(self.size_limit)
            outcome = self._try_to_record(call, flattened)
        shape, took = flattened.shape, time.perf_counter() - began
        self.recording_seconds += took
        if isinstance(outcome, Recording):
            self.recordings[flattened.key] = outcome
            logger.info("Recorded CUDA graphs for inputs of %s in %.1f s%s", shape, took, outcome.pace)
            return outcome
        if outcome.out_of_memory and others:
            # Eager steps need memory besides the recordings, so keep at most half as many from now on.
            self._release(others // 2)
            problem = "CUDA graphs for inputs of %s do not fit into the GPU's memory beside those of other image sizes"
            logger.warning(
                f"{problem}: from now on %d sizes are recorded, the others train slower", shape, self.size_limit
            )
            return None
        self.lacks_memory = outcome.lacks_memory
        return self.give_up(outcome.why, expected=outcome.expected)

    def _is_larger_than_others(self, call: Call) -> bool:
        """Return whether there are recordings, all of smaller inputs than those of a call."""
        return bool(self.recordings) and all(
            call.elements > recording.elements for recording in self.recordings.values()
        )

    def _try_to_record(self, call: Callable[..., Any], flattened: Call) -> "Recording | NotRecorded":
        rng_states = torch.get_rng_state(), torch.cuda.get_rng_state()
        try:
            if self._memory is None:
                self.trained = [p for p in self.denoiser().parameters() if p.requires_grad]
                self.gradients = flat_memory.like(self.trained)
                self._memory = GraphMemory()
            passes = PASSES_OF_OTHER_SIZES if self.recordings else WARMUP_PASSES
            recording = Recording(call, flattened, self.trained, self._memory, passes)
            if why := recording.capture(self.trained, self.gradients, self._memory):
                return NotRecorded(why)
            return self._not_worth_it(recording) or recording
        except torch.OutOfMemoryError:
            pass  # its traceback holds the allocated tensors, so the refusal is created outside this handler
        finally:
            torch.set_rng_state(rng_states[0])
            torch.cuda.set_rng_state(rng_states[1])
        # Returning from here releases what the failed attempt allocated, as no name holds it any more.
        why = f"the GPU's memory is too small for those of inputs of {flattened.shape}"
        return NotRecorded(why, out_of_memory=True, lacks_memory=True)

    def _not_worth_it(self, recording: Recording) -> "NotRecorded | None":
        """Return why an automatic recording (cuda_graphs = auto) is not worth its memory; None if it is."""
        if self._reserve is None and not gpu_memory.is_held():
            return None
        torch.cuda.empty_cache()
        if gpu_memory.free_memory() < (0 if self._reserve is None else SPARE_BYTES + self._reserve):
            # Sizes that are recorded already keep half of their number, as where memory runs out.
            why = BEYOND_LIMIT if gpu_memory.is_held() else NO_ROOM_FOR_OPTIMIZER
            return NotRecorded(why, out_of_memory=gpu_memory.is_held(), lacks_memory=True, expected=True)
        if self._reserve is None:
            return None
        if not self._paid and recording.time() > MAX_REPLAY_SHARE * recording.before:
            why = f"a pass takes {recording.before:.3f} s without them, and {recording.seconds:.3f} s with them"
            return NotRecorded(why, expected=True)
        self._paid = True
        return None

    def give_up(self, why: str, expected: bool = False) -> None:
        """Free all recordings and stop recording; `expected` if that is a decision, not a failure."""
        self._release(0)
        self.why_not = why
        if self.lacks_memory and self.plan.state is PlanState.EAGER:  # compiled blocks need less memory
            logger.info("CUDA graphs are not recorded for steps without compiled blocks: %s", why)
            return
        level = logging.INFO if expected else logging.WARNING
        logger.log(level, "CUDA graphs are no longer recorded: %s", why)

    def make_room(self) -> None:
        """Free all recordings to release memory. Sizes are recorded again when they next occur."""
        self.free_others()
        logger.warning("Freed the CUDA graphs, as other work needs their memory; they are recorded again later")
        self.forget()

    def forget(self) -> None:
        if self.recordings:
            self._release(self.size_limit)

    def begin_again(self) -> None:
        """Free all recordings and reset all decisions, before steps with other settings."""
        if self.why_not:
            logger.info("Trying CUDA graphs again, as the next steps may need less memory")
        self.why_not, self.lacks_memory, self._paid = "", False, False
        self._release(MAX_SIZES)

    def _release(self, size_limit: int) -> None:
        self.size_limit = size_limit
        self.recordings.clear()
        # The graphs' memory returns to the GPU only when nothing refers to their pool any more.
        self.trained, self.gradients, self._memory = [], [], None
        gc.collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True, eq=False)
class _InFlight:
    """Held by the autograd graph while the backward pass of a forward pass may still run."""

    recording: Recording
    recorder: GraphedModel


class _Replay(torch.autograd.Function):
    """Replay a recording: inputs and trained parameters -> outputs; backward returns their gradients."""

    @staticmethod
    def forward(ctx: Any, in_flight: _InFlight, tensors: Sequence[Tensor], *learned: Tensor) -> tuple[Tensor, ...]:
        ctx.in_flight, recording = in_flight, in_flight.recording
        ctx.place = recording.states.place
        torch_private.foreach_copy_(recording.inputs, [t.detach() for t in tensors])
        recording.forward.replay()
        # The next replay overwrites the recording's own outputs.
        outputs = tuple(output.clone() for output in recording.outputs)
        ctx.mark_non_differentiable(*(out for out, grad in zip(outputs, recording.needs_grad, strict=True) if not grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        in_flight, ctx.in_flight = ctx.in_flight, None
        recording, recorder = in_flight.recording, in_flight.recorder
        recorder.keep_gradients()
        grad_outputs = [g for g, grad in zip(gradients, recording.needs_grad, strict=True) if grad]
        torch_private.foreach_copy_(recording.grad_outputs, grad_outputs)
        recording.states.rewind(*ctx.place)
        recording.backward.replay()
        recorder.end_pass()
        weights = [g.detach() if does else None for g, does in zip(recorder.gradients, recording.has_grad, strict=True)]
        return None, None, *(None if g is None else g.clone() for g in recording.grad_inputs), *weights
