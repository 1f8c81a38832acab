"""Compiling before the first step: one size, and no number of the training is another."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from library.compiler.plan import CompilePlan, PlanState
from library.train.compiling.precompile import Precompiler
from library.train.compiling.trial_passes import TrialPasses
from tests.training import ONE_ADAPTER, config_of, problems_and_remarks, train

COMPILED = {"compile": True, "compile_backend": "aot_eager"}
CASES = {
    "flux_train_network": {
        "compile_blocks": "single:all",  # the next case has blocks of both kinds
        "network_args": ONE_ADAPTER,
        "compile_backend": "eager",
        **{"gradient_checkpointing": True, "blocks_to_swap": 2, "network_dropout": 0.2, "cache_latents": False},
        **{"fp8_base": True, "mixed_precision": "bf16", "gradient_accumulation_steps": 2},
        **{"validation_split": 0.3, "sample_every_n_steps": 2, "cache_text_encoder_outputs": False},
    },
    "flux_train": {
        **{
            "fused_backward_pass": True,
            "optimizer_type": "Adafactor",
            "compile_dynamic": "false",
            "compile_backend": "eager",
        },
        **{
            "blocks_to_swap": 2,
            "max_grad_norm": 0.0,
            "optimizer_args": ("relative_step=False", "scale_parameter=False"),
        },
    },
    "sdxl_train_network": {
        "compile_blocks": "transformer:all",
        "learning_rate": 1e-3,
        "cache_text_encoder_outputs": False,
    },
}


def expect_blocks(plan: CompilePlan, first_steps: Any = (), compare_steps: int = 0) -> None:
    """A plan for one block, of the class Linear, that is never compiled in earnest."""
    plan.log.expect("Linear", "wide")
    plan.begin([torch.nn.Linear(1, 1)], lambda block: None, dict(first_steps), compare_steps)


@pytest.mark.parametrize("script", CASES)
def test_one_size_is_compiled_before_the_first_step_and_no_number_changes(demo, shapes, tmp_path, script):  # noqa: F811
    found, prompts = {}, tmp_path / "prompts.txt"
    prompts.write_text("zorb toy --w 64 --h 96 --s 1 --d 1", encoding="utf-8")
    for warm in ("false", "true"):
        values = {"resolution": "96", "train_batch_size": 2, "max_train_steps": 4, "output_dir": tmp_path / warm}
        values |= {
            "train_data_dir": shapes,
            "compile_warmup": warm,
            "sample_prompts": prompts,
            **COMPILED,
            **CASES[script],
        }
        found[warm] = train(config_of(demo, script, **values))
    cold, warm = found["false"], found["true"]
    assert warm.losses == cold.losses
    assert all(torch.equal(a, b) for a, b in zip(warm.tensors().values(), cold.tensors().values(), strict=True))
    each_size = CASES[script].get("compile_dynamic") == "false"
    assert 0 not in {event["step"] for event in cold.events("compile")}
    before = [event for event in warm.events("compile") if event["step"] == 0]
    assert len({event["bucket"] for event in before}) == 1 and (each_size or before == warm.events("compile"))
    assert {event["bucket"] for event in warm.events("compile")} <= {"64x64", "128x64", "64x128"} | {"64x96", "96x64"}
    told = warm.facts["compile"]
    assert told["graphs"] == told["predicted"] == cold.facts["compile"]["graphs"] and not told["recompiles"]
    graphs = sum(event["forward"] for event in before)
    assert each_size == (graphs < sum(told["graphs"].values()))
    phases = [(e["done"], e["total"]) for e in warm.events("phase") if e["name"] == "compiling"]
    assert phases[0] == (0, graphs) and phases[-1] == (graphs, graphs)


def test_more_steps_to_compare_with_than_there_are_is_reported_before_the_first():
    told, plan, clock = [], CompilePlan(), SimpleNamespace(step=2, total=6, done=False)
    chosen = SimpleNamespace(compile_compare_steps=4, compile_warmup="false", ahead=False)
    chosen.why_not_in_background = lambda config: "compile_compare_steps says when compiling begins"
    journal = SimpleNamespace(warn=told.append)
    precompiler = Precompiler(SimpleNamespace(compile=chosen), None, journal, plan, clock)
    passes = TrialPasses(None, SimpleNamespace(components=SimpleNamespace(denoiser=torch.nn.Identity())), None, None)
    expect_blocks(plan, compare_steps=4)
    precompiler.prepare(passes)
    assert [str(text).partition(":")[0] for text in told] == ["compile_compare_steps = 4"]
    chosen.compile_compare_steps = 3
    precompiler.prepare(passes)
    assert len(told) == 1 and plan.measuring


@pytest.mark.parametrize(
    ("script", "blocks", "needed"),  # for three sizes of image, of which two have as many tokens
    [
        ("flux_train_network", "single:all", 2),
        ("sdxl_train_network", "transformer:all", 2),
        ("sdxl_train_network", "transformer:all,resnet:0", 3),
    ],
)
def test_a_limit_below_the_graphs_of_a_block_is_reported_in_the_check(demo, shapes, tmp_path, script, blocks, needed):
    def told(limit, whole, dynamic="false"):
        values = {"compile_cache_size_limit": limit, "compile_fullgraph": whole, "compile_dynamic": dynamic}
        options = {"train_data_dir": shapes, "resolution": "96", "output_dir": tmp_path, "compile_blocks": blocks}
        check_findings = problems_and_remarks(config_of(demo, script, **options, **COMPILED, **values))
        return [
            [text for text in texts if str(text).startswith("compile_cache_size_limit = ")] for texts in check_findings
        ]

    too_few = (
        f"compile_cache_size_limit = {needed - 1}: blocks need {needed} graphs for the image sizes of this data set, "
    )
    (stops, (remark,)), ((stop,), remarks) = told(needed - 1, whole=False), told(needed - 1, whole=True)
    assert not stops and not remarks and remark == stop and str(stop).startswith(too_few)
    assert told(needed, whole=True) == told(1, whole=True, dynamic="auto") == [[], []]


@pytest.mark.parametrize(("step", "recorded"), [(0, [(2, 16, 8)]), (4, [])])
def test_steps_before_compile_from_step_are_recorded_beginning_with_the_largest_size(step, recorded):
    found, plan, nothing = [], CompilePlan(), lambda *_: None
    recorder = SimpleNamespace(automatic=False, forget=nothing)
    loss: Any = SimpleNamespace(components=SimpleNamespace(denoiser=SimpleNamespace(_recorder=recorder)))
    loss.warm_up, loss.compile_log = lambda batch, device: found.append(batch.kind), plan.log
    options = SimpleNamespace(
        compile_warmup="auto", compile_compare_steps=0, why_not_in_background=lambda _: "a step is set", ahead=False
    )
    steps = SimpleNamespace(resume=None, gradient_accumulation_steps=1)
    config: Any = SimpleNamespace(compile=options, steps=steps)
    clock: Any = SimpleNamespace(step=step, total=20, done=False)
    batches: Any = SimpleNamespace(kinds=lambda: Counter({(2, 8, 8): 3, (2, 16, 8): 1}))
    batches.example = lambda kind: SimpleNamespace(kind=kind, bucket="")
    expect_blocks(plan, {"Linear": 5, "": 9})
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    journal: Any = SimpleNamespace(phase=nothing)
    Precompiler(config, world, journal, plan, clock).prepare(TrialPasses(batches, loss, world.device, nothing))
    assert found == recorded and (plan.state is PlanState.EAGER) == bool(recorded)


@pytest.mark.parametrize("resume", ["", "a-state"])
def test_recordings_leave_room_for_the_optimizer_before_its_first_step_alone(resume):
    """A state has brought it with all that it keeps."""
    told = []
    recorder = SimpleNamespace(drop_reserve=lambda: told.append("there"), automatic=False)
    loss: Any = SimpleNamespace(components=SimpleNamespace(denoiser=SimpleNamespace(_recorder=recorder)))
    options = SimpleNamespace(
        compile_warmup="false", compile_compare_steps=0, why_not_in_background=lambda _: "it is false", ahead=False
    )
    steps = SimpleNamespace(resume=resume, gradient_accumulation_steps=1)
    config: Any = SimpleNamespace(compile=options, steps=steps)
    clock: Any = SimpleNamespace(step=0, total=6, done=False)
    batches: Any = SimpleNamespace(kinds=dict)
    plan, nothing = CompilePlan(), cast(Any, None)
    expect_blocks(plan)
    precompiler = Precompiler(config, nothing, nothing, plan, clock)
    precompiler.prepare(TrialPasses(batches, loss, nothing, nothing))
    assert told == (["there"] if resume else [])
    precompiler.switch_when_ready()
    assert told == (["there"] if resume else [])
    precompiler.switch_when_ready()
    assert told[-1:] == ["there"]
