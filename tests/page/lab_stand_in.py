"""A stand-in for a measurement: it writes the same files as a real one, at once or slowly.

    python lab_stand_in.py doctor
    python lab_stand_in.py bench --family flux --size tiny --resolution 512 ...

A bench at 128 pixels waits in the middle until it is stopped; a profile recommends an option.
"""

import sys
import time

from library.bench import report
from library.config.problems import Message
from library.jobs.work import begin_work
from library.measuring import candidates

ON = {"name": "Stand-in", "device": "cpu", "threads": 2, "torch": "2.13.0"}
COMPILED = {"num_graphs": 2, "recompiles": 0, "seconds": 3.0, "cache_hits": 0}


def row(candidate, p50, **more):
    return {
        "part": "step",
        "resolution": 512,
        "candidate": candidate,
        "status": "ok",
        "peak_gb": 1.5,
        "ms": {"p50": p50, "p90": p50 * 1.2, "min": p50},
        **more,
    }


def bench(finished):
    rows = [row("eager", 400.0, mfu=0.3), row("checkpointing", 520.0), row("compiled", 200.0, compile=COMPILED)]
    bench_result = {
        "kind": "bench",
        "finished": finished,
        "results": rows if finished else rows[:1],
        "machine": ON,
        "subject": {"title": "FLUX.1, tiny size", "batch": 1},
        "matmul": {"dtype": "float32", "tflops": 0.5},
        "candidates": {c.name: {"about": c.about, "options": c.chosen()} for c in candidates.ALL[:3]},
    }
    return bench_result | {"best": report.best(bench_result)}


def profile():
    return {
        "kind": "profile",
        "finished": True,
        "machine": ON,
        "subject": {"title": "SDXL, tiny size", "batch": 1},
        "way": {"name": "eager", "options": {}},
        "resolution": 512,
        "step_ms": 120.0,
        "idle": None,
        "launches": 0,
        "syncs": 0,
        "reads": 0,
        "casts": 12,
        "kinds": {"matrix products": 0.6, "elementwise": 0.4},
        "operations": [{"name": "aten::<b>mm</b>", "kind": "matrix products", "calls": 3, "ms": 70.0, "share": 0.6}],
        "verdict": [
            {"rule": "dominant", "share": 0.6, "text": "Of the time 60% goes into matrix products.", "options": {}},
            {"rule": "fusing", "share": 0.4, "text": "Compiling fuses most.", "options": {"compile": True}},
        ],
    }


def doctor():
    settings = {
        "topic": "settings",
        "verdict": "ok",
        "text": "mixed_precision = bf16",
        "data": {"options": {"mixed_precision": "bf16", "compile": True}, "presets": {}},
    }
    torch_finding = {"topic": "torch", "verdict": "ok", "text": "2.13 <script>", "data": {}}
    return {"kind": "doctor", "finished": True, "healthy": True, "findings": [torch_finding, settings]}


def main(command, *options):
    kind = "profile" if "--profile" in options else command
    with begin_work(kind) as work:
        work.phase(Message("warming up"), 1, 4)
        if kind == "bench":
            work.store(bench(finished=False))
            time.sleep(60 if "128" in options else 0)
        results = {
            "bench": lambda: bench(True),
            "profile": profile,
            "doctor": doctor,
            "cache": lambda: {
                "kind": "cache",
                "folder": "/compiled",
                "finished": True,
                "removed": 5 * 10**8,
                "kept": [],
            },
        }
        work.store(results[kind]())


if __name__ == "__main__":
    main(*sys.argv[1:])
