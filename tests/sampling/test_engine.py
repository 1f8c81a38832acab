"""Images through compiled blocks and recorded passes: the same as eager ones, for every family, beside a training."""

import contextlib
import logging
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from library.compiler.log import CompileLog
from library.compiler.pass_recording import PassRecorder
from library.compiler.payoff import Payoff
from library.compiler.plan import CompilePlan, PlanState
from library.compiler.torch_private import pytree
from library.config.sections import Compile
from library.methods import targets
from library.sampling import generate, plan
from library.sampling.engine import ImageEngine, ImagesLeft, images_left
from library.sampling.prompts import Prompt, with_defaults
from library.sampling.requests import request_of
from library.train.compiling.precompile import Precompiler
from tests.sampling.test_sampling import (  # noqa: F401 - a fixture, and what it needs
    SCRIPTS,
    given,
    lora_file,
    quiet,
    shallow,
)
from tests.training import FEW, config_of, demo, squares, train  # noqa: F401 - two fixtures

FLUX = "flux_train_network"
STEPS = 3


class FakeGraph:
    """Remembers the call and computes it again: what a CUDA graph does, on a CPU."""

    def __init__(self, pool):
        self.pool = pool

    def capture(self, call):
        self.call, self.outputs = call, call()
        return self.outputs

    def replay(self):
        self.pool.replays += 1
        leaves, _ = pytree.tree_flatten(self.outputs)
        new, _ = pytree.tree_flatten(self.call())
        for to, value in zip(leaves, new, strict=True):
            to.copy_(value)


class FakePool:
    """Memory of which `free` bytes are left."""

    device_type = "cuda" if torch.cuda.is_available() else "cpu"  # of the models that tests open

    def __init__(self, free=2**40):
        self.free, self.replays, self.graphs = free, 0, 0

    def graph(self):
        self.graphs += 1
        return FakeGraph(self)

    def free_bytes(self):
        return self.free


def opened(config):
    return generate.open_sampling_model(config, (), quiet)


def prompts_for(model, *changes):
    defaults = {**model.family.sample_defaults, "sample_sampler": "ddim", "sample_steps": STEPS}
    plain = Prompt("a cat", negative_prompt="a dog", width=64, height=64, seed=3, sample_steps=STEPS, scale=3.0)
    return [
        with_defaults(replace(plain, **change), defaults, model.family.sample_multiple) for change in changes or ({},)
    ]


def latents_of(engine, sampler, request):
    return engine.images(sampler, [request], lambda: sampler.latents(request))


def drawn(model, engine, prompts):
    """The latents of these prompts, in one set."""
    sampler = model.family.sampler(model.components)
    found = []
    with model.computing():
        sampler.remember(request_of(prompt, generate.AS_SEEN) for prompt in prompts)
        with engine.running(images_left(prompts, sampler)) if engine else contextlib.nullcontext():
            for prompt in prompts:
                request = request_of(prompt, generate.AS_SEEN)
                found.append(latents_of(engine, sampler, request) if engine else sampler.latents(request))
    return found


def engine_of(model, config, pool=None):
    denoiser, make_pool = model.components.denoiser, (lambda: pool) if pool else None
    return ImageEngine(denoiser, model.family, config, model.world.device, CompileLog(), make_pool=make_pool)


@pytest.mark.parametrize("script", SCRIPTS)
def test_recorded_images_are_the_eager_ones_bit_for_bit(given, script):  # noqa: F811
    """One recording serves all steps, prompts, and seeds of a size; guidance is one batch."""
    config = given(script)
    config = replace(config, compile=replace(config.compile, cuda_graphs="true"))
    model, pool = opened(config), FakePool()
    prompts = prompts_for(model, {}, {"seed": 5, "prompt": "a red bicycle at night"}, {"width": 128})
    expected, engine = drawn(model, None, prompts), engine_of(model, config, pool)
    recorded = drawn(model, engine, prompts)
    assert all(torch.equal(one, other) for one, other in zip(expected, recorded, strict=True))
    assert pool.graphs == 2 and pool.replays == engine.recorder.replays == 3 * STEPS - 2
    again = drawn(model, engine, prompts)
    assert pool.graphs == 2 and all(torch.equal(*pair) for pair in zip(expected, again, strict=True))
    assert type(model.components.denoiser).__name__ and "_receive_pass" not in vars(model.components.denoiser)


