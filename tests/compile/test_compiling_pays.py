"""Whether blocks are compiled before the first step or stay eager: one estimate for all families and kinds."""

import contextlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from library import families
from library.compiler import cudagraph, gpu_memory
from library.compiler.plan import CompilePlan, PlanState
from library.config.building import build_config
from library.config.formats import read_toml
from library.recipes import preset_files
from library.recipes.shell import script_class
from library.train.choices import Choices
from library.train.compiling import background_compile
from library.train.compiling.background_compile import TOO_SMALL, BackgroundCompiler
from library.train.compiling.trial_passes import TrialPasses

CUDA = torch.device("cuda")
PRESETS = {p.id: p for p in preset_files.all_presets() if not p.is_profile}
FLUX, FP8 = "flux_train_network", {"fp8_base": True, "fp8_compute": True, "mixed_precision": "bf16"}


class Run:
    """A training on a GPU whose passes take as long as its test says, on a clock of its own."""

    def __init__(self, config, monkeypatch, steps=36, step_seconds=1.39, cold=True, done=0, choices=None, others=()):
        self.said: list[str] = []
        self.passes: list[Any] = []
        self.step_seconds, self.plan, self.now = step_seconds, CompilePlan(), 0.0
        self.choices = choices or Choices()
        journal: Any = SimpleNamespace(say=self.said.append, event=lambda *_, **__: None)
        world: Any = SimpleNamespace(device=CUDA, ranks=1 + len(others))
        world.gather = lambda value: [value, *(other(value) for other in others)]
        self.plan.log.expect("Linear", "wide")
        self.plan.begin([torch.nn.Linear(1, 1)], lambda block: None, {}, 0)
        clock: Any = SimpleNamespace(step=done, total=steps + done)
        self.compiler = BackgroundCompiler(config, world, journal, self.plan, clock, self.choices)
        monkeypatch.setattr(background_compile, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(background_compile.cache, "holds_graphs", lambda: not cold)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(gpu_memory, "free_at_peak", lambda _: 2**40)

    def begin(self):
        loss: Any = SimpleNamespace(components=SimpleNamespace(denoiser=torch.nn.Linear(1, 1)))
        batches: Any = SimpleNamespace(kinds=lambda: Counter({(1, 8, 8): 3, (1, 8, 16): 1}))
        passes = TrialPasses(batches, loss, CUDA, lambda: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TrialPasses, "run_within_limit", lambda _, kind: self.take(kind))
            patch.setattr(TrialPasses, "random_state_kept", lambda _: contextlib.nullcontext())
            self.compiler.begin(passes)
        return self.plan.state

    def take(self, kind):
        self.passes.append(kind)
        self.now += self.step_seconds


def config_of(script=FLUX, **values):
    return build_config(families.config_class(script), {"compile": True, **values}, notes=[])


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_lets_the_estimate_decide(preset, monkeypatch):
    """Of every family and kind; none switches CUDA graphs off to keep its memory, which its limit holds."""
    values = read_toml(PRESETS[preset].path)
    config = build_config(script_class(PRESETS[preset]), values, notes=[])
    assert config.compile.compile and config.compile.cuda_graphs != "false"
    size = preset.rpartition("-")[2].removesuffix("gb")  # none in the name of one for any GPU
    assert config.memory.gpu_memory_limit == (int(size) if size.isdecimal() else None)
    short, long = (Run(config, monkeypatch, steps) for steps in (3, 100_000))
    assert short.begin() is PlanState.STAYS_EAGER and "3 remaining steps" in short.said[0]
    assert long.begin() is PlanState.COMPILING and not long.said and not long.passes


@pytest.mark.parametrize(
    ("values", "steps", "step_seconds", "cold", "state", "passes"),
    [
        (FP8, 20, 1.39, True, PlanState.STAYS_EAGER, 3),  # saves 15 s of 20
        (FP8, 40, 1.39, True, PlanState.COMPILING, 3),  # saves 31 s
        (FP8, 20, 1.39, False, PlanState.COMPILING, 3),  # costs 4 s, as graphs are in the cache
        (FP8, 2000, 1.39, True, PlanState.COMPILING, 0),  # pays whatever a step takes: none is timed
        ({}, 100, 0.76, True, PlanState.STAYS_EAGER, 3),  # saves 15 s
        ({"blocks_to_swap": 20}, 200, 0.76, True, PlanState.COMPILING, 3),  # saves 30 s
        ({"blocks_to_swap": 20}, 100, 0.76, True, PlanState.STAYS_EAGER, 3),
    ],
)
def test_compiling_first_has_to_pay(values, steps, step_seconds, cold, state, passes, monkeypatch):
    run = Run(config_of(**values), monkeypatch, steps, step_seconds, cold)
    assert run.begin() is state and len(run.passes) == passes
    assert run.choices.stays_eager == (steps if state is PlanState.STAYS_EAGER else None)
    if state is PlanState.STAYS_EAGER:
        assert f"of {steps} remaining steps (eager: {step_seconds:.3g} s each)" in run.said[0]
        assert run.said[0].endswith("to compile first")
        assert run.passes == [(1, 8, 16), (1, 8, 8), (1, 8, 8)]  # the largest shows that the memory is enough


@pytest.mark.parametrize(
    "values",
    [
        {"compile_warmup": "true"},
        {"compile_warmup": "false"},
        {"compile_autotune": True},
        {"compile_fullgraph": True},
        {"compile_backend": "aot_eager"},
    ],
)
def test_options_that_say_when_to_compile_are_followed(values, monkeypatch):
    run = Run(config_of(**FP8, **values), monkeypatch, steps=1)
    assert run.begin() is PlanState.COMPILING and not run.passes


def test_a_resumed_run_keeps_what_its_state_decided(monkeypatch):
    undecided = Run(config_of(**FP8), monkeypatch, steps=1, done=35)
    assert undecided.begin() is PlanState.COMPILING and not undecided.passes
    eager = Run(config_of(**FP8), monkeypatch, steps=1, done=35, choices=Choices(stays_eager=36))
    assert eager.begin() is PlanState.STAYS_EAGER and not eager.passes
    assert "as in the run that is continued" in eager.said[0]


def test_processes_decide_together(monkeypatch):
    slower = Run(config_of(**FP8), monkeypatch, 20, others=[lambda value: value])
    assert slower.begin() is PlanState.STAYS_EAGER
    cold = [lambda value: value if isinstance(value, bool) else (value[0], 10 * value[1])]
    slower = Run(config_of(**FP8), monkeypatch, 20, others=cold)
    assert slower.begin() is PlanState.COMPILING  # steps of 13.9 s
    full = [lambda value: value if isinstance(value, bool) else (TOO_SMALL, 0.0)]
    full_run = Run(config_of(**FP8), monkeypatch, 20, others=full)
    assert full_run.begin() is PlanState.COMPILING and TOO_SMALL in full_run.said[0]


@pytest.mark.parametrize("where", ["in the pass", "beside the optimizer"])
def test_where_eager_steps_do_not_fit_blocks_are_compiled(where, monkeypatch):
    run = Run(config_of(**FP8), monkeypatch, steps=20)
    if where == "in the pass":
        run.take = lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory."))
    else:
        monkeypatch.setattr(gpu_memory, "free_at_peak", lambda _: cudagraph.SPARE_BYTES)
    assert run.begin() is PlanState.COMPILING and TOO_SMALL in run.said[0]


def test_steps_that_stay_eager_warn_if_they_found_no_memory_for_recordings(monkeypatch, caplog):
    run = Run(config_of(), monkeypatch)
    denoiser = torch.nn.Linear(1, 1)
    recorder = cudagraph.GraphedModel(denoiser, run.plan)
    monkeypatch.setattr(TrialPasses, "recorder", property(lambda _: recorder))

    def lose_recordings(kind):
        recorder.lacks_memory = True
        recorder.give_up("the GPU's memory is too small")
        Run.take(run, kind)

    run.take = lose_recordings
    assert run.begin() is PlanState.STAYS_EAGER
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert warnings == ["CUDA graphs are no longer recorded: the GPU's memory is too small"]
