"""Compiling in a training: before the first step or beside it, proof that it happened, and the fallback on failure."""

import contextlib
import dataclasses

import torch
from torch import nn

from library.compiler import blocks, cudagraph, gpu_memory
from library.compiler.pass_recording import recorded_passes_of
from library.compiler.plan import CompilePlan, PlanEvent, PlanState
from library.config.problems import ConfigError, Message, MessageLike, Problem, counted
from library.config.run_config import RunConfig
from library.config.sections import Compile
from library.data.loading import Batches, Kind
from library.distributed.world import World
from library.memory.compile_targets import compiles_size_by_size
from library.memory.prepare import BYTES_OF_ADAM, is_sharded
from library.train.choices import Choices
from library.train.compiling.background_compile import BackgroundCompiler
from library.train.compiling.parallel_compile import ParallelCompiler
from library.train.compiling.trial_passes import TrialPasses
from library.train.journal import Journal
from library.train.step.clock import Clock

GRADIENT_BYTES = 4  # per trained weight
PASSES_A_SIZE = 8  # minimum passes per size to record; recording takes as long as four passes


# Why: docs/decisions/2026-11-20-compile-before-the-first-step.md
class Precompiler:
    """Compiles the graphs of a training, and records those that are compiled later."""

    def __init__(  # noqa: PLR0913 - what a training consists of
        self,
        config: RunConfig,
        world: World,
        journal: Journal,
        plan: CompilePlan,
        clock: Clock,
        choices: Choices | None = None,
        parallel: ParallelCompiler | None = None,
    ) -> None:
        self.plan, self.log, self._config, self._options = plan, plan.log, config, config.compile
        self._world, self._journal, self._clock = world, journal, clock
        self._background = BackgroundCompiler(config, world, journal, plan, clock, choices or Choices())
        self._parallel = parallel or ParallelCompiler(world, journal)
        self._stepped = False  # whether a step was taken
        self._recording_seconds = 0.0  # see `recorded`
        self._passes: TrialPasses  # set by `prepare`

    def __enter__(self) -> "Precompiler":
        return self

    def __exit__(self, *error: object) -> None:
        self._background.stop()

    def closing_sentence(self) -> str:
        return self._background.unused() or self.log.sentence()

    # ---- before the first step

    def prepare(self, passes: TrialPasses) -> None:
        """Before the first step: record the denoiser, and compile its blocks or start compiling them beside the run."""
        self._passes = passes
        if gpu_memory.is_held():
            trained = sum(p.numel() for p in passes.compute_loss.method.parameters())
            gpu_memory.lift_for((BYTES_OF_ADAM + GRADIENT_BYTES) * trained)
        self._record_ahead()
        if self.plan.active and not self._clock.done:
            self._background.begin(passes)
        if self.plan.state in (PlanState.BESIDE, PlanState.STAYS_EAGER):
            passes.pause()
        else:
            self._compile_ahead()
        self._parallel.stop()  # there may be nothing to compile

    def _record_ahead(self) -> None:
        """Record the largest size of an eagerly recorded denoiser, in whose memory the others fit.

        Other sizes are recorded when they occur, or while compiling. An automatic recording is skipped in a training
        too short for it.
        """
        recorder = self._passes.recorder
        if recorder is None or self._clock.done:
            return
        if self._config.steps.resume:
            recorder.drop_reserve()
        sizes = len(self._passes.batches.kinds())
        left = (self._clock.total - self._clock.step) * self._config.steps.gradient_accumulation_steps
        if recorder.automatic and left < PASSES_A_SIZE * sizes:
            recorder.give_up(f"the batches ({left}) are too few for the image sizes ({sizes})", expected=True)
        elif not self.plan.active or (self.plan.state is PlanState.EAGER and not self.plan.due(self._clock.step + 1)):
            self._journal.phase(Message("recording CUDA graphs"), 0, 1)
            self._passes.record_largest()
            self._journal.phase(Message("recording CUDA graphs"), 1, 1)
            self._passes.pause()

    def _compile_ahead(self) -> None:
        """Compile the graphs of one size, with the training's own images.

        Weights and random numbers do not change. Eager steps for comparison (`compile_compare_steps`) come first. One
        process per machine goes first; the others find its graphs in the cache.
        """
        if not self.plan.active:
            return
        self._warn_if_nothing_compiles()
        self._compile_due(self._clock.step + 1)  # a resumed run may be past `compile_from_step`
        if self._options.ahead and self.plan.state is PlanState.COMPILING:
            self._compile_one_size()

    def _warn_if_nothing_compiles(self) -> None:
        """Warn if no step will be compiled although `compile` is set."""
        first, steps = self._options.compile_compare_steps, self._clock.total - self._clock.step
        if 0 < steps <= first and self._clock.step:  # at step 0 the preflight check has already warned
            self._journal.warn(
                Message(
                    "compile_compare_steps = {first}: nothing is compiled, as only {steps} remain; use fewer",
                    first=first,
                    steps=steps,
                )
            )

    def agree_on_recording(self, denoiser: nn.Module) -> None:
        """Stop recording in all processes if one cannot record."""
        recorder = cudagraph.recorder_of(denoiser)
        # Faster processes would only wait for the one without recordings. One that fails later gives up alone, as no
        # collective depends on it.
        reasons = enumerate(self._world.gather(recorder.why_not if recorder else ""))
        why = next((f"process {rank} cannot record them: {reason}" for rank, reason in reasons if reason), "")
        if why and recorder and not recorder.why_not:
            recorder.give_up(why)

    # ---- between steps

    def switch_when_ready(self) -> None:
        """Before a step: compile blocks that are due by `compile_from_step`, or switch to those compiled beside the
        run.
        """
        if self._passes.recorder and self._stepped:
            self._passes.recorder.drop_reserve()
        self._stepped = True
        self._background.import_compiler()
        if self._background.due:
            self._background.load_next_graph(self._passes)
            self.note()
            self._passes.pause()
        elif self.plan.active and self._compile_due(self._clock.step) and self._options.ahead:
            self._compile_one_size(in_step=True)

    def step_done(self, step: int, seconds: float | None) -> None:
        """Record the speed of a step, `seconds` None if it compiled, and compile after the last eager step to compare
        with.
        """
        if self.plan.state is PlanState.GIVEN_UP:
            return
        self.log.speedup.note_step(step, seconds, self.log.seconds)
        if self.plan.measuring and not self.log.speedup.eager_steps_left:
            self.plan.compile_all()
            if self._options.ahead:
                self._compile_one_size()

    # ---- compiling

    def _compile_due(self, step: int) -> bool:
        """Begin to compile blocks that are due, and free recordings of eager ones; return whether any were due."""
        begun = self.plan.compile_due(step)
        if begun:
            self._passes.forget_recordings()
        return begun

    # Why: docs/decisions/2026-11-28-one-size-first.md
    def _compile_one_size(self, in_step: bool = False) -> None:
        """Compile for one size, and record it, so that the next step (or this one, `in_step`) need not. Other sizes
        follow in the steps that meet them.
        """
        if self._clock.done:
            return
        log, device, batches = self.log, self._world.device, self._passes.batches
        graphs, compiled = log.due_for_one_size(), log.summary()["num_graphs"]
        self._journal.phase(Message("compiling"), compiled, graphs)
        single = compiles_size_by_size(self._config, device)
        self._journal.say(graphs_sentence(self._options, len(batches.shapes), single))
        each_size = single or self._options.dynamic is False
        kind = kind_to_compile(batches, each_size, in_step)
        if not self._stepped:
            self._parallel.run(self._config, self.plan, self._passes, kind)
        # Processes with shards of one model must compute at the same time.
        together, in_turn = contextlib.nullcontext, self._world.accelerator.local_main_process_first
        with together() if is_sharded(self._config) else in_turn(), self._passes.random_state_kept():
            try:
                self._passes.run(kind)
                if not each_size and not self._records:
                    # Compiles nothing more, but shows whether the memory suffices.
                    self._passes.run(self._passes.largest())
                self.note()
            except Exception as error:
                if not blocks.is_compile_error(error):
                    raise
                self.give_up(error)
        self.prove()
        self._journal.phase(Message("compiling"), graphs, graphs)
        self._passes.pause()

    @property
    def _records(self) -> bool:
        recorder = self._passes.recorder
        return recorder is not None and not recorder.why_not

    def note(self) -> bool:
        """Record the graphs compiled since the last call; return whether there were any."""
        if self.plan.measuring and self._world.device.type == "cuda":
            torch.cuda.synchronize()  # an eager step must have finished before it is timed
        events = self.log.drain()
        for event in events:
            self._journal.event("compile", step=self._clock.step, **dataclasses.asdict(event))
        return bool(events)

    def recorded(self) -> bool:
        """Return whether a size was recorded, or tried to be, since the last call."""
        recorder, before = self._passes.recorder, self._recording_seconds
        self._recording_seconds = recorder.recording_seconds if recorder else 0.0
        return self._recording_seconds != before

    def prove(self) -> None:
        """Raise or warn if a class of blocks has no graph: torch.compile can silently do nothing."""
        log = self.log
        if not self.plan.active or self.plan.measuring:
            return
        if missing := log.unproven():
            names = ", ".join(missing)
            if not self._options.compile_fallback:
                raise ConfigError(
                    Problem(
                        "compile", ": no graph was made for {names}, though it ran; switch compile off", names=names
                    )
                )
            self._go_on_without(why := Message("no graph was made for {names}", names=names))
            self._journal.warn(Message("compile: {why}; these blocks run without it.", why=why))
            return
        if self.plan.state is PlanState.COMPILING:
            self.plan.on(PlanEvent.PROVE)
            self._parallel.done()
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
        """Return whether the step can be retried: without compiling if that failed and `compile_fallback` is set, or
        with more GPU memory if that was short.
        """
        if isinstance(error, torch.OutOfMemoryError):
            return self._free_memory(denoiser)
        if self.plan.active and blocks.is_compile_error(error):
            self.give_up(error)
            return True
        return False

    def _free_memory(self, denoiser: nn.Module) -> bool:
        """Free the cheapest user of GPU memory beside the steps; return whether the step can be retried."""
        recorder, recorded = cudagraph.recorder_of(denoiser), recorded_passes_of(denoiser)
        if recorded and recorded.recordings:
            recorded.free()
        elif self._background.make_room():
            pass
        elif recorder and recorder.recordings:
            recorder.give_up("the GPU's memory is too small for the steps beside them")
            recorder.lacks_memory = True
        else:
            return cudagraph.lift_memory_limit(recorder)  # the limit applies only to repeatable steps
        return not self._config.optim.stepped_early  # a step in the backward pass cannot be undone

    def give_up(self, error: BaseException) -> None:
        """Continue without compiling, or without `compile_fallback` raise a ConfigError with the reason.

        Where one size is compiled and trained with, another never ends the training, unless it has to be one graph.
        """
        reason = blocks.compile_error_cause(error)
        may_stop = self.plan.state is not PlanState.COMPILED or self._options.compile_fullgraph
        if not self._options.compile_fallback and may_stop:
            raise ConfigError(
                Problem(
                    "compile",
                    ": PyTorch could not compile a block ({reason}); "
                    "add --compile_fallback to continue without, or switch compile off",
                    reason=reason,
                )
            ) from error
        self._go_on_without(reason)
        torch.compiler.set_stance("force_eager")
        self._journal.warn(Message("Compiling failed ({reason}); the run continues without it.", reason=reason))

    def _go_on_without(self, why: MessageLike) -> None:
        self.plan.give_up(why)
        self._background.stop()


