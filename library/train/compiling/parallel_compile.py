"""Compile a training's graphs in several processes at once, before its first step.

PyTorch compiles the graphs of a process one after the other, and mostly in Python. Here processes take them from one
list, the training among them, which loads what the others have compiled from the cache meanwhile.
"""

import logging
import time
from collections.abc import Collection, Sequence

import torch
from torch import nn

from library import families
from library.compiler import block_calls, cache, cudagraph, gpu_memory
from library.compiler.block_calls import BlockCall, NotDescribed
from library.compiler.plan import CompilePlan
from library.config.compile_modes import tunes_kernels
from library.config.problems import Message, MessageLike, counted
from library.config.run_config import RunConfig
from library.data.loading import Kind
from library.distributed.world import World
from library.train.compiling import background_estimate as estimate
from library.train.compiling.compile_process import CompileProcesses, compile_job, compile_settings
from library.train.compiling.fingerprint import fingerprint_settings
from library.train.compiling.process_room import most_processes, processes_in_memory
from library.train.compiling.trial_passes import TrialPasses
from library.train.journal import Journal

logger = logging.getLogger(__name__)

GRAPH_TIMEOUT = 300.0  # seconds without a further graph, after which the rest is compiled here
PAUSE = 0.05  # seconds between two polls for graphs that others have compiled


# Why: docs/decisions/2026-11-30-graphs-side-by-side.md
class ParallelCompiler:
    """Fills the cache with the graphs of a training from several processes, if they are not there yet.

    The processes start with the training, so that they have imported the compiler when its model is loaded.
    """

    def __init__(self, world: World, journal: Journal) -> None:
        self._world, self._journal = world, journal
        self._others = CompileProcesses(waited_for=True)
        self._name = ""  # of the settings, from `begin` on

    def __enter__(self) -> "ParallelCompiler":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def begin(self, config: RunConfig, kinds: Collection[Kind]) -> None:
        """Start the processes if the cache lacks the graphs that this config compiles before its first step, for
        batches of these kinds.
        """
        if not config.compile.compile:
            return
        if why := self.why_not(config):
            logger.debug("One process compiles all graphs: %s", why)
            return
        self._name = fingerprint_settings(config, self._world, kinds)
        if cache.is_warm(self._name):
            return
        try:
            self._others.add(most_processes(families.compiling_cost(config)[0]))
        except OSError as error:
            logger.info("A process to compile in could not be started: %s", error)
        self._others.prepare(compile_settings(config, self._world.device))

    def why_not(self, config: RunConfig) -> MessageLike:
        """Return why one process compiles all graphs, "" if several can."""
        options = config.compile
        if self._world.device.type != "cuda" or self._world.ranks > 1:
            return "several processes compile for one GPU alone"
        if not options.ahead:
            return "graphs are compiled in the steps that need them"
        unrecorded = options.compile_warmup == "auto" and options.why_not_recorded(config)
        if not (unrecorded or options.why_not_in_background(config)):
            return "one may compile beside the first steps"
        if cache.is_off():
            return "the cache of graphs is off"
        if options.backends != {"inductor"}:
            return "only inductor keeps what it compiles"
        if options.compile_autotune or tunes_kernels(options):
            return "kernels are timed, which needs the whole GPU"
        if options.compile_from_step or options.compile_compare_steps:
            return "graphs are compiled in several steps"
        return options.why_not_elsewhere(config)

    def run(self, config: RunConfig, plan: CompilePlan, passes: TrialPasses, kind: Kind) -> None:
        """Compile and load the graphs of batches of this kind. Weights and random states do not change, and no block is
        left compiled: the next pass finds all graphs, and compiles any that failed here.
        """
        if not self._others:
            return
        plan.postpone()
        try:
            with passes.random_state_kept():
                self._compile(self._record_calls(passes, kind), config, plan, passes)
        except Exception as error:  # the following pass raises it again and reports it
            logger.info("One process compiles the rest: %s", str(error).partition("\n")[0])
        finally:
            self.stop()
            plan.compile_all()

    def done(self) -> None:
        """Remember that the graphs are in the cache."""
        if self._name:
            cache.note_warm(self._name)

    def stop(self) -> None:
        self._others.stop()
        self._others.keep(0)

    def _record_calls(self, passes: TrialPasses, kind: Kind) -> list[BlockCall]:
        """Return the block calls of an eager pass; none if it does not fit into the memory or cannot be described."""
        try:
            with passes.unrecorded(), block_calls.noted(passes.denoiser) as calls:
                passes.run_within_limit(kind)
        except (torch.OutOfMemoryError, NotDescribed) as error:
            logger.info("One process compiles all graphs: %s", str(error).partition("\n")[0])
            return []
        return slowest_first(calls, passes.denoiser)

    def _compile(self, calls: list[BlockCall], config: RunConfig, plan: CompilePlan, passes: TrialPasses) -> None:
        number = self._number_with_room(calls, passes.denoiser)
        if number < 1:
            return
        self._others.keep(number)
        began = time.perf_counter()
        self._others.start(
            compile_job(config, [*passes.batches.kinds()], passes.text_learns, calls, self._world.device)
        )
        own = self._load_and_compile(calls, plan, passes.denoiser)
        for why in {*self._others.failures}:
            logger.info("A process beside this one could not compile: %s", why)
        self._journal.say(
            f"Processes beside this one ({number}) compiled {len(self._others.ready)} of "
            f"{counted(len(calls), 'graph')}, and this one {own}; all took {time.perf_counter() - began:.1f} s"
        )

    def _number_with_room(self, calls: Sequence[BlockCall], denoiser: nn.Module) -> int:
        """Return how many processes beside this one have graphs to compile, and room on the GPU."""
        if not calls:
            return 0
        torch.cuda.empty_cache()
        each = estimate.bytes_to_compile(calls, denoiser)
        left = gpu_memory.free_memory(self._world.device) - cudagraph.SPARE_BYTES - (each - estimate.CONTEXT_BYTES)
        # The model has been read since the processes were started.
        return min(len(self._others), len(calls) - 1, processes_in_memory(), int(left // each))

    def _load_and_compile(self, calls: Sequence[BlockCall], plan: CompilePlan, denoiser: nn.Module) -> int:
        """Load graphs that others have compiled. While there are none, compile the quickest remaining ones, if the
        others have further ones to take. Return how many were compiled here.
        """
        others, own, loaded = self._others, 0, 0
        last = time.monotonic()  # when a graph was ready
        while True:
            ended = others.ended  # read before the ready graphs are counted
            if loaded < len(others.ready):
                number, loaded = others.ready[loaded], loaded + 1
            elif (ended or len(others.waiting) > len(others)) and (number := others.take_last()) is not None:
                own += 1
            elif ended:
                return own
            elif time.monotonic() - last > GRAPH_TIMEOUT:
                raise TimeoutError(f"the other processes compiled nothing for {GRAPH_TIMEOUT:.0f} s")
            else:
                time.sleep(PAUSE)
                continue
            with plan.compiled_alone(denoiser.get_submodule(calls[number].path)):
                block_calls.repeat(denoiser, calls[number], self._world.device)
            last = time.monotonic()
            self._journal.phase(Message("compiling"), own + loaded, len(calls))


def slowest_first(calls: Sequence[BlockCall], denoiser: nn.Module) -> list[BlockCall]:
    """Sort calls by the time that their graphs take to compile, longest first, estimated by the layers of a block."""
    layers = {call: sum(1 for _ in denoiser.get_submodule(call.path).modules()) for call in calls}
    return sorted(calls, key=lambda call: -layers[call])
