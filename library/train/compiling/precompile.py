"""Compiling in a training: before the first step or beside it, proof that it happened, and the fallback if it fails."""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import nn

from library.compiler import blocks, cudagraph
from library.compiler.log import CompileLog
from library.config.problems import ConfigError, Message, Problem, counted
from library.config.run_config import RunConfig
from library.config.sections import Compile
from library.data.loading import Batches, Kind, latent_area
from library.distributed.world import World
from library.memory.compile_targets import compiles_size_by_size
from library.memory.prepare import is_sharded
from library.train.choices import Choices
from library.train.compiling.background_compile import BackgroundCompiler, Reporter
from library.train.step import rng
from library.train.step.clock import Clock
from library.train.step.loss import LossFunction

PASSES_A_SIZE = 8  # recording one takes as long as four passes


class Listener(Reporter, Protocol):
    """Receives log lines, warnings, events and progress."""

    def warn(self, text: Message) -> None:
        """A line that should not be overlooked."""
        ...

    def phase(self, name: Message, done: int, total: int) -> None:
        """Progress."""
        ...


# Why: docs/decisions/2026-11-20-compile-before-the-first-step.md
class Precompiler:
    """Makes the graphs of a training, and records those that are compiled later."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        journal: Listener,
        log: CompileLog,
        clock: Clock,
        choices: Choices | None = None,
    ) -> None:
        self.log, self._config, self._options = log, config, config.compile
        self._world, self._journal, self._clock = world, journal, clock
        self.choices = choices or Choices()
        self._background = BackgroundCompiler(config, world, journal, log, clock, self.choices)
        self._stepped = False  # whether a step was taken

    def __enter__(self) -> "Precompiler":
        return self

    def __exit__(self, *error: object) -> None:
        self._background.stop()

    def closing_sentence(self) -> str:
        """What compiling was worth, at the end of a run."""
        return self._background.unused() or self.log.sentence()

    def prepare(self, batches: Batches, compute_loss: LossFunction, pause: Callable[[], None]) -> None:
        """Before the first step: record it and compile its blocks, or begin to compile them beside the first steps.

        `pause` leaves the time of this out of the speed of steps.
        """
        self.record_ahead(batches, compute_loss, pause)
        if self.log.active and not self._clock.done and self._background.begin(batches, compute_loss):
            self._warn()
            pause()
        else:
            self.run_ahead(batches, compute_loss, pause)

    def record_ahead(self, batches: Batches, compute_loss: LossFunction, pause: Callable[[], None]) -> None:
        """Where the denoiser is recorded eagerly, begin with the largest size, in whose memory the others find room.

        Those are recorded when they come, and all of them while compiling, where it is asked for that. What is recorded
        by itself is not in a training that is over before that pays.
        """
        recorder = cudagraph.recorder_of(compute_loss.components.denoiser)
        if recorder is None or self._clock.done:
            return
        if self._config.steps.resume:
            recorder.optimizer_is_there()
        sizes = batches.kinds()
        passes = (self._clock.total - self._clock.step) * self._config.steps.gradient_accumulation_steps
        if recorder.automatic and passes < PASSES_A_SIZE * len(sizes):
            recorder.give_up(f"the batches ({passes}) are too few for the image sizes ({len(sizes)})", expected=True)
        elif not self.log.active or self._begins_later():
            self._journal.phase(Message("recording CUDA graphs"), 0, 1)
            before = rng.get_rng_state(self._world.device)
            compute_loss.warm_up(batches.example(max(sizes, key=latent_area)), self._world.device)
            rng.set_rng_state(before, self._world.device)
            self._journal.phase(Message("recording CUDA graphs"), 1, 1)
            pause()

    def _begins_later(self) -> bool:
        """Whether `compile_from_step` leaves all blocks eager in the step that comes."""
        later = self.log.later
        if not later or set(later) < set(self.log.expected):
            return False
        steps = self._options.first_steps()
        return min(steps.get(kind, steps.get("", 0)) for kind in later) > self._clock.step + 1

    def run_ahead(self, batches: Batches, compute_loss: LossFunction, pause: Callable[[], None]) -> None:
        """Make every graph that the training needs before its first step, with images of its own.

        Weights and random numbers do not change. Where eager steps come first, to be compared with
        (`compile_compare_steps`), it happens right after them. Of several processes on a machine, one goes first and
        compiles; the others find its graphs in the cache.
        """
        if not self.log.active:
            return
        self._warn()
        self._begin_due(self._clock.step + 1, compute_loss)  # a run that was resumed may have come so far
        if not self._options.ahead or set(self.log.later) >= set(self.log.expected):
            return
        if self.log.waiting and (begin := self.log.speedup.begin):

            def begin_and_run() -> None:
                begin()
                self._run(batches, compute_loss, pause)

            self.log.speedup.begin = begin_and_run
        else:
            self._run(batches, compute_loss, pause)

    def agree_on_recording(self, denoiser: nn.Module) -> None:
        """Of several processes either all record or none: otherwise the others wait for one without, and gain nothing.

        A process whose recording fails later gives up alone, as no collective depends on it.
        """
        recorder = cudagraph.recorder_of(denoiser)
        reasons = enumerate(self._world.gather(recorder.why_not if recorder else ""))
        why = next((f"process {rank} cannot record them: {reason}" for rank, reason in reasons if reason), "")
        if why and recorder and not recorder.why_not:
            recorder.give_up(why)

    def switch_when_ready(self, batches: Batches, compute_loss: LossFunction, pause: Callable[[], None]) -> None:
        """Before a step: compile what `compile_from_step` says, or take over what was compiled beside the run, for this
        step and those after it."""
        recorder = cudagraph.recorder_of(compute_loss.components.denoiser)
        if recorder and self._stepped:
            recorder.optimizer_is_there()
        self._stepped = True
        pinned = self.log.active and self._options.compile_from_step
        self._background.import_compiler()
        if self._background.due:
            if self._background.load_next_graph(compute_loss.components.denoiser):
                self._switch(batches, compute_loss)
            self.note()
            pause()
        elif pinned and self._begin_due(self._clock.step, compute_loss) and self._options.ahead:
            self._run(batches, compute_loss, pause)

    def _switch(self, batches: Batches, compute_loss: LossFunction) -> None:
        """Let all blocks run compiled: free the recordings of eager blocks, and record the largest size first."""
        began = time.perf_counter()
        self._begin_due(self._clock.step, compute_loss)
        if cudagraph.recorder_of(compute_loss.components.denoiser):
            before = rng.get_rng_state(self._world.device)
            compute_loss.warm_up(batches.example(max(batches.kinds(), key=latent_area)), self._world.device)
            rng.set_rng_state(before, self._world.device)
            torch.cuda.synchronize(self._world.device)
        self._background.log_switch(time.perf_counter() - began)

    def _begin_due(self, step: int, compute_loss: LossFunction) -> bool:
        """Begin to compile blocks that are due, and free recordings of eager ones; returns whether any were due."""
        begun = bool(self.log.later) and blocks.begin_due(self.log, self._options.first_steps(), step)
        if begun and (recorder := cudagraph.recorder_of(compute_loss.components.denoiser)):
            recorder.forget()
        return begun

    def _warn(self) -> None:
        """Warn if no step will be compiled although `compile` is set."""
        first, steps = self._options.compile_compare_steps, self._clock.total - self._clock.step
        if 0 < steps <= first and self._clock.step:  # for a training from step 0 the check before it has warned already
            self._journal.warn(
                Message(
                    "compile_compare_steps = {first}: nothing is compiled, as only {steps} are to be done; use fewer",
                    first=first,
                    steps=steps,
                )
            )

    def _run(self, batches: Batches, compute_loss: LossFunction, pause: Callable[[], None]) -> None:
        if self._clock.done:
            return
        log, device = self.log, self._world.device
        graphs, made = log.due(), log.summary()["num_graphs"]
        self._journal.phase(Message("compiling"), made, graphs)
        single = compiles_size_by_size(self._config, device)
        self._journal.say(graphs_sentence(self._options, len(batches.shapes), single))
        # With parts of one model all processes have to compute at once.
        together, in_turn = contextlib.nullcontext, self._world.accelerator.local_main_process_first
        with together() if is_sharded(self._config) else in_turn():
            before = rng.get_rng_state(device)
            try:
                records = self._options.records_graphs and device.type == "cuda"
                for kind in kinds_to_compile(batches.kinds(), single or self._options.dynamic is False or records, log):
                    batch = batches.example(kind)
                    log.bucket = batch.bucket
                    compute_loss.warm_up(batch, device)
                    self.note()
            except Exception as error:
                if not blocks.is_compile_error(error):
                    raise
                self.give_up(error)
            finally:
                rng.set_rng_state(before, device)
        if not log.fallback:
            self.prove()
        self._journal.phase(Message("compiling"), graphs, graphs)
        pause()

    def note(self) -> bool:
        """Record what was compiled since the last call; returns whether that was anything."""
        events = self.log.drain()
        for event in events:
            self._journal.event("compile", step=self._clock.step, **dataclasses.asdict(event))
        return bool(events)

    def prove(self) -> None:
        """Raise or warn if a class of blocks has no graph by now: torch.compile can silently do nothing."""
        log = self.log
        if not log.active or log.waiting:
            return
        if missing := log.unproven():
            names = ", ".join(missing)
            if not self._options.compile_fallback:
                raise ConfigError(
                    Problem(
                        "compile", ": no graph was made for {names}, though it ran; switch compile off", names=names
                    )
                )
            log.fallback = Message("no graph was made for {names}", names=names)
            self._journal.warn(Message("compile: {why}; these blocks run without it.", why=log.fallback))
            return
        if broken := log.graph_breaks():
            self._journal.warn(
                Message(
                    "compile: a block does not fit into one graph ({why}), so it runs eagerly in "
                    "parts; compile_fullgraph stops there and shows the place",
                    why=broken[0],
                )
            )
        total = log.summary()
        shown = ", ".join(f"{n} for {total['blocks'].get(k, 0)} {k}" for k, n in total["graphs"].items())
        self._journal.say(
            f"Compiled: {counted(total['num_graphs'], 'graph')} ({shown}) in {total['seconds']:.1f} s, "
            f"{total['recompiles']} recompiled"
        )

    def recover(self, error: Exception, denoiser: nn.Module) -> bool:
        """Whether the step can be taken once more: without compiling where that failed, which `compile_fallback` has to
        allow, and without recordings where the GPU's memory is too small beside them."""
        recorder = cudagraph.recorder_of(denoiser)
        if isinstance(error, torch.OutOfMemoryError) and self._background.make_room():
            return not self._config.optim.stepped_early
        if isinstance(error, torch.OutOfMemoryError) and recorder and recorder.made:
            recorder.give_up("the GPU's memory is too small for the steps beside them")
            return not self._config.optim.stepped_early  # a step in the backward pass cannot be undone
        if self.log.active and blocks.is_compile_error(error):
            self.give_up(error)
            return True
        return False

    def give_up(self, error: BaseException) -> None:
        """Go on without compiling, or without compile_fallback raise a ConfigError with the reason."""
        reason = blocks.why(error)
        if not self._options.compile_fallback:
            raise ConfigError(
                Problem(
                    "compile",
                    ": PyTorch could not compile a block ({reason}); "
                    "add --compile_fallback to go on without, or switch compile off",
                    reason=reason,
                )
            ) from error
        self.log.fallback = reason
        torch.compiler.set_stance("force_eager")
        self._journal.warn(Message("Compiling failed ({reason}); the run goes on without it.", reason=reason))


