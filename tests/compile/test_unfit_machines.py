"""Machines and compilers that fail: one sentence each, and the training continues in the next best way."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from library import families
from library.check import machine
from library.compiler import cache, checks, cudagraph, torch_private
from library.compiler.plan import CompilePlan
from library.config.building import build_config
from library.memory.quantization import fp8_matmul, int8_matmul
from library.train.compiling.trial_passes import TrialPasses
from tests.training import FEW, LORAS, ONE_ADAPTER, config_of, problems_and_remarks, train

CUDA = torch.device("cuda")
SHORT = {"compile": True, "compile_backend": "eager", "compile_fallback": True, "max_train_steps": 1, "seed": 2}


def one_sentence(text):
    assert text and "\n" not in str(text) and not str(text).startswith("Traceback"), text
    return str(text)


def config_for(script, **values):
    return build_config(families.config_class(script), values, notes=[])


# ---- the card


CARDS: dict[str, tuple[tuple[int, int], bool, dict[str, Any], str, str]] = {
    "no fp8": (
        (8, 6),
        True,
        {"fp8_base": True, "fp8_compute": True, "mixed_precision": "bf16"},
        "fp8_compute",
        "multiplies in int8, not in fp8; use auto_compute",
    ),
    "neither fp8 nor Triton": (
        (8, 6),
        False,
        {"fp8_base": True, "fp8_compute": True, "mixed_precision": "bf16"},
        "fp8_compute",
        "can store weights in 8 bits, but not multiply them",
    ),
    "no Triton": ((8, 6), False, {"compile": True}, "compile", "Triton was not found; install it"),
    "older than Ampere": ((7, 5), True, {"mixed_precision": "bf16"}, "mixed_precision", "this GPU emulates it"),
    "older than Volta": (
        (6, 1),
        False,
        {"compile": True},
        "compile",
        "is too old for it (needs compute ",
    ),
}


@pytest.mark.parametrize("script", LORAS)
@pytest.mark.parametrize("card", CARDS)
def test_a_card_that_lacks_something_is_reported_in_a_sentence(card, script, monkeypatch):
    capability, triton, values, option, words = CARDS[card]
    if card == "older than Ampere" and families.facts_of(families.config_class(script).family).exceeds_fp16:
        return  # bf16 is slow there, and the only way
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "GPU")
    monkeypatch.setattr(torch_private, "has_triton", lambda: triton)
    monkeypatch.setattr(int8_matmul.torch_private, "has_triton", lambda: triton)
    monkeypatch.setattr(machine, "training_device", lambda: CUDA)
    config = config_for(script, **values)
    found = [*machine.find_half_precision_notes(config), *machine.find_missing_gpu_features(config)]
    if config.compile.compile:
        found += checks.find_compile_problems(config.compile, CUDA)
    (told,) = [problem for problem in found if problem.option == option]
    assert words in one_sentence(told)


@pytest.mark.parametrize("script", LORAS)
def test_products_in_8_bits_that_a_machine_lacks_are_left_out(script, demo, squares, tmp_path, monkeypatch):
    """Weights stay in 8 bits, and are multiplied as without the option."""
    assert not fp8_matmul.supports_fp8(torch.device("cpu"))
    values = {"train_data_dir": squares, "max_train_steps": 1, "seed": 2, "fp8_base": True, "mixed_precision": "bf16"}
    losses = [
        train(config_of(demo, script, output_dir=tmp_path / str(asked), fp8_compute=asked, **values)).losses
        for asked in (False, True)
    ]
    assert losses[0] == losses[1]


# ---- the compiler


def failing_from(number, monkeypatch):
    """Let PyTorch's compiler die at its n-th graph."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        if len(made) >= number:
            raise RuntimeError("A compilation subprocess exited unexpectedly")
        return graph.forward

    monkeypatch.setattr(torch_private, "eager_backend", backend)
    return made


