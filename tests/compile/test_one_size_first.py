"""With many sizes of image, one is compiled before the first step, and no number of the training is another."""

import contextlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from library.compiler import cudagraph
from library.compiler.plan import CompilePlan, PlanEvent, PlanState
from library.config.formats import to_toml
from library.config.problems import ConfigError
from library.train.compiling.precompile import Precompiler, kind_to_compile
from library.train.compiling.trial_passes import TrialPasses
from tests.source import ROOT
from tests.training import (
    FEW,
    LORA_OF_EACH_KIND,
    ONE_ADAPTER,
    Outcome,
    cached,
    config_of,
    pictures,
    ranks,
    runs_in,
    train,
)

SIDES = (64, 96, 128, 160)
TWELVE = [(wide, high) for wide in SIDES for high in SIDES if wide * high <= 128 * 128][:12]
VALUES = {
    "resolution": "128",
    "enable_bucket": True,
    "bucket_no_upscale": True,
    "bucket_reso_steps": 32,
    "min_bucket_reso": 32,
    "compile_backend": "eager",
    "compile_blocks": "single:all",
    "network_args": ONE_ADAPTER,
    "mixed_precision": "no",
    "cache_latents": True,
    "seed": 5,
}
ONE_BY_ONE = {"compile": True, "compile_dynamic": "false"}
CASES: dict[str, dict[str, Any]] = {
    "": {},
    "accumulated": {"gradient_accumulation_steps": 3},
    "swapped": {"blocks_to_swap": 1, "gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def twelve(tmp_path_factory):
    return cached(pictures(tmp_path_factory.mktemp("twelve"), TWELVE, repeats=1))


def said(done):
    return (done.folder / "log.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_each_of_twelve_sizes_is_compiled_in_the_first_step_that_meets_it(demo, twelve, tmp_path, case):
    def run(name, **values):
        given = VALUES | CASES[case] | {"max_train_epochs": 2, "train_data_dir": twelve} | values
        return train(config_of(demo, "flux_train_network", output_dir=tmp_path / name, **given))

    eager, compiled = run("eager"), run("compiled", **ONE_BY_ONE)
    in_steps = run("in-steps", **ONE_BY_ONE, compile_warmup="false")
    assert compiled.losses == in_steps.losses and compiled.losses == pytest.approx(eager.losses, rel=1e-6)
    pairs = zip(compiled.tensors().values(), in_steps.tensors().values(), strict=True)
    assert all(torch.equal(one, same) for one, same in pairs)
    events, facts = compiled.events("compile"), compiled.facts["compile"]
    forward = [event for event in events if event["forward"]]
    assert len(forward) == facts["num_graphs"] == sum(facts["predicted"].values()) and not facts["recompiles"]
    assert len({event["bucket"] for event in events if event["step"] == 0}) == 1
    assert sum(event["step"] == 0 for event in forward) == 1  # a kind of block, so as many graphs
    in_epoch = len(TWELVE) // CASES[case].get("gradient_accumulation_steps", 1)
    assert max(event["step"] for event in events) <= in_epoch  # no size is compiled again in the second epoch
    lost = {str(entry["cause"]): entry["seconds"] for entry in compiled.facts["lost_seconds"]}
    assert lost["compiling"] > 0.05 and "s went to other work since the first step: " in said(compiled)


@pytest.mark.parametrize("script", LORA_OF_EACH_KIND)
def test_gradients_of_many_sizes_are_those_of_eager(model_of, script):
    """Of twelve, and of four for SDXL, whose blocks take the longest to compile."""
    is_unet = script.startswith("sdxl")
    sizes = tuple((high // 8, wide // 8) for wide, high in TWELVE[:: 3 if is_unet else 1])
    values = {"compile_blocks": FEW[script], "network_args": () if is_unet else ONE_ADAPTER}
    eager = model_of(script, sizes, **values)
    plain = eager.gradients(sizes)
    compiled = model_of(script, sizes, **values, compile=True, compile_dynamic="false")
    for one, same in zip(compiled.gradients(sizes), plain, strict=True):
        torch.testing.assert_close(one, same, rtol=1e-4, atol=1e-6)
    compiled.log.drain()
    summary = compiled.log.summary()
    assert summary["graphs"] == summary["predicted"] and not summary["recompiles"]


def test_one_graph_for_all_sizes_is_compiled_once(demo, twelve, tmp_path):
    values = VALUES | {"compile": True, "max_train_steps": 12, "train_data_dir": twelve, "output_dir": tmp_path}
    done = train(config_of(demo, "flux_train_network", **values))
    assert {event["step"] for event in done.events("compile")} == {0}
    assert done.facts["compile"]["num_graphs"] == 1 and not done.facts["compile"]["recompiles"]


def test_a_resumed_training_compiles_the_size_that_comes_next(demo, twelve, tmp_path):
    values = VALUES | ONE_BY_ONE | {"max_train_steps": 6, "save_state": True, "save_every_n_steps": 3}

    def run(name, **changes):
        given = values | {"train_data_dir": twelve, "output_dir": tmp_path / name} | changes
        return train(config_of(demo, "flux_train_network", **given))

    first = run("first")
    (state,) = first.file.parent.glob("*00000003-state")
    resumed = run("resumed", resume=state)
    assert resumed.losses == first.losses[3:]
    in_step = {event["step"]: event["bucket"] for event in first.events("compile")}
    before = [event["bucket"] for event in resumed.events("compile") if event["step"] == 3]
    assert before and before[0] == in_step.get(4, before[0]) and len(set(before)) == 1


def test_each_process_compiles_the_size_that_it_draws(demo, twelve):
    """Processes draw different sizes where batches of one size do not suffice for all."""
    from library import data
    from library.data.loading import Batches

    config = config_of(demo, "flux_train_network", train_data_dir=twelve, **VALUES)
    ranks = [Batches(data.scan(config), config, 5, rank, 2) for rank in (0, 1)]
    for batches in ranks:
        batches.images.latents = batches.images.text = None
        kinds = [kind_to_compile(batches, each_size=True)]
        for epoch, index in ((1, 3), (1, len(batches)), (2, 0)):
            batches.go_to(epoch, index)
            kinds.append(kind_to_compile(batches, each_size=True))
        bucket = [batches.images.items[draw.images[0]].fit.bucket for draw in batches.draws(1) + batches.draws(2)]
        length = len(batches)
        expected = [bucket[0], bucket[3], bucket[length], bucket[length]]
        assert [(kind[2] * 8, kind[1] * 8) for kind in kinds] == expected
        batches.go_to(1, 4)
        width, height = bucket[3]  # the batch of the step that has begun
        assert kind_to_compile(batches, each_size=True, in_step=True)[1:] == (height // 8, width // 8)
    assert len({kind_to_compile(batches, each_size=False) for batches in ranks}) == 1
    first = [kind_to_compile(batches, each_size=True) for batches in ranks]
    assert first[0] != first[1]


def test_two_processes_that_draw_different_sizes_train_as_without_compiling(demo, twelve, tmp_path):
    """Twelve batches of different sizes are six steps, in each of which both processes have another."""
    losses = {}
    for compiled in (True, False):
        folder = tmp_path / str(compiled)
        values = {**VALUES, "max_train_epochs": 2, "train_data_dir": twelve, "output_dir": folder, "output_name": "m"}
        values |= ONE_BY_ONE if compiled else {}
        config = config_of(demo, "flux_train_network", **values)
        tmp_path.joinpath("run.toml").write_text(to_toml(config), encoding="utf-8")
        script = ROOT / "sd-scripts" / "flux_train_network.py"
        for process in ranks([script, "--config_file", tmp_path / "run.toml"]):
            said = process.communicate(timeout=300)[0]
            assert process.returncode == 0, said
        (run,) = runs_in(folder)
        done = Outcome(folder / "m.safetensors", run)
        losses[compiled] = done.losses
        if compiled:
            before = {event["bucket"] for event in done.events("compile") if event["step"] == 0}
            assert len(before) == 1 and not done.facts["compile"]["recompiles"]
    assert len(losses[True]) == 12 and losses[True] == pytest.approx(losses[False], rel=1e-5)


class Model(torch.nn.Linear):
    """A denoiser that records: a pass of a size that has no recording makes one."""

    def __init__(self, recorder):
        super().__init__(1, 1)
        self.__dict__["_recorder"] = recorder


@pytest.mark.parametrize("records", [True, False])
def test_of_twelve_sizes_one_is_recorded_before_the_first_step(records, monkeypatch):
    """And where none is recorded, the largest shows whether the memory is enough."""
    plan, passed, nothing = CompilePlan(), [], lambda *_: None
    recorder = SimpleNamespace(automatic=False, why_not="" if records else "it cannot", forget=nothing)
    loss: Any = SimpleNamespace(components=SimpleNamespace(denoiser=Model(recorder)), compile_log=plan.log)
    loss.warm_up = lambda batch, device: passed.append(batch.kind)
    kinds = {(1, high // 8, wide // 8): 1 + (wide == high == 96) for wide, high in TWELVE}
    batches: Any = SimpleNamespace(kinds=lambda: Counter(kinds), shapes=kinds, index=0)
    batches.example = lambda kind: SimpleNamespace(kind=kind, bucket="")
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    world.accelerator = SimpleNamespace(local_main_process_first=contextlib.nullcontext)
    options = SimpleNamespace(compile_warmup="true", compile_compare_steps=0, ahead=True, dynamic=None)
    options.why_not_in_background, options.compile_fallback = lambda _: "it is true", True
    config: Any = SimpleNamespace(compile=options, distributed=SimpleNamespace(fsdp=False))
    config.steps = SimpleNamespace(resume=None, gradient_accumulation_steps=1)
    clock: Any = SimpleNamespace(step=0, total=50, done=False)
    journal: Any = SimpleNamespace(phase=nothing, say=nothing, event=nothing, warn=nothing)
    plan.log.expect("Linear", "wide")
    plan.begin([torch.nn.Linear(1, 1)], lambda block: None, {}, 0)
    Precompiler(config, world, journal, plan, clock).prepare(TrialPasses(batches, loss, world.device, nothing))
    assert passed == ([(1, 12, 12)] if records else [(1, 12, 12), (1, 16, 16)])


def test_sizes_that_are_only_looked_at_are_not_recorded():
    recorder = cudagraph.GraphedModel(torch.nn.Linear(1, 1), CompilePlan())
    passes = TrialPasses(None, SimpleNamespace(components=SimpleNamespace(denoiser=Model(recorder))), None, None)
    with passes.unrecorded():
        assert recorder.record(lambda: None, None) is None and not recorder.why_not
    assert recorder.size_limit == cudagraph.MAX_SIZES
    with TrialPasses(None, SimpleNamespace(components=SimpleNamespace(denoiser=Model(None))), None, None).unrecorded():
        pass


@pytest.mark.parametrize(("compiled_before", "whole"), [(True, False), (True, True), (False, False)])
def test_a_size_that_cannot_be_compiled_later_does_not_end_the_training(compiled_before, whole):
    plan, warned = CompilePlan(), []
    plan.on(PlanEvent.COMPILE)
    if compiled_before:
        plan.on(PlanEvent.PROVE)
    options = SimpleNamespace(compile_fallback=False, compile_fullgraph=whole)
    config: Any = SimpleNamespace(compile=options)
    journal: Any = SimpleNamespace(warn=warned.append)
    nothing: Any = SimpleNamespace(device=torch.device("cpu"))
    precompiler = Precompiler(config, nothing, journal, plan, nothing)
    if compiled_before and not whole:
        precompiler.give_up(RuntimeError("no such kernel"))
        torch.compiler.set_stance("default")
        assert plan.state is PlanState.GIVEN_UP and "no such kernel" in str(warned[0])
    else:
        with pytest.raises(ConfigError, match="no such kernel"):
            precompiler.give_up(RuntimeError("no such kernel"))
