"""Graphs compiled by several processes before the first step, which the training reads from the cache."""

from types import SimpleNamespace

import pytest
import torch

from library import families
from library.compiler import prewarm, torch_private
from library.config.building import build_config
from library.train.compiling import compile_process, parallel_compile
from library.train.compiling.parallel_compile import ParallelCompiler
from tests.training import PLAIN_CODE, config_of, train

GPU = SimpleNamespace(device=torch.device("cuda"), ranks=1)
GIVEN = {"compile": True, "compile_warmup": "true", "max_train_steps": 2, "seed": 1, "cache_latents": True}
REASONS = [
    ({}, ""),
    ({"compile_warmup": "auto"}, "beside the first steps"),
    ({"compile_warmup": "auto", "cuda_graphs": "false"}, ""),  # only recorded steps are worth taking meanwhile
    ({"compile_warmup": "beside", "cuda_graphs": "false"}, "beside the first steps"),
    ({"compile_mode": "max-autotune"}, "timed"),
    ({"compile_autotune": True}, "timed"),
    ({"compile_backend": "aot_eager"}, "inductor"),
    ({"compile_from_step": "3"}, "several steps"),
    ({"compile_compare_steps": 3}, "several steps"),
    ({"compile_scope": "model"}, "model"),
    ({"gradient_checkpointing": True, "cpu_offload_checkpointing": True}, "cpu_offload_checkpointing"),
]


@pytest.fixture
def anywhere(monkeypatch):
    """Let one process compile beside this one on a processor, too."""
    real = ParallelCompiler.why_not
    monkeypatch.setattr(ParallelCompiler, "why_not", lambda self, config: real(SimpleNamespace(_world=GPU), config))
    monkeypatch.setattr(ParallelCompiler, "_number_with_room", lambda self, calls, denoiser: 1)
    monkeypatch.setattr(parallel_compile, "most_processes", lambda graphs: 1)


def cache_counts() -> dict[str, int]:
    counted = {}
    for name in ("inductor", "aot_autograd"):
        counted |= {k: n for k, n in torch_private.compile_counters(name).items() if "cache" in k and n}
        torch_private.compile_counters(name).clear()
    return counted


def test_the_training_reads_what_others_compiled_and_starts_no_process_the_next_time(
    demo, squares, tmp_path, monkeypatch, anywhere, capsys
):
    for name, value in {**PLAIN_CODE, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(prewarm, "_compile_small_graph", lambda kind: None)  # code for nothing but a quicker start
    monkeypatch.setattr(ParallelCompiler, "_take_part", lambda *given: 0)  # the other process takes all
    values = {"compile_blocks": "single:0", "mixed_precision": "bf16", "network_args": ["single_dim=0"], **GIVEN}
    config = config_of(demo, "flux_train_network", train_data_dir=squares, output_dir=tmp_path, **values)
    cache_counts()
    first = train(config)
    assert cache_counts() == {"fxgraph_cache_hit": 2, "autograd_cache_hit": 1}
    assert "Processes beside this one (1) compiled 1 of 1 graph" in capsys.readouterr().out
    assert first.facts["compile"]["graphs"] == {"SingleStreamBlock": 1}

    monkeypatch.setattr(parallel_compile, "CompileProcess", lambda *given: pytest.fail("the cache has all graphs"))
    second = train(config_of(demo, "flux_train_network", train_data_dir=squares, output_dir=tmp_path / "2", **values))
    assert second.losses == first.losses


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "import sys; sys.stdin.read()"], ids=["fails", "waits"])
def test_a_process_that_compiles_nothing_changes_no_loss(
    program, demo, squares, tmp_path, monkeypatch, anywhere, capsys
):
    (tmp_path / "another_worker.py").write_text(program, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_process, "WORKER", "another_worker")
    monkeypatch.setattr(parallel_compile, "GRAPH_TIMEOUT", 0.5)
    monkeypatch.setattr(ParallelCompiler, "why_not", lambda self, config: "")
    values = {**GIVEN, "compile_backend": "aot_eager", "train_data_dir": squares}
    together = train(config_of(demo, "flux_train_network", output_dir=tmp_path, **values))
    assert together.facts["compile"]["graphs"] == together.facts["compile"]["predicted"]
    monkeypatch.setattr(parallel_compile, "most_processes", lambda graphs: 0)
    monkeypatch.setattr(parallel_compile.warm_cache, "is_warm", lambda name: False)
    alone = train(config_of(demo, "flux_train_network", output_dir=tmp_path / "2", **values))
    assert together.losses == alone.losses


@pytest.mark.parametrize(("values", "why"), REASONS)
def test_reasons_to_compile_in_one_process(values, why):
    config = build_config(families.config_class("sdxl_train_network"), GIVEN | values, notes=[])
    said = str(ParallelCompiler(GPU, SimpleNamespace()).why_not(config))
    assert why in said and bool(why) == bool(said)


def test_few_graphs_and_small_machines_need_no_further_process(monkeypatch):
    monkeypatch.setattr(parallel_compile.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(parallel_compile.psutil, "virtual_memory", lambda: SimpleNamespace(available=available * 2**30))
    available = 64
    assert [parallel_compile.most_processes(graphs) for graphs in (1, 3, 4, 16)] == [0, 0, 3, 7]
    available = 10
    assert parallel_compile.most_processes(16) == 2
    available = 2
    assert parallel_compile.most_processes(16) == 0
    monkeypatch.setattr(parallel_compile.os, "cpu_count", lambda: 2)
    assert parallel_compile.most_processes(16) == 0
