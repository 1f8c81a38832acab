"""Compiled trainings in this process: as many graphs as predicted, the same losses, and what happens when it fails."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from library.config.problems import ConfigError
from library.train.step.loss import LossFunction
from library.train.step.rng import StepGenerators
from tests.training import FEW, config_of, listing, runs_in, train


@pytest.fixture(scope="session")
def wide_sdxl(tmp_path_factory):
    """A tiny SDXL whose levels all differ in width, as the real one's: twelve kinds of ResNet block, two of others."""
    from library.families.sdxl import random

    return random.write_random_model(tmp_path_factory.mktemp("wide"), sizes=random.SdxlSizes(unet=(32, 64, 96)))


@pytest.fixture
def run(demo, squares, tmp_path):
    """Train, each time into a folder of its own."""
    count = iter(range(100))

    def start(script, **values):
        values = {"train_data_dir": squares, "output_dir": tmp_path / f"run{next(count)}"} | values
        return train(config_of(demo, script, **values))

    return start


COMPILED = {"compile": True, "compile_backend": "aot_eager"}


@pytest.mark.parametrize(
    ("script", "extra"),
    [
        ("sdxl_train_network", {"wide": True, "compile_backend": "eager", "compile_blocks": "resnet:all"}),
        (
            "sdxl_train",
            {"gradient_checkpointing": True, "compile_backend": "eager", "compile_blocks": FEW["sdxl_train"]},
        ),
        (
            "flux_train_network",
            {
                "gradient_checkpointing": True,
                "network_dropout": 0.0,
                "mixed_precision": "bf16",
                "compile_backend": "eager",
            },
        ),
    ],
)
def test_three_sizes_need_the_predicted_graphs_and_give_the_same_losses(run, shapes, request, script, extra):
    extra = {"train_data_dir": shapes, "resolution": "96", **extra}  # an epoch of four batches, one of them short
    if wide := extra.pop("wide", False):
        extra["pretrained_model_name_or_path"] = request.getfixturevalue("wide_sdxl")
    eager, compiled = run(script, **extra), run(script, **COMPILED | extra)
    told = compiled.facts["compile"]
    assert told["graphs"] == told["predicted"] and told["recompiles"] == 0, told
    if wide:
        assert told["graphs"] == {"ResnetBlock2D": 12}
    assert set(told["graphs"]) == set(told["blocks"]) and len(told["graphs"]) == (1 if wide else 2)
    assert not told["fallback"]
    assert sum(event["forward"] for event in compiled.events("compile")) == told["num_graphs"]
    close = {"rel": 0.02} if extra.get("mixed_precision") == "bf16" else {"rel": 1e-3}
    assert compiled.losses == pytest.approx(eager.losses, **close)
    assert eager.facts["compile"]["num_graphs"] == 0


@pytest.fixture
def no_compiler(monkeypatch):
    import torch._inductor.cpp_builder as builder

    def none_found(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(builder, "get_cpp_compiler", none_found)


def test_without_a_compiler_the_run_stops_before_it_begins(run, tmp_path, no_compiler):
    with pytest.raises(ConfigError) as refused:
        run("flux_train_network", compile=True)
    assert len(str(refused.value).splitlines()) == 1
    assert "C++ compiler" in str(refused.value)
    assert listing(tmp_path / "run0") == {}


def test_without_a_compiler_a_run_that_may_goes_on(run, no_compiler):
    eager, fallen = run("flux_train_network"), run("flux_train_network", compile=True, compile_fallback=True)
    assert fallen.losses == eager.losses
    assert "C++ compiler" in fallen.facts["compile"]["fallback"]
    assert fallen.facts["state"] == "finished"
    assert any("C++ compiler" in str(event["text"]) for event in fallen.events("warning"))


@pytest.fixture
def broken_backend(monkeypatch):
    """A backend that gives up on the second kind of block, when the first has run already."""
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        if len(calls) == 2:
            raise RuntimeError("no code for this today")
        return graph.forward

    torch._dynamo.register_backend(backend, name="moody")
    yield "moody"
    torch._dynamo.backends.registry._COMPILER_FNS.pop("moody", None)


def test_a_backend_that_fails_stops_the_run_with_one_sentence(run, tmp_path, broken_backend):
    with pytest.raises(ConfigError) as refused:
        run("flux_train_network", compile=True, compile_backend=broken_backend)
    (line,) = str(refused.value).splitlines()
    assert "no code for this today" in line and "--compile_fallback" in line
    (folder,) = runs_in(tmp_path / "run0")
    from library.runs import reader

    facts = reader.run_at(folder).facts
    assert facts["state"] == "failed" and "no code for this today" in str(facts["error"])
    assert not list((tmp_path / "run0").glob("*.safetensors"))


def test_a_run_that_may_fall_back_has_the_losses_of_an_eager_one(run, broken_backend):
    values = {"network_dropout": 0.2, "gradient_accumulation_steps": 2}
    eager = run("flux_train_network", **values)
    fallen = run("flux_train_network", compile=True, compile_backend=broken_backend, compile_fallback=True, **values)
    assert fallen.losses == eager.losses
    assert "no code for this today" in fallen.facts["compile"]["fallback"]
    assert any("no code for this today" in str(event["text"]) for event in fallen.events("warning"))


def test_a_later_run_of_the_same_process_is_not_held_back(run, broken_backend):
    run("flux_train_network", compile=True, compile_backend=broken_backend, compile_fallback=True, max_train_steps=1)
    again = run("flux_train_network", compile=True, compile_backend="eager", max_train_steps=1)
    assert again.facts["compile"]["graphs"] == again.facts["compile"]["predicted"]
    assert not again.facts["compile"]["fallback"]


def test_latents_lie_in_one_order_whether_they_are_cached_or_not():
    """A VAE's order in memory depends on the size of the image, and what is compiled would be made anew for another."""
    strides = []
    batch, generators = SimpleNamespace(latents=None, pixels=torch.zeros(())), StepGenerators(0, torch.device("cpu"), 0)
    family = SimpleNamespace(latents=lambda *_: torch.zeros(2, 4, 8, 8).to(memory_format=torch.channels_last))
    compute_loss = LossFunction(family, None, None, None, None, generators, None)
    with contextlib.suppress(ZeroDivisionError):
        compute_loss(batch, noise=lambda latents: strides.append(latents.stride()) or 1 / 0)
    assert strides == [(256, 64, 8, 1)]
