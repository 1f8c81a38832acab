"""Whether blocks are compiled before the first step, beside the run or not at all.

Beside the run the first steps are eager while other processes compile the blocks into the cache.
"""

import contextlib
import time

import torch
from torch import nn

from library import families
from library.compiler import block_calls, blocks, cache, cudagraph, gpu_memory
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
from library.train.compiling.background_graphs import BackgroundGraphs
from library.train.compiling.compile_process import CompileProcesses, compile_job
from library.train.compiling.fingerprint import fingerprint_settings
from library.train.compiling.process_room import most_processes
from library.train.compiling.trial_passes import TrialPasses
from library.train.journal import Journal
from library.train.step.clock import Clock

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
        self._step_seconds, self._sizes = 0.0, 1
        self._kinds: list[Kind] = []  # of all batches
        self._name = ""  # of the settings, see `cache.is_warm`
        self._graphs: BackgroundGraphs | None = None  # that are compiled beside the steps
        self._begun = 0  # steps done when the run began

    @property
    def _forced(self) -> bool:
        return self._config.compile.compile_warmup == "beside"

    # ---- before the first step

    def why_not(self, denoiser: nn.Module) -> MessageLike:
        """Return why blocks are compiled before the first step instead, "" if they need not be. Call it before any
        recording.
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
        (why, number), (_, compiling) = self._room(passes.denoiser), families.compiling_cost(self._config)
        if not why and self._is_warm():
            why = "the cache has their graphs"
        if why:  # whether the cache has the graphs may be unknown, so assume the better case
            payoff = self._payoff(CACHED_SHARE * compiling)
        else:
            waiting = estimate.SLOWDOWN * compiling / estimate.speed_of(number)
            payoff = self._payoff(estimate.LOAD_SECONDS * len(self._calls), waiting)
        if not payoff.pays and not self._forced:
            self._stay_eager(payoff.refusal(LOADING if why else SWITCHING), passes.recorder)
        elif why:
            self._compile_first(passes, why)
        else:
            self._start_processes(passes, number)

    def _is_warm(self) -> bool:
        """Return whether an earlier training has left all graphs in the cache. Loading them at once takes less time
        than between steps.
        """
        if self._forced or self._config.compile.dynamic is False:  # graphs of single sizes may be missing
            return False
        self._name = fingerprint_settings(self._config, self._world, self._kinds)
        return cache.is_warm(self._name)

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
        # States of versions without this decision have compiled blocks.
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
            self._stay_eager(payoff.refusal(what_costs), passes.recorder)

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
        self._kinds, self._sizes = [*kinds], len(kinds)
        to_record = [kind for kind, _ in kinds.most_common()]
        if self._config.compile.dynamic is not False:
            to_record = [
                next(k for k in to_record if k[0] == number) for number in dict.fromkeys(kind[0] for kind in to_record)
            ]
        calls: dict[tuple[int, ...], list[BlockCall]] = {}
        # The largest size is recorded first, as the others fit into its memory; most are recorded in their first step.
        recorded = (passes.largest(), to_record[0])
        for kind in dict.fromkeys([*recorded, *to_record]):
            recording = contextlib.nullcontext() if kind in recorded else passes.unrecorded()
            with recording, block_calls.noted(passes.denoiser) as calls[kind]:
                passes.run_within_limit(kind)
        self._time_pass(passes, to_record[0])
        return [call for kind in to_record for call in calls[kind]]

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

    def _room(self, denoiser: nn.Module) -> tuple[str, int]:
        """Return why another process would lack GPU memory beside the training, "" if there is enough, and for how many
        processes there is enough of everything.
        """
        device, most = self._world.device, max(most_processes(len(self._calls)), 1)
        if device.type != "cuda" or self._forced:
            return "", most if device.type == "cuda" else 1
        torch.cuda.empty_cache()
        left = gpu_memory.free_memory(device) - cudagraph.SPARE_BYTES
        left -= estimate.OTHER_SIZES * cudagraph.peak(device) if self._sizes > 1 else 0
        left -= self._bytes_of_optimizer(denoiser)
        each = estimate.bytes_to_compile(self._calls, denoiser)
        return estimate.lack_of_room(each, left), max(min(most, int(left // each)), 1)

    def _payoff(self, loading: float = 0.0, waiting: float = 0.0) -> Payoff:
        return Payoff(self._clock.total - self._clock.step, self._step_seconds, self._sizes, loading, waiting)

    def _compile_first(self, passes: TrialPasses, why: str = "") -> None:
        """Compile all blocks before the first step, and decide about recording anew."""
        if why:
            self._journal.say(BEFORE.format(why=why))
        if (recorder := passes.recorder) and (recorder.lacks_memory or not recorder.why_not):
            recorder.begin_again()
        self._plan.compile_all()

    def _start_processes(self, passes: TrialPasses, number: int) -> None:
        self._calls = block_calls.costliest_first(self._calls, passes.denoiser)
        self._begun = self._clock.step
        sizes = [*passes.batches.kinds()]
        job = compile_job(self._config, sizes, passes.text_learns, self._calls, self._world.device)
        processes = CompileProcesses()
        try:
            processes.add(number)
        except OSError as error:
            if not len(processes):
                self._compile_first(passes, f"no process could be started ({error.strerror or type(error).__name__})")
                return
        processes.start(job)
        self._graphs = BackgroundGraphs(self._calls, processes, self._plan, self._world.device)
        self._plan.on(PlanEvent.START_PROCESS)
        if passes.recorder:
            passes.recorder.free_others = self.make_room
        self._journal.say(
            f"The first steps run without compiled blocks and take {self._step_seconds:.3g} s "
            f"each; beside them {counted(len(self._calls), 'graph')} of blocks will be compiled, "
            f"{len(processes)} at a time"
        )

    # ---- between steps

    def import_compiler(self) -> None:
        """After the first step, import inductor on a thread."""
        if self._graphs and self._clock.step > self._begun + 1:
            self._graphs.import_compiler()

    @property
    def due(self) -> bool:
        return self._graphs is not None and self._graphs.due

    def load_next_graph(self, passes: TrialPasses) -> None:
        """Load one graph from the cache between two steps; after the last, run all blocks compiled if that pays.

        Until then blocks run eagerly; the loaded graphs are used later.
        """
        assert self._graphs
        if why := self._graphs.why_ended:
            self.give_up(why)
            return
        try:
            with passes.random_state_kept():
                self._graphs.load_next(passes.denoiser)
        except Exception as error:  # any error: the steps do not depend on it
            self.give_up(blocks.compile_error_cause(error))
            return
        if not self._graphs.all_loaded:
            return
        pauses = self._graphs.pauses
        self.stop()
        if self._name:
            cache.note_warm(self._name)
        payoff = self._payoff()
        if payoff.pays or self._forced:
            self._take_over(passes, pauses)
        else:
            self._stay_eager(payoff.refusal(SWITCHING))

    def _take_over(self, passes: TrialPasses, pauses: list[float]) -> None:
        """Run all blocks compiled: free the recordings of eager blocks, and record the largest size first."""
        began = time.perf_counter()
        self._plan.take_over()
        passes.forget_recordings()
        if passes.recorder:
            passes.record_largest()
            self._wait()
        self.log_switch(time.perf_counter() - began, pauses)

    def log_switch(self, seconds: float, pauses: list[float]) -> None:
        """Log that blocks are compiled from this step on, which took `seconds`, and the pauses before."""
        step, self._choices.compiled_from = self._clock.step, self._clock.step
        self._journal.event("takeover", step=step, seconds=seconds, pauses=pauses)
        self._journal.say(
            f"Switched to compiled blocks at step {step} ({seconds:.1f} s; earlier pauses: {len(pauses)}, "
            f"{sum(pauses):.1f} s in total, at most {max(pauses):.1f} s). Eager step: {self._step_seconds:.3g} s"
        )

    def give_up(self, why: str) -> None:
        self.stop()
        self._stay_eager(f"Blocks stay eager, as they could not be compiled beside the run: {why}. {INSTEAD}")

    def _stay_eager(self, sentence: str, recorder: cudagraph.GraphedModel | None = None) -> None:
        """Keep eager blocks, also in runs that continue this one; warn if recordings found no memory."""
        self._plan.on(PlanEvent.STAY_EAGER)
        if recorder and recorder.why_not and recorder.lacks_memory:
            recorder.give_up(recorder.why_not)
        self._choices.stays_eager = self._clock.total
        self._journal.say(sentence)

    def make_room(self) -> bool:
        """Free GPU memory: stop all compiling processes but one, or the last; return whether any was running."""
        processes = self._graphs.processes if self._graphs else None
        if processes is None or not processes.running:
            return False
        if processes.keep_one():
            self._journal.say("One process continues compiling beside the steps, as the GPU's memory is short")
        else:
            self.give_up("the GPU's memory is too small for both")
        return True

    def unused(self) -> str:
        """At the end of a run, return a sentence if it ended before its compiled blocks were used, else ""."""
        if self._graphs is None:
            return ""
        ready = f"{len(self._graphs.processes.ready)} of {counted(len(self._calls), 'graph')} ready"
        return f"The training ended before its blocks were compiled beside it ({ready}), so they ran eagerly. {INSTEAD}"

    def stop(self) -> None:
        """Stop the compiling processes, if there are any."""
        if self._graphs:
            self._graphs.processes.stop()
        self._graphs = None

    def _wait(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
