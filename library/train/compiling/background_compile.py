"""Whether blocks are compiled before the first step, beside the run or not at all.

Beside the run the first steps are eager while another process compiles the blocks into the cache.
"""

import contextlib
import logging
import threading
import time

import torch
from torch import nn

from library import families
from library.compiler import block_calls, blocks, cache, cudagraph, gpu_memory, torch_private
from library.compiler.block_calls import BlockCall, NotDescribed
from library.compiler.payoff import CACHED_SHARE, COMPILING, LOADING, SAVED_SHARE, SAVED_SHARE_8_BIT, SWITCHING, Payoff
from library.compiler.plan import CompilePlan, PlanEvent, PlanState
from library.config.problems import MessageLike, counted
from library.config.run_config import RunConfig
from library.data.loading import Kind
from library.distributed.world import World
from library.memory.prepare import BYTES_OF_ADAM, is_sharded
from library.train.choices import Choices
from library.train.compiling import background_estimate as estimate
from library.train.compiling.compile_process import CompileProcess, compile_job
from library.train.compiling.trial_passes import TrialPasses
from library.train.journal import Journal
from library.train.step.clock import Clock

logger = logging.getLogger(__name__)

INSTEAD = "compile_warmup = true compiles them before the first step"
TOO_SMALL = "the GPU's memory is too small for steps without compiled blocks"
BEFORE = "Blocks are compiled before the first step, not beside the first ones: {why}"


