"""Graphs compiled by several processes before the first step, which the training reads from the cache."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from library import families
from library.compiler import prewarm, torch_private, warm_cache
from library.config.building import build_config
from library.train.compiling import compile_process, parallel_compile
from library.train.compiling.parallel_compile import ParallelCompiler, slowest_first
from tests.training import PLAIN_CODE, config_of, train

GIVEN = {"compile": True, "compile_warmup": "true", "max_train_steps": 2, "seed": 1, "cache_latents": True}


@pytest.fixture
def anywhere(monkeypatch):
    """Let one process compile beside this one on a processor, too."""
    real = ParallelCompiler.why_not

    def why_not(self):
        world, self._world = self._world, SimpleNamespace(device=torch.device("cuda"), ranks=1)
        try:
            return real(self)
        finally:
            self._world = world

    monkeypatch.setattr(ParallelCompiler, "why_not", why_not)
    monkeypatch.setattr(ParallelCompiler, "_processes", lambda self, calls, denoiser: 1)


def cache_counts() -> dict[str, int]:
    counted = {}
    for name in ("inductor", "aot_autograd"):
        counted |= {k: n for k, n in torch_private.compile_counters(name).items() if "cache" in k and n}
        torch_private.compile_counters(name).clear()
    return counted


def test_the_training_reads_what_other_processes_compiled_and_starts_none_the_next_time(
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
    assert "1 processes beside this one compiled 1 of 1 graphs" in capsys.readouterr().out
    assert first.facts["compile"]["graphs"] == {"SingleStreamBlock": 1}

    second = train(config_of(demo, "flux_train_network", train_data_dir=squares, output_dir=tmp_path / "2", **values))
    assert "beside this one" not in capsys.readouterr().out
    assert second.losses == first.losses
