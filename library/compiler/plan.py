"""When the blocks of a denoiser are compiled: named states, and one table of the events that lead between them.

The plan decides and begins compiling; the log records the results. The actions in a training (running batches, starting
a process, loading graphs) are in `library.train.compiling`. Whether steps are recorded as CUDA graphs is a separate
question: eager steps are, too.
"""

import contextlib
import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType

from torch import nn

from library.compiler import torch_private
from library.compiler.log import CompileLog
from library.compiler.speedup import Speedup
from library.config.problems import MessageLike


class PlanState(enum.Enum):
    """What the blocks of a training do."""

    OFF = enum.auto()  # there is nothing to compile
    EAGER = enum.auto()  # all run eagerly for now and are compiled later (compile_from_step)
    MEASURING = enum.auto()  # eager steps are timed first, for comparison (compile_compare_steps)
    BESIDE = enum.auto()  # all run eagerly while another process compiles them into the cache
    COMPILING = enum.auto()  # those that are due compile when they run next
    COMPILED = enum.auto()  # those that are due have their graphs
    STAYS_EAGER = enum.auto()  # none is compiled: it does not pay, or failed beside the run
    GIVEN_UP = enum.auto()  # compiling failed, and the run continues without (compile_fallback)


class PlanEvent(enum.Enum):
    """An event of a plan."""

    MEASURE = enum.auto()  # time eager steps first
    POSTPONE = enum.auto()  # run all blocks eagerly for now
    COMPILE = enum.auto()  # compile blocks that have become due
    PROVE = enum.auto()  # every class that is due has a graph
    START_PROCESS = enum.auto()  # another process compiles
    TAKE_OVER = enum.auto()  # its graphs are loaded: run all blocks compiled
    STAY_EAGER = enum.auto()  # it does not pay, or the process has failed
    FAIL = enum.auto()  # the compiler failed in this process


# Why: docs/decisions/2026-11-28-one-plan-for-compiling.md
TRANSITIONS: Mapping[tuple[PlanState, PlanEvent], PlanState] = MappingProxyType(
    {
        # Before the first step.
        (PlanState.OFF, PlanEvent.COMPILE): PlanState.COMPILING,
        (PlanState.OFF, PlanEvent.POSTPONE): PlanState.EAGER,
        (PlanState.OFF, PlanEvent.MEASURE): PlanState.MEASURING,
        (PlanState.OFF, PlanEvent.FAIL): PlanState.GIVEN_UP,  # this machine cannot compile
        (PlanState.COMPILING, PlanEvent.POSTPONE): PlanState.EAGER,  # steps are tried without compiled blocks
        (PlanState.EAGER, PlanEvent.START_PROCESS): PlanState.BESIDE,
        (PlanState.EAGER, PlanEvent.STAY_EAGER): PlanState.STAYS_EAGER,
        # At a step.
        (PlanState.EAGER, PlanEvent.COMPILE): PlanState.COMPILING,
        (PlanState.MEASURING, PlanEvent.COMPILE): PlanState.COMPILING,
        (PlanState.COMPILING, PlanEvent.COMPILE): PlanState.COMPILING,  # another class of blocks is due
        (PlanState.COMPILED, PlanEvent.COMPILE): PlanState.COMPILING,  # likewise, in a later step
        (PlanState.COMPILING, PlanEvent.PROVE): PlanState.COMPILED,
        (PlanState.BESIDE, PlanEvent.TAKE_OVER): PlanState.COMPILED,
        (PlanState.BESIDE, PlanEvent.STAY_EAGER): PlanState.STAYS_EAGER,
        # An error of the compiler, from whatever the step compiles: an optimizer may compile code of its own.
        (PlanState.EAGER, PlanEvent.FAIL): PlanState.GIVEN_UP,
        (PlanState.MEASURING, PlanEvent.FAIL): PlanState.GIVEN_UP,
        (PlanState.BESIDE, PlanEvent.FAIL): PlanState.GIVEN_UP,
        (PlanState.COMPILING, PlanEvent.FAIL): PlanState.GIVEN_UP,
        (PlanState.COMPILED, PlanEvent.FAIL): PlanState.GIVEN_UP,
        (PlanState.STAYS_EAGER, PlanEvent.FAIL): PlanState.GIVEN_UP,
    }
)