@pytest.mark.parametrize("script", LORAS)
def test_a_compiler_that_dies_leaves_an_eager_training(script, demo, squares, tmp_path, monkeypatch):
    made = failing_from(1, monkeypatch)
    given = {**SHORT, "train_data_dir": squares, "compile_blocks": FEW[script]}
    died = train(config_of(demo, script, output_dir=tmp_path / "died", **given))
    eager = train(config_of(demo, script, output_dir=tmp_path / "eager", **given | {"compile": False}))
    # The norms of a U-Net were replaced before, and may round otherwise.
    assert len(made) == 1 and died.losses == pytest.approx(eager.losses, rel=1e-6)
    (warning,) = [event["text"] for event in died.events("warning") if "ompiling" in event["text"]]
    assert "A compilation subprocess exited unexpectedly" in one_sentence(warning)
    assert one_sentence(warning).endswith("the run continues without it.")
    assert "exited unexpectedly" in str(died.facts["compile"]["fallback"])


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_compiler_that_dies_at_a_later_size_costs_no_step(fallback, accumulated, demo, shapes, tmp_path, monkeypatch):
    made = failing_from(2, monkeypatch)
    given = {**SHORT, "train_data_dir": shapes, "compile_blocks": "single:all", "network_args": ONE_ADAPTER}
    given |= {"max_train_steps": 5, "resolution": "96", "compile_dynamic": "false", "compile_fallback": fallback}
    given |= {"train_batch_size": 1, "gradient_accumulation_steps": accumulated}
    died = train(config_of(demo, "flux_train_network", output_dir=tmp_path / "died", **given))
    eager = train(config_of(demo, "flux_train_network", output_dir=tmp_path / "eager", **given | {"compile": False}))
    assert len(made) == 2 and died.losses == pytest.approx(eager.losses, rel=1e-5)
    assert sum("continues without it" in one_sentence(event["text"]) for event in died.events("warning")) == 1


@pytest.mark.parametrize("script", LORAS)
def test_without_the_compilers_tools_a_training_is_eager(script, demo, squares, tmp_path, monkeypatch):
    def missing():
        raise RuntimeError("not found")

    monkeypatch.setattr(torch_private, "cpp_compiler", missing)
    given = {**SHORT, "compile_backend": "inductor", "train_data_dir": squares}
    without = train(config_of(demo, script, output_dir=tmp_path / "without", **given))
    eager = train(config_of(demo, script, output_dir=tmp_path / "eager", **given | {"compile": False}))
    assert without.losses == eager.losses
    (warning,) = [event["text"] for event in without.events("warning") if event["text"].startswith("Not compiled")]
    assert "no C++ compiler was found" in one_sentence(warning)


def test_a_cache_folder_that_cannot_be_written_costs_no_compiling(demo, squares, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv(cache.INDUCTOR, cache.default_cache_dir())
    monkeypatch.setattr(cache, "default_root", lambda: tmp_path / "own")
    given = {**SHORT, "train_data_dir": squares, "compile_blocks": "single:all", "network_args": ONE_ADAPTER}
    config = config_of(
        demo, "flux_train_network", output_dir=tmp_path, compile_cache_dir=str(tmp_path / "file" / "in"), **given
    )
    problems, remarks = problems_and_remarks(config)
    assert not [problem for problem in problems if problem.option == "compile_cache_dir"]
    (remark,) = [remark for remark in remarks if remark.option == "compile_cache_dir"]
    assert "file is not a folder); compiled code is kept in " in one_sentence(remark)
    done = train(config)
    assert done.facts["compile"]["num_graphs"] == 1 and not done.facts["compile"]["fallback"]
    assert [*(tmp_path / "own").iterdir()]


# ---- the memory


def test_too_little_memory_for_the_first_recording_leaves_steps_that_are_not_recorded(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(cudagraph, "GraphMemory", lambda: None)
    for name in ("get_rng_state", "set_rng_state", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)

    class Recording:
        def __init__(self, *_):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(cudagraph, "Recording", Recording)
    denoiser = torch.nn.Linear(4, 4)
    denoiser.__dict__["_recorder"] = recorder = cudagraph.GraphedModel(denoiser, CompilePlan())
    call = cudagraph.Call.of((torch.zeros(1, 4),), {})
    ran: list[str] = []

    def warm_up(batch, device):  # as a pass over the denoiser, whose inputs are on a GPU
        if recorder.why_not or recorder.record(lambda *_: None, call) is None:
            ran.append("eager")

    loss: Any = SimpleNamespace(
        components=SimpleNamespace(denoiser=denoiser), warm_up=warm_up, compile_log=SimpleNamespace()
    )
    batches: Any = SimpleNamespace(example=lambda kind: SimpleNamespace(bucket=""))
    passes = TrialPasses(batches, loss, torch.device("cpu"), lambda: None)
    for _ in range(2):
        passes.run((1, 8, 8))
    told = [record.getMessage() for record in caplog.records]
    assert ran == ["eager"] * 2 and len(told) == 1
    assert "CUDA graphs are no longer recorded: the GPU's memory is too small" in one_sentence(told[0])