def deciding(config):
    return replace(config, sample=replace(config.sample, sample_compile="auto"))


def compiling(config, backend="eager", **options):
    compiled = replace(config.compile, compile_backend=backend, **options)
    return replace(config, compile=compiled, sample=replace(config.sample, sample_compile="true"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_compiled_images_are_the_eager_ones(given, script):  # noqa: F811
    """In one graph for each kind of block, for several sizes, also recorded; afterwards the model is as before."""
    config = compiling(given(script), cuda_graphs="true", compile_fullgraph=True)
    model, pool = opened(config), FakePool()
    # SD 1.5 has a single token in its last level at 64 x 64, for which PyTorch compiles again.
    smallest = {"width": 256, "height": 256} if script == "train_network" else {}
    changes = (
        smallest,
        {**smallest, "seed": 5, "prompt": "a red bicycle at night"},
        {**smallest, "width": 320 if smallest else 128},
    )
    prompts = prompts_for(model, *changes)
    before = [type(module) for module in model.components.denoiser.modules()]
    expected, engine = drawn(model, None, prompts), engine_of(model, config, pool)
    compiled = drawn(model, engine, prompts)
    for one, other in zip(expected, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    log = engine.plan.log
    assert log.events and not log.recompilations() and not log.graph_breaks() and not log.unproven()
    assert pool.graphs == 2
    assert [type(module) for module in model.components.denoiser.modules()] == before
    assert not any(vars(module).get("_compiled_call_impl") for module in model.components.denoiser.modules())
    engine.close()


# The training that previews stand beside, by what its blocks do.
BESIDE = {
    "compiled": {"compile": True, "compile_backend": "aot_eager"},
    "checkpointed and dynamic": {"compile": True, "compile_backend": "eager", "gradient_checkpointing": True},
    "eager": {"compile": False, "compile_backend": "eager"},
    "swapped": {"compile": True, "compile_backend": "eager", "blocks_to_swap": 1, "gradient_checkpointing": True},
    "compiled when needed": {"compile": True, "compile_backend": "eager", "compile_from_step": "3"},
}


# All ways with the smallest model, and those with the most parts with others.
PREVIEWED = [
    *(("flux_train_network", way) for way in BESIDE),
    *((script, way) for script in ("sdxl_train_network", "flux_train") for way in ("eager", "swapped")),
]


@pytest.mark.parametrize(("script", "way"), PREVIEWED)
def test_previews_change_neither_losses_nor_graphs_of_a_training(demo, squares, tmp_path, script, way):  # noqa: F811
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat --w 64 --h 64 --s 2 --d 1 --l 4\na dog --w 128 --h 64 --s 2 --d 2\n", encoding="utf-8")
    values = {"train_data_dir": squares, "max_train_steps": 4, "seed": 5, "compile_blocks": FEW[script], **BESIDE[way]}
    samples = {"sample_every_n_steps": 1, "sample_at_first": True, "sample_prompts": prompts, "sample_compile": "true"}
    plain = train(config_of(demo, script, output_dir=tmp_path / "plain", **values))
    with_images = train(config_of(demo, script, output_dir=tmp_path / "samples", **values, **samples))
    assert len([*(tmp_path / "samples" / "sample").glob("*.png")]) == 10
    assert not with_images.events("sample_failed")
    assert plain.losses == with_images.losses and len(plain.losses) == 4
    one, other = plain.tensors(), with_images.tensors()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    compiled = [outcome.facts["compile"] for outcome in (plain, with_images)]
    for name in ("graphs", "num_graphs", "recompiles", "predicted"):
        assert compiled[0][name] == compiled[1][name]
    assert bool(compiled[0]["num_graphs"]) == values["compile"]
    log = (with_images.folder / "log.txt").read_text(encoding="utf-8")
    assert "for images in" in log and "for images in" not in (plain.folder / "log.txt").read_text("utf-8")


def measured(config, **payoff):
    """An engine that times passes as on a GPU, and finds that compiling costs `payoff`."""
    config = replace(config, compile=replace(config.compile, compile_backend="eager"))
    model = opened(config)
    engine = engine_of(model, config)
    engine.measures = True
    engine.payoff = lambda: Payoff(**{"steps": 100, "step_seconds": 1.0, "sizes": 1, **payoff})
    return model, engine


def test_auto_compiles_where_it_pays_and_computes_no_image_in_two_ways(given):  # noqa: F811
    model, engine = measured(deciding(given(FLUX)), loading=1.0)
    prompts, passes = prompts_for(model), []
    hook = model.components.denoiser.register_forward_pre_hook(lambda *_: passes.append(engine.plan.active))
    (latents,) = drawn(model, engine, prompts)
    hook.remove()
    assert passes == [False, False] + [True] * STEPS and engine.pass_seconds
    (again,) = drawn(model, engine, prompts)
    assert torch.equal(latents, again) and engine.plan.state is PlanState.COMPILED
    engine.close()


def test_auto_stays_eager_where_compiling_does_not_pay(given):  # noqa: F811
    model, engine = measured(deciding(given(FLUX)), loading=100.0)
    prompts = prompts_for(model)
    expected = drawn(model, None, prompts)
    assert torch.equal(*expected, *drawn(model, engine, prompts))
    assert engine.plan.state is PlanState.OFF and engine.pass_seconds is not None


@pytest.mark.parametrize(("compiles", "timed"), [(True, True), (False, False)])
def test_auto_leaves_previews_of_an_uncompiled_training_eager(given, compiles, timed):  # noqa: F811
    config = deciding(given(FLUX))
    config = replace(config, compile=replace(config.compile, compile=compiles))
    model = opened(config)
    engine = engine_of(model, config)
    engine._training, engine.measures = CompilePlan(), True
    drawn(model, engine, prompts_for(model))
    assert bool(engine.pass_seconds) is timed and not engine.plan.active


def test_what_pays_is_estimated_from_the_passes_that_are_left(given):  # noqa: F811
    config = given(FLUX)
    engine = engine_of(opened(config), config)
    engine.pass_seconds, pays = 0.2, []
    for passes in (28, 2800):
        engine._left = ImagesLeft(passes, ((128, 128),))
        pays.append(engine.payoff().pays)
    assert pays == [False, True]


def test_sizes_and_passes_are_those_of_the_prompts(given):  # noqa: F811
    model = opened(given(FLUX))
    plain = Prompt("a", width=64, height=128, sample_steps=3, scale=1.0)
    prompts = [plain, replace(plain, sample_steps=4), replace(plain, scale=4.0, width=70)]
    left = images_left(prompts, model.family.sampler(model.components), rounds=5)
    assert left == ImagesLeft(50, ((1, 16, 8), (2, 16, 8)))


def test_a_compiler_that_fails_costs_no_image(given, caplog):  # noqa: F811
    @torch._dynamo.register_backend(name="broken")
    def broken(graph, inputs):
        raise ValueError("no such instruction")

    config = compiling(given(FLUX), "broken")
    model = opened(config)
    prompts = prompts_for(model)
    expected, engine = drawn(model, None, prompts), engine_of(model, config)
    assert torch.equal(*expected, *drawn(model, engine, prompts))
    assert engine.plan.state is PlanState.GIVEN_UP and "they are generated without it" in caplog.text
    engine.close()
    torch._dynamo.backends.registry._BACKENDS.pop("broken")
    torch._dynamo.backends.registry._COMPILER_FNS.pop("broken")


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_memory_recordings_go_first_and_then_the_batch_of_both_prompts(given, script):  # noqa: F811
    config = given(script)
    config = replace(config, compile=replace(config.compile, cuda_graphs="true"))
    model, pool = opened(config), FakePool()
    engine, denoiser, (prompt,) = engine_of(model, config, pool), model.components.denoiser, prompts_for(model)
    expected = drawn(model, None, [prompt])
    assert torch.equal(*expected, *drawn(model, engine, [prompt])) and engine.recorder.recordings
    batches = []

    def check(module, args, kwargs):
        batches.append(next(len(x) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)))
        if batches[-1] == 2 and len(batches) < 3:
            raise torch.OutOfMemoryError

    engine.recorder.free()
    sampler = model.family.sampler(model.components)
    hook = denoiser.register_forward_pre_hook(check, with_kwargs=True)
    with model.computing(), engine.running(images_left([prompt], sampler)):
        engine.recorder.recordings["of another size"] = None
        latents = latents_of(engine, sampler, request_of(prompt, generate.AS_SEEN))
    hook.remove()
    assert batches[:3] == [2, 2, 1] and {*batches[2:]} == {1} and sampler.one_by_one
    assert "of another size" not in engine.recorder.recordings
    torch.testing.assert_close(latents, *expected, rtol=1e-3, atol=5e-4)  # batches of one and two round differently


@pytest.mark.parametrize(("blocks_to_swap", "room"), [(None, None), (1, 0)])
def test_samplers_keep_nothing_between_steps_where_weights_come_and_go(given, blocks_to_swap, room):  # noqa: F811
    config = given(FLUX)
    config = replace(config, memory=replace(config.memory, blocks_to_swap=blocks_to_swap))
    model = opened(given(FLUX))
    sampler, request = model.family.sampler(model.components), request_of(prompts_for(model)[0], generate.AS_SEEN)
    assert engine_of(model, config).images(sampler, [request], lambda: sampler.room_to_keep()) == room


def test_too_little_memory_beside_recordings_ends_them(given):  # noqa: F811
    config = given(FLUX)
    config = replace(config, compile=replace(config.compile, cuda_graphs="true"))
    model, pool = opened(config), FakePool(free=2**20)
    engine, prompts = engine_of(model, config, pool), prompts_for(model)
    assert torch.equal(*drawn(model, None, prompts), *drawn(model, engine, prompts))
    assert not engine.recorder.recordings and "too little" in engine.recorder.why_not
    pool.free = 2**40
    engine = engine_of(model, config, pool)
    drawn(model, engine, prompts)
    assert engine.recorder.recordings and not engine.recorder.free_if_short()
    pool.free = 2**20
    assert engine.recorder.free_if_short() and not engine.recorder.recordings


def test_passes_that_differ_are_not_recorded(given):  # noqa: F811
    """As with sample_cache, which skips blocks in some of them."""
    config = given(FLUX)
    config = replace(config, compile=replace(config.compile, cuda_graphs="true"))
    model, pool = opened(config), FakePool()
    engine, (prompt,) = engine_of(model, config, pool), prompts_for(model)
    sampler, request = model.family.sampler(model.components), request_of(prompt, generate.AS_SEEN)
    with model.computing(), engine.running(images_left([prompt], sampler), records=False):
        latents = latents_of(engine, sampler, request)
    assert torch.equal(latents, *drawn(model, None, [prompt])) and not pool.graphs


def test_moved_weights_are_recorded_again(given):  # noqa: F811
    config = given(FLUX)
    config = replace(config, compile=replace(config.compile, cuda_graphs="true"))
    model, pool = opened(config), FakePool()
    engine, prompts = engine_of(model, config, pool), prompts_for(model)
    first = drawn(model, engine, prompts)
    weight = next(model.components.denoiser.parameters())
    weight.data = weight.data.clone()
    assert torch.equal(*first, *drawn(model, engine, prompts)) and pool.graphs == 2


@pytest.mark.parametrize("script", SCRIPTS)
def test_files_at_other_strengths_are_neither_replayed_nor_left_out(given, script, tmp_path, caplog):  # noqa: F811
    """As eagerly, where adapters are in compiled blocks; the VAE moves to the device once per column."""
    config = given(script)
    model = opened(config)
    found = targets.find_target_layers(
        model.components.denoiser, "denoiser", model.family.adapter_name, model.family.block_classes
    )
    layers = [target for target in found if target.inside and isinstance(target.layer, torch.nn.Linear)]
    file = lora_file(tmp_path / "zorb.safetensors", {target.name: target.layer for target in layers[::3]})
    columns = plan.plan_columns("strengths", [(file, 1.0)], [0.0, 0.5, 1.0])
    prompts = [Prompt("a cat", width=64, height=64, seed=3, sample_steps=2)] * 2
    caplog.set_level(logging.INFO)
    sheets = []
    for wanted in (config, compiling(config, compile_blocks=FEW[script])):
        assert "for images in" not in caplog.text
        sheets.append(generate.generate(wanted, columns, prompts, tmp_path / str(len(sheets)), quiet))
    assert "for images in" in caplog.text and "failed" not in caplog.text
    eager, compiled = ([[generate.Image.open(name) for name in row] for row in sheet.files] for sheet in sheets)
    for one, other in zip(sum(eager, []), sum(compiled, []), strict=True):
        near = torch.frombuffer(bytearray(one.tobytes()), dtype=torch.uint8).int()
        assert (near - torch.frombuffer(bytearray(other.tobytes()), dtype=torch.uint8).int()).abs().max() <= 2
    assert eager[0][0].tobytes() != eager[0][1].tobytes() != eager[0][2].tobytes()


def test_the_vae_moves_once_for_a_set_of_images(given, monkeypatch):  # noqa: F811
    config = given(FLUX)
    model, moved = opened(config), []
    to = type(model.components.vae).to
    monkeypatch.setattr(type(model.components.vae), "to", lambda vae, *place: moved.append(place) or to(vae, *place))
    sample = generate.ColumnSampler(model, [Prompt("a", width=64, height=64, sample_steps=1)] * 3, config)
    sample(plan.Column("", ()), lambda row, image: moved.append("image"))
    outer = moved[: moved.index("image")]
    assert moved.count("image") == 3 and len(outer) == 3  # there, and in the context of the first image both ways


def test_decoding_frees_recordings_before_it_takes_tiles(given):  # noqa: F811
    model = opened(given(FLUX))
    sampler, tries = model.family.sampler(model.components), []
    latents, decode = torch.randn(1, 16, 128, 128), sampler._decoded

    def scarce(latents, tiled=False):
        tries.append("tiles" if tiled else "at once")
        if len(tries) == 1:
            raise torch.OutOfMemoryError
        return decode(latents[..., :8, :8])

    sampler._decoded = scarce
    sampler.make_room = lambda: tries.append("freed") or True
    sampler.decoded(latents)
    assert tries == ["at once", "freed", "at once"] and sampler.decoded_by == ""
    tries.clear()
    sampler.make_room = lambda: False
    sampler.decoded(latents)
    assert tries == ["at once", "tiles"] and sampler.decoded_by == "tiles"


def test_a_step_without_memory_frees_recorded_images_and_is_repeated():
    model = torch.nn.Linear(2, 2)
    recorder = PassRecorder(model, FakePool)
    recorder.recordings["a size"] = None
    config = SimpleNamespace(compile=Compile(), optim=SimpleNamespace(stepped_early=""))
    precompiler = Precompiler(config, Mock(), Mock(), CompilePlan(), Mock())
    assert precompiler.recover(torch.OutOfMemoryError(), model) and not recorder.recordings
    assert not precompiler.recover(torch.OutOfMemoryError(), model)


def test_images_are_recorded_by_default_and_not_without_sample_compile(given):  # noqa: F811
    config = given(FLUX)
    model, off = opened(config), replace(config, sample=replace(config.sample, sample_compile="false"))
    assert config.sample.sample_compile == "auto"
    for chosen, why in ((off, "sample_compile is false"), (config, "")):
        engine = ImageEngine(model.components.denoiser, model.family, chosen, torch.device("cuda"), CompileLog())
        assert bool(engine.recorder.why_not) is bool(why) and why in str(engine.recorder.why_not)
