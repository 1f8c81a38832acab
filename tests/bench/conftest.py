"""Small results to read, and a home for measurements."""

import pytest


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where measurements of this test go."""
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KOHYA_JOB_DIR", raising=False)
    return tmp_path / "home" / "jobs"


def row(candidate, p50, resolution=1024, peak=10.0, part="step", **more):
    return {
        "part": part,
        "resolution": resolution,
        "candidate": candidate,
        "status": "ok",
        "ms": {"p50": p50, "p90": p50 * 1.1, "min": p50},
        "repetitions": 20,
        "warmup_seconds": 1.0,
        "peak_gb": peak,
        **more,
    }


@pytest.fixture
def result():
    """Eager, checkpointed and compiled at two sizes; one candidate did not fit at the larger."""
    from library.bench import report
    from library.measuring import candidates

    compiled = {"num_graphs": 2, "recompiles": 0, "seconds": 9.0, "cache_hits": 0}
    rows = [
        row("eager", 400.0, 512, 30.0, flops=int(1e14), tflops=250.0, mfu=0.36),
        row("checkpointing", 520.0, 512, 20.0),
        row("compiled", 250.0, 512, 28.0, compile=compiled),
        row("compiled+checkpointing", 245.0, 512, 36.0, compile=compiled),
        {"part": "step", "resolution": 1024, "candidate": "eager", "status": "failed", "why": "out of memory"},
        row("checkpointing", 2080.0, 1024, 40.0),
        row("compiled", 1000.0, 1024, 44.0, compile=compiled),
        row("compiled+checkpointing", 990.0, 1024, 48.0, compile=compiled),
        row("compiled", 12.0, 512, 3.0, part="block DoubleStreamBlock"),
    ]
    bench_result = {
        "kind": "bench",
        "schema": 1,
        "finished": True,
        "results": rows,
        "subject": {"title": "FLUX.1, full size", "batch": 1, "family": "flux"},
        "machine": {"name": "GPU <1>", "device": "cuda", "torch": "2.13.0"},
        "matmul": {"dtype": "bfloat16", "tflops": 700.0, "size": 8192},
        "candidates": {c.name: {"about": c.about, "options": c.chosen()} for c in candidates.ALL[:4]},
    }
    return bench_result | {"best": report.best(bench_result)}
