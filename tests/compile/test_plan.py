"""The plan for compiling: its table of states and events, walked as trainings walk it, on a tiny model."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported

from library.compiler.blocks import compile_model
from library.compiler.plan import TRANSITIONS, CompilePlan, ImpossibleEvent, PlanEvent, PlanState
from library.config.problems import ConfigError
from library.memory import prepare
from library.train.choices import Choices
from library.train.compiling import background_compile, background_graphs
from library.train.compiling.background_compile import BackgroundCompiler
from library.train.compiling.precompile import Precompiler
from library.train.compiling.trial_passes import TrialPasses
from tests import source
from tests.compile.test_background_compile import Ready
from tests.compile.test_compile_utils import INPUTS, Denoiser, gradients, options

CPU = torch.device("cpu")
BROKEN = Unsupported("no such operation", gb_type="no such operation")


class Training:
    """What of a training takes part in compiling, around the model of a few products."""

    def __init__(self, step: int = 0, warmup: str = "true", **values: Any) -> None:
        self.model, self.plan, self.choices = Denoiser(), CompilePlan(), Choices()
        clock: Any = SimpleNamespace(step=step, total=20, done=False)
        self.clock = clock
        chosen = options(compile_backend="eager", compile_fallback=True, compile_warmup=warmup, ahead=True, **values)
        chosen.why_not_in_background = lambda config: "it is not asked for" if warmup == "true" else ""
        chosen.compile_autotune = chosen.records_graphs = False
        chosen.compile_compare_steps = values.get("compile_compare_steps", 0)
        chosen.dynamic = None
        config: Any = SimpleNamespace(
            compile=chosen,
            steps=SimpleNamespace(resume=None, gradient_accumulation_steps=1),
            distributed=SimpleNamespace(fsdp=False),
            optim=SimpleNamespace(stepped_early=""),
        )
        self.fails: list[Exception] = []  # errors of the next passes
        compile_model(
            chosen, self.model, [list(self.model.blocks), list(self.model.others)], False, "", INPUTS, plan=self.plan
        )
        nothing = lambda *_, **__: None  # noqa: E731
        journal: Any = SimpleNamespace(phase=nothing, say=nothing, event=nothing, warn=nothing)
        accelerator = SimpleNamespace(local_main_process_first=contextlib.nullcontext)
        world: Any = SimpleNamespace(device=CPU, ranks=1, accelerator=accelerator)
        self.precompiler = Precompiler(config, world, journal, self.plan, clock, self.choices)
        batch = SimpleNamespace(bucket="64x64")
        batches: Any = SimpleNamespace(
            kinds=lambda: Counter({(2, 6, 4): 1}), example=lambda kind: batch, shapes={(6, 4): 1}
        )
        parts = SimpleNamespace(denoiser=self.model, encoders={})
        method = SimpleNamespace(trained_parts={})
        loss: Any = SimpleNamespace(components=parts, method=method, compile_log=self.plan.log, warm_up=self.run)
        self.passes = TrialPasses(batches, loss, CPU, nothing)

    def run(self, *_: Any) -> None:
        if self.fails:
            raise self.fails.pop()
        gradients(self.model, (6,))

    def prepare(self) -> "Training":
        self.precompiler.prepare(self.passes)
        return self

    def steps(self, number: int) -> "Training":
        for _ in range(number):
            self.clock.step += 1
            self.precompiler.switch_when_ready()
            self.run()
            self.precompiler.step_done(self.clock.step, None if self.precompiler.note() else 1.0)
        return self

    def fail(self) -> "Training":
        assert self.precompiler.recover(BROKEN, self.model)
        return self


def too_few_steps_left(monkeypatch: pytest.MonkeyPatch) -> Training:
    monkeypatch.setattr(BackgroundCompiler, "why_not", lambda *_: "")
    return Training(warmup="auto").prepare()


def no_memory_for_eager_steps(_: Any) -> Training:
    training = Training(warmup="beside")
    training.fails.append(torch.OutOfMemoryError("CUDA out of memory."))
    return training.prepare()


def process_that_fails(_: Any) -> Training:
    training = Training(warmup="beside").prepare()
    Ready.made.ready, Ready.made.failures, Ready.made.running = [], ["no compiler"], False
    return training.steps(1)


def machine_that_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError("there is no compiler")

    monkeypatch.setattr(prepare, "compile_model", refuse)
    monkeypatch.setattr(prepare, "compile_targets", lambda *_: ([], {}, {}))
    chosen = SimpleNamespace(compile=True, compile_scope="blocks", compile_fallback=True)
    model, family, plan = Denoiser(), SimpleNamespace(name="tiny", block_classes=()), CompilePlan()
    config: Any = SimpleNamespace(compile=chosen)
    prepare._compile(prepare._Preparation(model, family, config, CPU, (), True, plan))  # type: ignore[bad-argument-type]
    assert plan.log.fallback == "there is no compiler"
    return SimpleNamespace(plan=plan)


BY_CLASS = {"Block": 1, "Other": 3}
# A training, the events that its plan has, and the state that they lead to.
WALKS: dict[str, tuple[Any, str, PlanState]] = {
    "compiled before the first step": (lambda _: Training().prepare().steps(2), "COMPILE PROVE", PlanState.COMPILED),
    "compile_from_step = 3": (
        lambda _: Training(first_steps=lambda: {"": 3}).prepare().steps(3),
        "POSTPONE COMPILE PROVE",
        PlanState.COMPILED,
    ),
    "one class of blocks after the other": (
        lambda _: Training(first_steps=lambda: BY_CLASS).prepare().steps(3),
        "POSTPONE COMPILE PROVE COMPILE PROVE",
        PlanState.COMPILED,
    ),
    "the same, resumed after both steps": (
        lambda _: Training(step=4, first_steps=lambda: BY_CLASS).prepare().steps(1),
        "POSTPONE COMPILE COMPILE PROVE",
        PlanState.COMPILED,
    ),
    "compile_compare_steps = 2": (
        lambda _: Training(compile_compare_steps=2).prepare().steps(3),
        "MEASURE COMPILE PROVE",
        PlanState.COMPILED,
    ),
    "compiled beside the run": (
        lambda _: Training(warmup="beside").prepare().steps(3),
        "COMPILE POSTPONE START_PROCESS TAKE_OVER",
        PlanState.COMPILED,
    ),
    "a process that fails": (process_that_fails, "COMPILE POSTPONE START_PROCESS STAY_EAGER", PlanState.STAYS_EAGER),
    "too few steps are left": (too_few_steps_left, "COMPILE POSTPONE STAY_EAGER", PlanState.STAYS_EAGER),
    "no memory for eager steps": (no_memory_for_eager_steps, "COMPILE POSTPONE COMPILE PROVE", PlanState.COMPILED),
    "a machine that cannot compile": (machine_that_cannot_compile, "FAIL", PlanState.GIVEN_UP),
    # An error of the compiler, in every other state.
    "failing before its step": (
        lambda _: Training(first_steps=lambda: {"": 3}).prepare().steps(1).fail().steps(3),
        "POSTPONE FAIL",
        PlanState.GIVEN_UP,
    ),
    "failing while eager steps are timed": (
        lambda _: Training(compile_compare_steps=3).prepare().steps(1).fail().steps(3),
        "MEASURE FAIL",
        PlanState.GIVEN_UP,
    ),
    "failing beside the run": (
        lambda _: Training(warmup="beside").prepare().fail().steps(3),
        "COMPILE POSTPONE START_PROCESS FAIL",
        PlanState.GIVEN_UP,
    ),
    "failing before anything is proven": (lambda _: Training().fail(), "COMPILE FAIL", PlanState.GIVEN_UP),
    "failing in a later step": (lambda _: Training().prepare().fail(), "COMPILE PROVE FAIL", PlanState.GIVEN_UP),
    "failing though no block is compiled": (
        lambda step_plan: too_few_steps_left(step_plan).fail(),
        "COMPILE POSTPONE STAY_EAGER FAIL",
        PlanState.GIVEN_UP,
    ),
}


def states_after(events: str) -> list[PlanState]:
    states = [PlanState.OFF]
    for event in events.split():
        states.append(TRANSITIONS[states[-1], PlanEvent[event]])
    return states


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch, forget: Any) -> Iterator[list[str]]:
    """The events of all plans, in their order; a process that compiles is one that has."""
    found, on = [], CompilePlan.on
    monkeypatch.setattr(CompilePlan, "on", lambda self, event: found.append(event.name) or on(self, event))
    monkeypatch.setattr(background_compile, "CompileProcesses", Ready)
    monkeypatch.setattr(background_compile, "compile_job", lambda *given: {"calls": given[3]})
    monkeypatch.setattr(background_compile.families, "compiling_cost", lambda config: (0, 1000.0))
    monkeypatch.setattr(background_compile, "fingerprint_settings", lambda *given: "settings")
    monkeypatch.setattr(background_graphs.torch_private, "import_inductor", lambda: None)
    yield found
    torch.compiler.set_stance("default")


@pytest.mark.parametrize("walk", WALKS)
def test_a_training_goes_from_state_to_state_as_the_table_says(walk, walked, monkeypatch):
    training, events, state = WALKS[walk]
    plan = training(monkeypatch).plan
    assert walked == events.split() and plan.state is state is states_after(events)[-1]
    compiled = {block._compiled_call_impl is not None for block in plan._blocks}
    if state is PlanState.COMPILED:
        blocks = {event.block for event in plan.log.events}
        assert compiled == {True} and blocks == {"Block", "Other"} and not plan.log.later and not plan.log.unproven()
    elif state is PlanState.STAYS_EAGER:
        assert compiled == {False} and plan.log.later == {"Block", "Other"}
    assert bool(plan.log.fallback) is (state is PlanState.GIVEN_UP)


def test_every_transition_of_the_table_is_walked_and_so_every_state_is_reached():
    walked_transitions = {
        (state, PlanEvent[event])
        for _, events, _ in WALKS.values()
        for state, event in zip(states_after(events), events.split(), strict=False)
    }
    assert walked_transitions == set(TRANSITIONS)
    assert {state for _, events, _ in WALKS.values() for state in states_after(events)} == set(PlanState)
    assert {event for _, event in TRANSITIONS} == set(PlanEvent)


def test_no_block_is_compiled_once_that_was_decided():
    assert not [event for state, event in TRANSITIONS if state is PlanState.GIVEN_UP]
    assert [event for state, event in TRANSITIONS if state is PlanState.STAYS_EAGER] == [PlanEvent.FAIL]


@pytest.mark.parametrize("state", PlanState)
def test_an_event_that_the_table_does_not_have_is_an_error_and_changes_nothing(state):
    for event in PlanEvent:
        plan = CompilePlan()
        plan.state = state
        if (state, event) in TRANSITIONS:
            plan.on(event)
            assert plan.state is TRANSITIONS[state, event]
        else:
            with pytest.raises(ImpossibleEvent, match=f"{event.name} is impossible in the state {state.name}"):
                plan.on(event)
            assert plan.state is state


def test_each_state_has_its_sentence_in_the_page_on_the_architecture():
    page = (source.ROOT / "docs/dev/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([A-Z].+\.) \|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == [state.name for state in PlanState]
