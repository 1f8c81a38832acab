"""Blocks compiled in place: few graphs, the same numbers, clean names, and honest refusals."""

import argparse
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from library.compiler import blocks
from library.compiler.blocks import compile_model
from library.compiler.log import CompileLog
from library.config.problems import ConfigError
from library.families.base import BlockInputs
from library.memory import checkpointing, swapping

CPU = torch.device("cpu")


class Block(nn.Module):
    """A block as denoisers have them: frozen matrices, a norm that learns, a stream and a table beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        for p in (*self.up.parameters(), *self.down.parameters()):
            p.requires_grad_(False)

    def forward(self, x, table):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x) * table)))


class Other(Block):
    def forward(self, x, table):
        return x + table * self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(8) for _ in range(5)])
        self.others = nn.ModuleList([Other(8) for _ in range(3)])

    def forward(self, x, table):
        x = self.first(x)
        for block in (*self.blocks, *self.others):
            x = block(x, table)
        return x


def options(**changed):
    values = {
        "compile": True,
        "compile_backend": "aot_eager",
        "compile_mode": "default",
        "compile_dynamic": None,
        "compile_fullgraph": True,
        "compile_cache_size_limit": 0,
    }
    return SimpleNamespace(**values | changed)


INPUTS = {kind: BlockInputs(streams=(0,), dynamic=((0, 1), (1, 1))) for kind in ("Block", "Other")}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(checkpoint=False, swap=0, compiled=True, offload=False, log=None, **changed):
    torch.manual_seed(0)
    model = Denoiser()
    ring = swapping.Swap(swapping.choose_blocks(model, {"Block": swap} if swap else {}), CPU)
    ring.place(model)
    if checkpoint:
        checkpointing.checkpoint_blocks([list(model.blocks), list(model.others)], CPU if offload else None)
    if compiled:
        compile_model(options(**changed), model, [list(model.blocks), list(model.others)], inputs=INPUTS, log=log)
    ring.attach(model)
    return model


def gradients(model, lengths=(6, 9, 12, 7)):
    torch.manual_seed(1)
    losses = []
    for length in lengths:
        loss = model(torch.randn(2, length, 4), torch.randn(2, length, 8)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("swap", [0, 1, 3, 5])
def test_one_graph_per_class_and_eager_numbers(checkpoint, swap):
    if swap and not checkpoint:
        pytest.skip("swapping recomputes; the config asks for checkpointing")
    expected = gradients(model_of(compiled=False))
    log = CompileLog()
    loss, grad = gradients(model_of(checkpoint, swap, log=log))
    log.drain()
    assert log.summary()["graphs"] == {"Block": 1, "Other": 1}
    assert log.summary()["recompiles"] == 0
    assert log.unproven() == []
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(grad, expected[1])


def test_offloaded_checkpoints_give_the_same_numbers():
    expected = gradients(model_of(compiled=False))
    loss, grad = gradients(model_of(checkpoint=True, offload=True))
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(grad, expected[1])


def test_without_known_inputs_the_first_block_costs_a_second_graph():
    """What `inputs` is for: the rivals' way recompiles, and the log says why."""
    model, log = Denoiser(), CompileLog()
    compile_model(options(), model, [list(model.blocks), list(model.others)], log=log)
    gradients(model)
    log.drain()
    assert log.summary()["num_graphs"] > 2
    assert any("requires_grad" in event.reason or "size" in event.reason for event in log.events)


def test_names_stay_as_they_are():
    assert list(model_of().state_dict()) == list(Denoiser().state_dict())
    assert [type(m).__name__ for m in model_of(checkpoint=True, swap=2).blocks] == ["Block"] * 5


def test_wrapped_names_are_cleaned_and_clashes_refused():
    wrapped = {"_orig_mod.a.weight": 1, "b._orig_mod.weight": 2, "c": 3}
    assert blocks.maybe_uncompile_state_dict(wrapped) == {"a.weight": 1, "b.weight": 2, "c": 3}
    plain = {"a": 1}
    assert blocks.maybe_uncompile_state_dict(plain) is plain
    with pytest.raises(ConfigError):
        blocks.maybe_uncompile_state_dict({"a": 1, "_orig_mod.a": 2})


