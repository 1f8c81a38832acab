"""Compile a training's graphs in several processes at once, before its first step.

PyTorch compiles the graphs of a process one after the other, and mostly in Python. Here processes take them from one
list, the training among them, which then reads what the others have compiled from the cache.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Sequence

import psutil
import torch
from torch import nn

from library.compiler import block_calls, cudagraph, gpu_memory, warm_cache
from library.compiler.block_calls import BlockCall, NotDescribed
from library.compiler.plan import CompilePlan
from library.config.compile_modes import tunes_kernels
from library.config.problems import Message, MessageLike
from library.config.run_config import RunConfig
from library.data.loading import Kind
from library.distributed.world import World
from library.train.compiling import background_estimate as estimate
from library.train.compiling.compile_process import CompileProcess, compile_job
from library.train.compiling.fingerprint import fingerprint_graphs
from library.train.compiling.trial_passes import TrialPasses
from library.train.journal import Journal

logger = logging.getLogger(__name__)

CORES_EACH = 2  # a process keeps one busy with Python, and parts of others with Triton
RAM_EACH = 3 * 2**30  # bytes of a process with its libraries and its part of Triton's processes
PATIENCE = 300.0  # seconds without a further graph, after which the rest is compiled here


# Why: docs/decisions/2026-11-30-graphs-side-by-side.md
class ParallelCompiler:
    """Fills the cache with the graphs of a training from several processes, if they are not there yet."""

    def __init__(self, config: RunConfig, world: World, journal: Journal, plan: CompilePlan) -> None:
        self._config, self._world, self._journal, self._plan = config, world, journal, plan
        self._name = ""  # of these graphs, from `run` on

    def why_not(self) -> MessageLike:
        """Return why one process compiles all graphs, "" if several can."""
        options = self._config.compile
        if self._world.device.type != "cuda" or self._world.ranks > 1:
            return "several processes compile for one GPU alone"
        if options.backends != {"inductor"}:
            return "only inductor keeps what it compiles"
        if tunes_kernels(options):
            return "kernels are timed, which needs the whole GPU"
        if options.compile_from_step or options.compile_compare_steps:
            return "graphs are compiled in several steps"
        return options.why_not_elsewhere(self._config)

    def run(self, passes: TrialPasses, kind: Kind) -> None:
        """Compile the graphs of batches of this kind. Weights and random states do not change, and no block is left
        compiled: the next pass reads all graphs from the cache, and compiles what could not be compiled here.
        """
        if self.why_not():
            return
        self._name = fingerprint_graphs(self._config, self._world, passes.compute_loss, passes.batches)
        if warm_cache.is_warm(self._name):
            return
        self._plan.postpone()
        try:
            with passes.random_state_kept():
                self._compile(self._record_calls(passes, kind), passes)
        finally:
            self._plan.compile_all()

    def done(self) -> None:
        """Remember that the graphs are in the cache."""
        if self._name:
            warm_cache.note_warm(self._name)

    def _record_calls(self, passes: TrialPasses, kind: Kind) -> list[BlockCall]:
        """Return the block calls of an eager pass; none if it does not fit into the memory or cannot be described."""
        try:
            with passes.unrecorded(), block_calls.noted(passes.denoiser) as calls:
                passes.run_within_limit(kind)
        except (torch.OutOfMemoryError, NotDescribed) as error:
            logger.info("One process compiles all graphs: %s", str(error).partition("\n")[0])
            return []
        return slowest_first(calls, passes.denoiser)

    def _compile(self, calls: list[BlockCall], passes: TrialPasses) -> None:
        number = self._processes(calls, passes.denoiser)
        if number < 1:
            return
        began, waiting = time.perf_counter(), deque(range(len(calls)))
        method, encoders = passes.compute_loss.method, passes.compute_loss.components.encoders
        text_learns = any(map(method.trained_parts.get, encoders))
        job = compile_job(self._config, [*passes.batches.kinds()], text_learns, calls, self._world.device)
        threads = max((os.cpu_count() or 1) // (number + 1), 1)
        others: list[CompileProcess] = []
        try:
            others += [CompileProcess(job, waiting, threads) for _ in range(number)]
            own = self._take_part(calls, waiting, others, passes.denoiser)
            self._wait_for(others, own, len(calls))
        except Exception as error:  # the pass that follows meets it again, and says so
            logger.info("The rest is compiled by one process: %s", error)
        finally:
            for other in others:
                other.stop()
        ready, seconds = sum(other.compiled for other in others), time.perf_counter() - began
        self._journal.say(
            f"{number} processes beside this one compiled {ready} of {len(calls)} graphs in {seconds:.1f} s"
        )

    def _processes(self, calls: Sequence[BlockCall], denoiser: nn.Module) -> int:
        """Return how many processes beside this one have graphs to compile, processors and memory."""
        torch.cuda.empty_cache()
        weights = [sum(p.nbytes for p in denoiser.get_submodule(call.path).parameters()) for call in calls]
        inputs = [call.largest_tensor for call in calls]
        each = estimate.bytes_to_compile(zip(weights, inputs, strict=True)) if calls else 1.0
        left = gpu_memory.free_memory(self._world.device) - cudagraph.SPARE_BYTES - (each - estimate.CONTEXT_BYTES)
        return min(
            len(calls) - 1,
            (os.cpu_count() or 1) // CORES_EACH - 1,
            int(left // each),
            psutil.virtual_memory().available // RAM_EACH,
        )

    def _take_part(
        self, calls: Sequence[BlockCall], waiting: deque[int], others: Sequence[CompileProcess], denoiser: nn.Module
    ) -> int:
        """Compile graphs that no other process has taken yet; return how many."""
        own = 0
        while waiting:
            try:
                call = calls[waiting.popleft()]
            except IndexError:  # another process was faster
                break
            with self._plan.compiled_alone(denoiser.get_submodule(call.path)):
                block_calls.repeat(denoiser, call, self._world.device)
            own += 1
            self._report(others, own, len(calls))
        return own

    def _wait_for(self, others: Sequence[CompileProcess], own: int, total: int) -> None:
        last, ready = time.monotonic(), -1
        while not all([other.wait(0.1) for other in others]):
            if ready != (ready := sum(other.compiled for other in others)):
                last = time.monotonic()
                self._report(others, own, total)
            if time.monotonic() - last > PATIENCE:
                raise TimeoutError(f"the other processes compiled nothing for {PATIENCE:.0f} s")

    def _report(self, others: Sequence[CompileProcess], own: int, total: int) -> None:
        self._journal.phase(Message("compiling"), own + sum(other.compiled for other in others), total)


def slowest_first(calls: Sequence[BlockCall], denoiser: nn.Module) -> list[BlockCall]:
    """Sort calls by the time that their graphs take to compile, longest first, estimated by the layers of a block."""
    layers = {call: sum(1 for _ in denoiser.get_submodule(call.path).modules()) for call in calls}
    return sorted(calls, key=lambda call: -layers[call])
