"""Graphs compiled by several processes before the first step, which the training reads from the cache."""

import sys
from types import SimpleNamespace

import pytest
import torch

from library import families
from library.compiler import prewarm, torch_private
from library.config.building import build_config
from library.train.compiling import compile_process, parallel_compile, process_room
from library.train.compiling.compile_process import CompileProcesses
from library.train.compiling.parallel_compile import ParallelCompiler
from tests.training import PLAIN_CODE, config_of, train

GPU = SimpleNamespace(device=torch.device("cuda"), ranks=1)
GIVEN = {"compile": True, "compile_warmup": "true", "max_train_steps": 2, "seed": 1, "cache_latents": True}
REASONS = [
    ({}, ""),
    ({"compile_warmup": "auto"}, "beside the first steps"),
    ({"compile_warmup": "auto", "cuda_graphs": "false"}, ""),  # only recorded steps are worth taking meanwhile
    ({"compile_warmup": "beside", "cuda_graphs": "false"}, "beside the first steps"),
    ({"compile_warmup": "false"}, "in the steps"),
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
    monkeypatch.setattr(CompileProcesses, "take_last", lambda self: None)  # the other process takes all
    values = {"compile_blocks": "single:0", "mixed_precision": "bf16", "network_args": ["single_dim=0"], **GIVEN}
    config = config_of(demo, "flux_train_network", train_data_dir=squares, output_dir=tmp_path, **values)
    cache_counts()
    first = train(config)
    assert cache_counts() == {"fxgraph_cache_hit": 2, "autograd_cache_hit": 1}
    assert "Processes beside this one (1) compiled 1 of 1 graph, and this one 0" in capsys.readouterr().out
    assert first.facts["compile"]["graphs"] == {"SingleStreamBlock": 1}

    monkeypatch.setattr(compile_process, "CompileProcess", lambda *given: pytest.fail("the cache has all graphs"))
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
    monkeypatch.setattr(parallel_compile.cache, "is_warm", lambda name: False)
    alone = train(config_of(demo, "flux_train_network", output_dir=tmp_path / "2", **values))
    assert together.losses == alone.losses


@pytest.mark.parametrize(("values", "why"), REASONS)
def test_reasons_to_compile_in_one_process(values, why):
    config = build_config(families.config_class("sdxl_train_network"), GIVEN | values, notes=[])
    said = str(ParallelCompiler(GPU, SimpleNamespace()).why_not(config))
    assert why in said and bool(why) == bool(said)


@pytest.mark.parametrize(
    "variable", [("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1"), ("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")]
)
def test_without_the_cache_one_process_compiles(variable, monkeypatch):
    config = build_config(families.config_class("sdxl_train_network"), GIVEN, notes=[])
    compiler = ParallelCompiler(GPU, SimpleNamespace())
    assert compiler.why_not(config) == ""
    monkeypatch.setenv(*variable)
    assert compiler.why_not(config) == "the cache of graphs is off"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Let this machine have other cores and GiB of free memory (RAM), and no control groups."""
    monkeypatch.setattr(process_room, "CONTROL_GROUPS", tmp_path)
    having = SimpleNamespace(cores=16, gib=64)
    monkeypatch.setattr(process_room.os, "sched_getaffinity", lambda _: range(having.cores), raising=False)
    available = lambda: SimpleNamespace(available=having.gib * 2**30)  # noqa: E731
    monkeypatch.setattr(process_room.psutil, "virtual_memory", available)
    return having


def test_few_graphs_and_small_machines_need_no_further_process(machine):
    assert [process_room.most_processes(graphs) for graphs in (1, 3, 4, 16)] == [0, 0, 3, 7]
    machine.gib = 10
    assert process_room.most_processes(16) == 2
    machine.gib = 2
    assert process_room.most_processes(16) == 0
    machine.gib, machine.cores = 10, 2
    assert process_room.most_processes(16) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
@pytest.mark.parametrize("version", [1, 2])
def test_the_limits_of_a_container_count(version, machine, tmp_path, monkeypatch):
    gib = 2**30
    if version == 2:
        files = {"cpu.max": "800000 100000", "memory.max": f"{12 * gib}", "memory.current": f"{4 * gib}"}
        files["memory.stat"] = f"anon 1\ninactive_file {2 * gib}"
    else:
        files = {"cpu/cpu.cfs_quota_us": "800000", "cpu/cpu.cfs_period_us": "100000"}
        files |= {"memory/memory.limit_in_bytes": f"{12 * gib}", "memory/memory.usage_in_bytes": f"{4 * gib}"}
        files["memory/memory.stat"] = f"cache 1\ntotal_inactive_file {2 * gib}"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
    groups = tmp_path / "groups"
    groups.write_text("4:memory:/docker/1\n2:cpu,cpuacct:/\n0::/docker/1\n", encoding="utf-8")
    monkeypatch.setattr(process_room, "OWN_GROUPS", groups)
    assert (process_room.usable_cores(), process_room.processes_in_memory()) == (8, 2)
    for name in files:
        (tmp_path / name).write_text("max 100000" if name == "cpu.max" else "max\n", encoding="utf-8")
    assert (process_room.usable_cores(), process_room.processes_in_memory()) == (16, 20)


def test_memory_that_the_model_took_meanwhile_is_not_given_to_a_process(machine, monkeypatch):
    monkeypatch.setattr(parallel_compile.gpu_memory, "free_memory", lambda device: 2**40)
    monkeypatch.setattr(parallel_compile.torch.cuda, "empty_cache", lambda: None)
    compiler = ParallelCompiler(GPU, SimpleNamespace())
    compiler._others._processes += [SimpleNamespace()] * 7
    calls = [SimpleNamespace(path="block", largest_tensor=1)] * 9
    denoiser = torch.nn.ModuleDict({"block": torch.nn.Linear(1, 1)})
    assert compiler._number_with_room(calls, denoiser) == 7
    machine.gib = 9
    assert compiler._number_with_room(calls, denoiser) == 2


def test_the_processes_that_were_started_before_one_could_not_be_are_used_and_stopped(monkeypatch):
    stopped: list[int] = []

    def start(threads, waited_for):
        if len(compiler._others) == 2:
            raise OSError(12, "Cannot allocate memory")
        return SimpleNamespace(
            kill=lambda: stopped.append(1), stop=lambda: stopped.append(2), prepare=lambda _: None, unfinished=[]
        )

    monkeypatch.setattr(compile_process, "CompileProcess", start)
    monkeypatch.setattr(parallel_compile, "fingerprint_settings", lambda *given: "unknown")
    monkeypatch.setattr(parallel_compile, "compile_settings", lambda *given: {})
    monkeypatch.setattr(parallel_compile, "most_processes", lambda graphs: 4)
    config = build_config(families.config_class("sdxl_train_network"), GIVEN, notes=[])
    with ParallelCompiler(GPU, SimpleNamespace()) as compiler:
        compiler.begin(config, [(1, 8, 8)])
    assert stopped[:4] == [1, 1, 2, 2]