# Why: docs/decisions/2026-11-22-compile-beside-the-run.md
class BackgroundCompiler:
    """Decides whether blocks are compiled beside the run, and loads their graphs between steps."""

    def __init__(
        self, config: RunConfig, world: World, journal: Journal, plan: CompilePlan, clock: Clock, choices: Choices
    ) -> None:
        self._config, self._world, self._journal = config, world, journal
        self._plan, self._clock, self._choices = plan, clock, choices
        self._calls: list[BlockCall] = []
        self._loaded = 0  # number of calls whose graphs are loaded into this process
        self._step_seconds, self._sizes = 0.0, 1
        self._process: CompileProcess | None = None
        self._imports: threading.Thread | None = None  # imports inductor into this process
        self._begun = 0  # steps done when the run began
        self._pauses: list[float] = []  # seconds of loading graphs between steps

    @property
    def _forced(self) -> bool:
        return self._config.compile.compile_warmup == "beside"

    # ---- before the first step

    def why_not(self, denoiser: nn.Module) -> MessageLike:
        """Return why blocks are compiled before the first step instead, "" if they need not be. Call it before anything
        is recorded.
        """
        if why := self._config.compile.why_not_in_background(self._config):
            return why
        if self._world.ranks > 1:
            return "not used with several processes"
        if cache.is_off():
            return "the cache of graphs is off"
        if self._choices.compiled_from:
            return "the run that is continued had compiled blocks"
        if self._forced:
            return ""
        if self._config.compile.compile_autotune:
            return "compile_autotune has compiled them"
        if self._world.device.type != "cuda":
            return "steps are recorded on a GPU alone"
        recorder = cudagraph.recorder_of(denoiser)
        return "" if recorder and not recorder.why_not else "steps are not recorded"

    def begin(self, passes: TrialPasses) -> None:
        """Start compiling beside the first steps, or keep blocks eager if that costs more than it saves.

        The plan's state is BESIDE or STAYS_EAGER then; COMPILING if all must be compiled before the first step.
        """
        if why := self.why_not(passes.denoiser):
            # The preflight check has reported what the options themselves rule out.
            if self._forced and not self._config.compile.why_not_in_background(self._config):
                self._journal.say(BEFORE.format(why=why))
            elif self._may_stay_eager:
                self._compile_first_if_it_pays(passes)
            return
        self._plan.postpone()
        if self._stays_eager_as_before():
            return
        if why := self._measure_eager_steps(passes):
            self._compile_first(passes, why)
            return
        no_room, (_, compiling) = self._why_no_room(passes.denoiser), families.compiling_cost(self._config)
        if no_room:  # whether the cache has the graphs is unknown, so assume the better case
            payoff = self._payoff(CACHED_SHARE * compiling)
        else:
            payoff = self._payoff(estimate.LOAD_SECONDS * len(self._calls), estimate.SLOWDOWN * compiling)
        if not payoff.pays and not self._forced:
            self._stay_eager(payoff.refusal(LOADING if no_room else SWITCHING))
        elif no_room:
            self._compile_first(passes, no_room)
        else:
            self._start_process(passes)

    def _stays_eager_as_before(self) -> bool:
        """Keep blocks eager if they are in the run that is continued; return whether they are."""
        stays = self._choices.stays_eager == self._clock.total
        if stays:
            self._stay_eager(f"Blocks stay eager, as in the run that is continued. {INSTEAD}")
        return stays

    # ---- before the first step or not at all

    @property
    def _may_stay_eager(self) -> bool:
        """Whether blocks that are not compiled beside the run may stay eager instead of being compiled first."""
        options = self._config.compile
        if self._plan.state is not PlanState.COMPILING or options.compile_warmup != "auto":
            return False  # the options say when compiling begins
        if self._world.device.type != "cuda" or is_sharded(self._config):
            return False
        if options.compile_autotune or options.compile_fullgraph or options.backends != {"inductor"}:
            return False
        # A state of a version that did not decide has compiled blocks.
        undecided = bool(self._clock.step) and self._choices.stays_eager is None
        return not undecided

    # Why: docs/decisions/2026-11-28-compiling-has-to-pay.md
    def _compile_first_if_it_pays(self, passes: TrialPasses) -> None:
        """Leave the plan as it is, or keep blocks eager if compiling first costs more than it saves on this card.

        Eager steps are timed only if the number of steps does not decide. All processes decide the same.
        """
        compiling, what_costs = self._seconds_to_compile()
        self._sizes = len(passes.batches.kinds())
        if self._first_payoff(passes, estimate.FASTEST_STEP, compiling).pays:
            return
        self._plan.postpone()
        if self._stays_eager_as_before():
            return
        measured = self._world.gather((self._time_eager_steps(passes), self._step_seconds))
        self._step_seconds = max(seconds for _, seconds in measured)
        payoff = self._first_payoff(passes, self._step_seconds, compiling)
        if why := next((why for why, _ in measured if why), ""):
            self._compile_first(passes, why)
        elif payoff.pays:
            self._compile_first(passes)
        else:
            self._stay_eager(payoff.refusal(what_costs))

    def _seconds_to_compile(self) -> tuple[float, str]:
        """Return the seconds of compiling before the first step, and what they are spent on.

        Whether a cache that has graphs has those of this training is unknown, so assume the better case.
        """
        _, compiling = families.compiling_cost(self._config)
        if any(self._world.gather(not cache.holds_graphs())):
            return compiling, COMPILING
        return CACHED_SHARE * compiling, LOADING

    def _first_payoff(self, passes: TrialPasses, step_seconds: float, compiling: float) -> Payoff:
        precision, recorder = self._config.precision, passes.recorder
        eight_bit = precision.fp8_compute or precision.int8_compute
        share = SAVED_SHARE_8_BIT if eight_bit else SAVED_SHARE
        sizes = self._sizes if recorder and not recorder.why_not else 0
        return Payoff(self._clock.total - self._clock.step, step_seconds, sizes, compiling, share=share)

    def _time_eager_steps(self, passes: TrialPasses) -> str:
        """Time an eager step of the most frequent size. Return why eager steps are impossible, "" if they are not.

        Random states do not change.
        """
        ((usual, _),) = passes.batches.kinds().most_common(1)
        try:
            with passes.random_state_kept():
                for kind in dict.fromkeys((passes.largest(), usual)):
                    passes.run_within_limit(kind)
                self._time_pass(passes, usual)
        except torch.OutOfMemoryError:  # compiled blocks keep fewer activations, so they may fit
            return TOO_SMALL
        needed = cudagraph.SPARE_BYTES + self._bytes_of_optimizer(passes.denoiser)
        return "" if gpu_memory.free_at_peak(self._world.device) >= needed else TOO_SMALL

    # ---- beside the run

    def _measure_eager_steps(self, passes: TrialPasses) -> str:
        """Record eager steps with the calls of their blocks, and time one. Return why compiling beside such steps is
        impossible, "" if it is not. Random states do not change.
        """
        why = ""
        try:
            with passes.random_state_kept():
                self._calls = self._record_calls(passes)
        except NotDescribed as error:
            why = f"blocks are called with {error}"
        except torch.OutOfMemoryError:  # compiled blocks keep fewer activations, so they may fit
            why = TOO_SMALL
        if not self._forced and passes.recorder and passes.recorder.why_not:
            return "steps are not recorded"
        return why

    def _record_calls(self, passes: TrialPasses) -> list[BlockCall]:
        """Return the block calls of every size that needs its own graphs; record the largest and the most frequent.

        The graphs of the most frequent size come first: graphs that serve all sizes are tuned for it.
        """
        kinds = passes.batches.kinds()
        self._sizes = len(kinds)
        wanted = [kind for kind, _ in kinds.most_common()]
        if self._config.compile.dynamic is not False:
            wanted = [next(k for k in wanted if k[0] == number) for number in dict.fromkeys(kind[0] for kind in wanted)]
        found: dict[tuple[int, ...], list[BlockCall]] = {}
        # The largest size is recorded first, as the others fit into its memory; most are recorded in their first step.
        recorded = (passes.largest(), wanted[0])
        for kind in dict.fromkeys([*recorded, *wanted]):
            recording = contextlib.nullcontext() if kind in recorded else passes.unrecorded()
            with recording, block_calls.noted(passes.denoiser) as found[kind]:
                passes.run_within_limit(kind)
        self._time_pass(passes, wanted[0])
        return [call for kind in wanted for call in found[kind]]

    def _time_pass(self, passes: TrialPasses, kind: Kind) -> None:
        """Time a separate pass, as earlier ones also recorded."""
        self._wait()
        began = time.perf_counter()
        passes.run_within_limit(kind)
        self._wait()
        self._step_seconds = (time.perf_counter() - began) * self._config.steps.gradient_accumulation_steps

    def _bytes_of_optimizer(self, denoiser: nn.Module) -> int:
        """Return the bytes of the optimizer's states, which it has not allocated yet."""
        if self._config.optim.stepped_early:
            return 0
        return BYTES_OF_ADAM * sum(p.numel() for p in denoiser.parameters() if p.requires_grad)

    def _why_no_room(self, denoiser: nn.Module) -> str:
        """Return why a second process would lack GPU memory beside the training, "" if there is enough."""
        device = self._world.device
        if device.type != "cuda" or self._forced:
            return ""
        torch.cuda.empty_cache()
        left = gpu_memory.free_memory(device) - cudagraph.SPARE_BYTES
        left -= estimate.OTHER_SIZES * cudagraph.peak(device) if self._sizes > 1 else 0
        left -= self._bytes_of_optimizer(denoiser)
        weights = (sum(p.nbytes for p in denoiser.get_submodule(call.path).parameters()) for call in self._calls)
        inputs = (call.largest_tensor for call in self._calls)
        return estimate.lack_of_room(estimate.bytes_to_compile(zip(weights, inputs, strict=True)), left)

    def _payoff(self, loading: float = 0.0, waiting: float = 0.0) -> Payoff:
        return Payoff(self._clock.total - self._clock.step, self._step_seconds, self._sizes, loading, waiting)

    def _compile_first(self, passes: TrialPasses, why: str = "") -> None:
        """Compile all blocks before the first step, and decide about recording anew."""
        if why:
            self._journal.say(BEFORE.format(why=why))
        recorder = passes.recorder
        if recorder and (recorder.lacks_memory or not recorder.why_not):
            recorder.begin_again()
        self._plan.compile_all()

    def _start_process(self, passes: TrialPasses) -> None:
        self._calls = block_calls.costliest_first(self._calls, passes.denoiser)
        self._begun = self._clock.step
        sizes = [*passes.batches.kinds()]
        job = compile_job(self._config, sizes, passes.text_learns, self._calls, self._world.device)
        try:
            self._process = CompileProcess()
        except OSError as error:
            self._compile_first(passes, f"no process could be started ({error.strerror or type(error).__name__})")
            return
        self._process.start(job)
        self._plan.on(PlanEvent.START_PROCESS)
        if passes.recorder:
            passes.recorder.free_others = self.make_room
        self._journal.say(
            f"The first steps run without compiled blocks, and were measured to take {self._step_seconds:.3g} s "
            f"each; beside them a process compiles {counted(len(self._calls), 'graph')} of blocks"
        )

    # ---- between steps

    def import_compiler(self) -> None:
        """After the first step, import inductor on a thread."""
        # Otherwise the first loaded graph would wait for the import.
        if self._process and self._imports is None and self._clock.step > self._begun + 1:
            self._imports = threading.Thread(target=_import_inductor, name="compiler", daemon=True)
            self._imports.start()

    @property
    def due(self) -> bool:
        process = self._process
        return process is not None and (process.compiled > self._loaded or bool(process.failure))

    def load_next_graph(self, passes: TrialPasses) -> None:
        """Load one graph from the cache between two steps; after the last, run all blocks compiled if that pays.

        Until then blocks run eagerly; the loaded graphs are used later.
        """
        assert self._process
        if self._process.compiled <= self._loaded:
            self.give_up(self._process.failure)
            return
        began = time.perf_counter()
        try:
            with passes.random_state_kept():
                self._load(self._calls[self._loaded], passes.denoiser)
        except Exception as error:  # whatever it is, the steps do not depend on it
            self.give_up(blocks.compile_error_cause(error))
            return
        self._loaded += 1
        self._pauses.append(time.perf_counter() - began)
        if self._loaded < len(self._calls):
            return
        self.stop()
        payoff = self._payoff()
        if payoff.pays or self._forced:
            self._take_over(passes)
        else:
            self._stay_eager(payoff.refusal(SWITCHING))

    def _load(self, call: BlockCall, denoiser: nn.Module) -> None:
        if self._imports:
            self._imports.join()
        with self._plan.compiled_alone(denoiser.get_submodule(call.path)):
            block_calls.repeat(denoiser, call, self._world.device)
        self._wait()

    def _take_over(self, passes: TrialPasses) -> None:
        """Run all blocks compiled: free the recordings of eager blocks, and record the largest size first."""
        began = time.perf_counter()
        self._plan.take_over()
        passes.forget_recordings()
        if passes.recorder:
            passes.record_largest()
            self._wait()
        self.log_switch(time.perf_counter() - began)

    def log_switch(self, seconds: float) -> None:
        """Log that blocks are compiled from this step on, which took `seconds`."""
        step, self._choices.compiled_from = self._clock.step, self._clock.step
        longest, total = max(self._pauses), sum(self._pauses)
        self._journal.event("takeover", step=step, seconds=seconds, pauses=self._pauses)
        self._journal.say(
            f"Switched to compiled blocks at step {step} ({seconds:.1f} s; earlier pauses: {len(self._pauses)}, "
            f"{total:.1f} s in total, at most {longest:.1f} s). Eager step: {self._step_seconds:.3g} s"
        )

    def give_up(self, why: str) -> None:
        self.stop()
        self._stay_eager(f"Blocks stay eager, as they could not be compiled beside the run: {why}. {INSTEAD}")

    def _stay_eager(self, said: str) -> None:
        """Keep eager blocks, also in runs that continue this one."""
        self._plan.on(PlanEvent.STAY_EAGER)
        self._choices.stays_eager = self._clock.total
        self._journal.say(said)

    def make_room(self) -> bool:
        """Stop the compiling process to free GPU memory; return whether it was still running."""
        if self._process is None or not self._process.running:
            return False
        self.give_up("the GPU's memory is too small for both")
        return True

    def unused(self) -> str:
        """At the end of a run, return a sentence if it ended before its compiled blocks were used, else ""."""
        if self._process is None:
            return ""
        ready = f"{self._process.compiled} of {counted(len(self._calls), 'graph')} ready"
        return f"The training ended before its blocks were compiled beside it ({ready}), so they ran eagerly. {INSTEAD}"

    def stop(self) -> None:
        """Stop the compiling process, if there is one."""
        if self._process:
            self._process.stop()
        self._process = None

    def _wait(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)


def _import_inductor() -> None:
    try:
        torch_private.import_inductor()
    except Exception as error:  # the first loaded graph meets it again, and says so
        logger.debug("inductor could not be imported: %s", error)