def graphs_sentence(options: Compile, number: int, single: bool = False) -> str:
    """Describe the image sizes of the graphs; `single` if each size needs its own graph."""
    if number == 1 and not options.dynamic:
        return "All images have one size, which the graphs are made for."
    if single:
        return (
            f"Each of {number} sizes of image gets a graph of the whole model, which cannot be made for varying ones; "
            "each is compiled in the first step that needs it."
        )
    if options.dynamic is False:
        return (
            f"Each of {number} sizes of image gets graphs of its own, as compile_dynamic = false says; "
            "each is compiled in the first step that needs it."
        )
    why = "as compile_dynamic = true says" if options.dynamic else "so that there is nothing to compile at a new one"
    which = f"all {number} sizes of image at once" if number > 1 else "any size of image"
    return f"The graphs are made for {which}, {why}."


def kind_to_compile(batches: Batches, each_size: bool, in_step: bool = False) -> Kind:
    """Return the kind of batches to compile for first. `each_size`: every size has graphs of its own."""
    if each_size:  # graphs then serve no other size, so take the next batch's
        return batches.kind_at(batches.index - 1 if in_step and batches.index else batches.index)
    # One graph serves all sizes, and its kernels are tuned for the one that it is compiled with. All processes choose
    # the same, so the first compiles for all.
    ((kind, _),) = batches.kinds().most_common(1)
    return kind