def test_auto_and_zero_leave_the_choice_to_pytorch():
    for dynamic in (None, "auto", "AUTO"):
        chosen = blocks.torch_compile_options(options(compile_dynamic=dynamic))
        assert chosen["dynamic"] is None
        assert "recompile_limit" not in chosen and "mode" not in chosen
    assert blocks.torch_compile_options(options(compile_dynamic="True"))["dynamic"] is True
    assert blocks.torch_compile_options(options(compile_dynamic="false"))["dynamic"] is False
    assert blocks.torch_compile_options(options(compile_cache_size_limit=64))["recompile_limit"] == 64


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"compile_backend": "inducter"}, ["compile_backend", "inductor"]),
        ({"compile_backend": "tvm"}, ["the package tvm, which is not installed", "choose one of cudagraphs, inductor"]),
        ({"compile_mode": "max-autotune"}, ["compile_mode", "inductor"]),
    ],
)
def test_what_cannot_work_is_one_sentence(changed, words):
    with pytest.raises(ConfigError) as caught:
        compile_model(options(**changed), nn.Linear(2, 2), [])
    assert len(str(caught.value).splitlines()) == 1
    for word in words:
        assert word in str(caught.value)


def test_an_old_pytorch_is_named(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.0.1+cpu")
    with pytest.raises(ConfigError, match=r"2\.0\.1"):
        compile_model(options(), nn.Linear(2, 2), [])


def test_a_missing_compiler_is_named(monkeypatch):
    import torch._inductor.cpp_builder as builder

    def none_found(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(builder, "get_cpp_compiler", none_found)
    with pytest.raises(ConfigError, match="C\\+\\+ compiler"):
        compile_model(options(compile_backend="inductor"), nn.Linear(2, 2), [])


def test_disabled_linears_still_compute():
    torch.manual_seed(0)
    model = Denoiser()
    expected = model(torch.ones(1, 3, 4), torch.ones(1, 3, 8))
    compile_model(options(compile_fullgraph=False), model, [list(model.blocks)], disable_linear=True)
    torch.testing.assert_close(model(torch.ones(1, 3, 4), torch.ones(1, 3, 8)), expected)
    with pytest.raises(ConfigError):
        compile_model(options(), model, [list(model.blocks)], disable_linear=True)


def test_the_flags_have_the_trainers_names_and_meaning():
    parser = argparse.ArgumentParser()
    blocks.add_compile_arguments(parser)
    arguments = parser.parse_args(["--compile", "--compile_dynamic", "TRUE", "--compile_cache_size_limit", "32"])
    assert blocks.torch_compile_options(arguments)["dynamic"] is True
    assert blocks.torch_compile_options(arguments)["recompile_limit"] == 32


def test_compile_errors_are_told_from_the_models_own():
    from torch._dynamo.exc import Unsupported

    assert blocks.is_compile_error(Unsupported("x", gb_type="x")) or blocks.is_compile_error(Unsupported("x"))
    try:
        try:
            raise torch._inductor.exc.InductorError(ValueError("x"), None)
        except Exception as inner:
            raise RuntimeError("outer") from inner
    except RuntimeError as outer:
        assert blocks.is_compile_error(outer)
    assert not blocks.is_compile_error(ValueError("shape"))
    assert not blocks.is_compile_error(torch.OutOfMemoryError("x"))


def test_a_blank_in_the_path_is_reported():
    error = RuntimeError("ld: cannot find -ltorch: No such file\ncollect2: error: ld returned 1 exit status")
    assert "blank" in blocks.compile_error_cause(error, "/home/jo doe/.venv/torch/__init__.py")
    assert blocks.compile_error_cause(error, "/home/jo/.venv/torch/__init__.py").startswith("collect2: error")


def test_a_run_starts_anew_after_a_process_compiled_something_else():
    with CompileLog() as earlier:
        gradients(model_of(log=earlier))
        assert earlier.drain()
    log = CompileLog()
    gradients(model_of(log=log))
    assert [event.graph for event in log.drain()] == [event.graph for event in earlier.events] and not log.unproven()
    assert not earlier.drain() and log.summary()["recompiles"] == 0