class ImpossibleEvent(RuntimeError):
    """An event that the state of a plan does not allow: an error of this program."""


class CompilePlan:
    """Which blocks of one denoiser are compiled by now, and what comes next; `log` records the graphs."""

    def __init__(self, log: CompileLog | None = None) -> None:
        self.log = log or CompileLog()
        self.state = PlanState.OFF
        self._blocks: Collection[nn.Module] = ()
        self._compile_block: Callable[[nn.Module], None] = lambda block: None
        self._first_steps: Mapping[str, int] = {}  # see `begin`

    @property
    def active(self) -> bool:
        """Whether blocks are compiled, or may still be."""
        return self.state not in (PlanState.OFF, PlanState.GIVEN_UP)

    @property
    def measuring(self) -> bool:
        return self.state is PlanState.MEASURING

    def on(self, event: PlanEvent) -> None:
        """Go to the next state. Raises ImpossibleEvent if the state has no such event."""
        if (self.state, event) not in TRANSITIONS:
            raise ImpossibleEvent(f"{event.name} is impossible in the state {self.state.name} of compiling")
        self.state = TRANSITIONS[self.state, event]

    def begin(
        self,
        blocks: Collection[nn.Module],
        compile_block: Callable[[nn.Module], None],
        first_steps: Mapping[str, int],
        compare_steps: int,
    ) -> None:
        """Compile the blocks now, after `compare_steps` eager ones, or each class in its step (1 or later).

        `first_steps` maps classes of blocks to their steps, "" to that of all others; empty: all now. The log expects
        these blocks already.
        """
        if not blocks:
            return
        self._blocks, self._compile_block = blocks, compile_block
        if compare_steps:
            self.log.speedup = Speedup(compare_steps)
            self._postpone_all(PlanEvent.MEASURE)
        elif first_steps:
            self._first_steps = first_steps
            self._postpone_all(PlanEvent.POSTPONE)
            self.compile_due(1)
        else:
            self.compile_all()

    def due(self, step: int) -> set[str]:
        """Return the classes of eager blocks that `compile_from_step` wants compiled in this step."""
        steps = self._first_steps
        return {kind for kind in self.log.later if steps and steps.get(kind, steps.get("", 0)) <= step}

    def compile_due(self, step: int) -> bool:
        """Compile the blocks that are due; return whether there were any. Call it only between steps."""
        due = self.due(step)
        if due:
            self._compile(due, PlanEvent.COMPILE)
        return bool(due)

    def compile_all(self) -> None:
        self._compile({*self.log.expected}, PlanEvent.COMPILE)

    def take_over(self) -> None:
        """Run all blocks compiled, with graphs that are loaded."""
        self._compile({*self.log.expected}, PlanEvent.TAKE_OVER)

    def postpone(self) -> None:
        """Run all blocks eagerly until they are compiled again."""
        for block in self._blocks:
            torch_private.forget_compiled_call(block)
        self._postpone_all(PlanEvent.POSTPONE)

    @contextlib.contextmanager
    def compiled_alone(self, block: nn.Module) -> Iterator[None]:
        """Compile one block within this context while the others run eagerly. Blocks of its shape reuse its graphs."""
        self._compile_block(block)
        try:
            yield
        finally:
            torch_private.forget_compiled_call(block)

    def give_up(self, why: MessageLike) -> None:
        self.on(PlanEvent.FAIL)
        self.log.fallback = why

    def _compile(self, kinds: Collection[str], event: PlanEvent) -> None:
        self.on(event)
        for block in self._blocks:
            if type(block).__name__ in kinds:
                self._compile_block(block)
        self.log.later.difference_update(kinds)

    def _postpone_all(self, event: PlanEvent) -> None:
        self.on(event)
        self.log.later = {*self.log.expected}