def graphs_sentence(options: Compile, number: int, single: bool = False) -> str:
    """A sentence about the sizes that graphs are made for; `single` where one graph cannot serve several sizes."""
    if number == 1 and not options.dynamic:
        return "All images have one size, which the graphs are made for."
    if single:
        return (
            f"Each of {number} sizes of image gets a graph of the whole model, which cannot be made for varying ones."
        )
    if options.dynamic is False:
        return f"Each of {number} sizes of image gets graphs of its own, as compile_dynamic = false says."
    why = "as compile_dynamic = true says" if options.dynamic else "so that there is nothing to compile at a new one"
    which = f"all {number} sizes of image at once" if number > 1 else "any size of image"
    return f"The graphs are made for {which}, {why}."


def kinds_to_compile(kinds: Counter[Kind], every: bool, log: CompileLog) -> Iterator[Kind]:
    """The kinds of batches to compile for, the most frequent first, as its size is the one that kernels are tuned for.

    One graph serves all sizes of image, unless they are compiled, or recorded, one by one (`every`). The largest size
    comes second: it shows whether the memory will do. The others follow only as long as each still needed a graph.
    """
    order = [kind for kind, _ in kinds.most_common()]
    first = [next(kind for kind in order if kind[0] == number) for number in dict.fromkeys(kind[0] for kind in order)]
    largest = max(order, key=latent_area)
    order = list(dict.fromkeys([*first, largest, *order]))
    for number, kind in enumerate(order, start=1):
        before = len(log.events)
        yield kind
        if not every and number > len(first) and len(log.events) == before:
            return
