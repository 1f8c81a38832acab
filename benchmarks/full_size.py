"""Training steps of full-size models with random weights on one GPU: time, memory, share of the GPU's rate, compiling.

    python benchmarks/full_size.py                           # everything, most of an hour on an H200
    python benchmarks/full_size.py --only flux --batches 1   # a part of it
    python benchmarks/full_size.py --cases "eager, checkpointing" compiled "compiled again" --out results.json
    python benchmarks/full_size.py --tiny                    # tiny models, on a CPU too: shows that every case runs

LoRA of rank 16 on all layers that sd-scripts adapts, 1024 x 1024, the trainer's own step as `kohya bench` has it:
noise, forward, backward, clipping, fused AdamW. `eager, checkpointing` is the habit of most users, and what the others
are compared with. Each case runs in a process of its own, with an empty cache; `again` has the cache that the case
before it left. A case that fails says why, and the next one follows. `--out` is written after each.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[1]
CKPT = {"gradient_checkpointing": True}
COMPILE_CHANGES = {"compile": True, "compile_fullgraph": True}
FP8_CHANGES = {"fp8_base": True, "fp8_compute": True}
INT8 = {"int8_base": True, "int8_compute": True}
SWAPPED = {**COMPILE_CHANGES, **CKPT, "blocks_to_swap": 20}
HABIT = "eager, checkpointing"
BLOCKS_ONLY = "compiled, transformer blocks only"  # FLUX.1 has no others
TIMED_CASES = {
    HABIT: CKPT,
    "eager": {},
    "compiled, checkpointing": {**COMPILE_CHANGES, **CKPT},
    "compiled, keeps attention": {**COMPILE_CHANGES, **CKPT, "checkpoint_keep_attention": True},
    "compiled, half the activations": {**COMPILE_CHANGES, "compile_activation_budget": 0.5},
    "compiled": COMPILE_CHANGES,
    "compiled again": COMPILE_CHANGES,
    BLOCKS_ONLY: {**COMPILE_CHANGES, "compile_blocks": "transformer:all"},
    "compiled, fp8 stored, checkpointing": {**COMPILE_CHANGES, **CKPT, "fp8_base": True},
    "compiled, fp8, checkpointing": {**COMPILE_CHANGES, **CKPT, **FP8_CHANGES},
    "compiled, fp8": {**COMPILE_CHANGES, **FP8_CHANGES},
    "compiled, int8, checkpointing": {**COMPILE_CHANGES, **CKPT, **INT8},
    "compiled, int8": {**COMPILE_CHANGES, **INT8},
    "compiled, 20 swapped": SWAPPED,
    "compiled, 20 swapped, fp8 stored": {**SWAPPED, "fp8_base": True},
    "compiled, 20 swapped, fp8": {**SWAPPED, **FP8_CHANGES},
    "compiled, CUDA graphs": {**COMPILE_CHANGES, "compile_mode": "reduce-overhead"},
    "compiled, max-autotune": {**COMPILE_CHANGES, "compile_mode": "max-autotune-no-cudagraphs"},
}
BATCH_SIZES = {"flux": (1, 4), "sdxl": (1, 4, 8)}
LIMIT = 900  # seconds of a case: one that hangs shall not keep the others from their turn


def measure_machine():
    """What all of this ran on, and what it can give."""
    import torch

    from library.bench import machine
    from library.measuring import timing

    device = machine.choose_device("auto")
    return {**machine.measured_machine(device), "matmul": timing.matmul_rate(device, torch.bfloat16)}


def case(family, number, name, size, count):
    """One case in this process; `count` asks for a step's FLOPs too, which takes a while."""
    import torch

    from library.bench import machine, prepared_model, subjects
    from library.measuring import timing

    device, side = machine.choose_device("auto"), 1024 if size == "full" else 128
    values = {"mixed_precision": "bf16", "train_batch_size": int(number)}
    subject = subjects.FamilySubject(f"{family}_train_network", values, size)
    config = subject.config({"cuda_graphs": "auto" if "CUDA" in name else "false", **TIMED_CASES[name]})
    torch.manual_seed(0)
    made = subject.make(config, device)
    flops = prepared_model.count_step(subject, made, config, side).step if count == "count" else None
    torch.manual_seed(0)  # the same images for every case
    losses = []
    with prepared_model.open_prepared(subject, config, device, side, made) as ready:
        first = timing.time_call(lambda: losses.append(ready.step()), device)
        call = timing.measure_call(lambda: losses.append(ready.step()), device, timing.TimingPlan(steps=8))
        return {
            **{"first": round(first, 2), **call.facts(), "flops": flops, **ready.compiling()},
            "graphs": [(e.block, e.forward, round(e.seconds, 1)) for e in ready.compile_log.events],
            "losses": [round(float(value), 5) for value in losses[:6]],
        }


def run_child(*given, cache=""):
    """Run this file in a process of its own and read what it found."""
    places = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"} if cache else {}
    command = [sys.executable, __file__, "--child", *map(str, given)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | places, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {LIMIT} s"}
    try:
        found = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    except (ValueError, StopIteration):  # the process was killed, or crashed below Python
        found = {"failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]}
    return found | ({"log": done.stderr[-3000:]} if "failed" in found else {})


def print_result(given):
    """What a child prints: its result, or why there is none."""
    from library.measuring import timing

    try:
        return measure_machine() if given == ["machine"] else case(*given)
    except Exception as error:
        traceback.print_exc()
        return {"failed": timing.measuring_failure(error)}


def measure_family(family, number, asked, found):
    """All cases of a family and a batch size."""
    habit = None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in choose_cases(asked.cases, family):
            cache = Path(folder) / re.sub(r"\W+", "-", name.removesuffix(" again"))  # compilers stumble over blanks
            counted = next((r for r in found["cases"] if r["family"] == family and r.get("flops")), None)
            way = (family, number, name, "tiny" if asked.tiny else "full", "known" if counted else "count")
            r = {"family": family, "batch": number, "case": name, **run_child(*way, cache=str(cache))}
            found["cases"].append(r)
            habit = r if name == HABIT and "ms" in r else habit
            print(case_row(r, habit, counted or r, found["machine"].get("matmul", {})), flush=True)
            save_measurements(found, asked.out)


def choose_cases(names, family):
    """The cases to measure; a second start needs a first one."""
    wanted = TIMED_CASES if names is None else {*names, *(name.removesuffix(" again") for name in names)}
    return [name for name in TIMED_CASES if name in wanted and (family, name) != ("flux", BLOCKS_ONLY)]


def case_row(r, habit, counted, matmul):
    """A row of the table. FLOPs are proportional to the images, so that they are counted once."""
    from library.bench import report

    start = f"{r['family']:4} {r['batch']:5} {r['case']:36}"
    if "failed" in r:
        return f"{start} failed: {r['failed']}"
    ms, done = r["ms"]["p50"], r.get("compile", {"num_graphs": 0, "seconds": 0})
    rates = report.compute_rates((counted.get("flops") or 0) * r["batch"] // counted["batch"], ms, matmul)
    gain, share = f"{habit['ms']['p50'] / ms:.2f}" if habit else "-", f"{rates['mfu']:.0%}" if "mfu" in rates else "-"
    numbers = f"{ms / 1000:8.3f} {gain:>8} {share:>6} {r['peak_gb']:6.1f} {r['first']:11.1f}"
    eager = f", not compiled: {r['not_compiled']}" if "not_compiled" in r else ""
    return f"{start} {numbers} {done['num_graphs']:6} {done['seconds']:10.1f}{eager}"


def save_measurements(found, out):
    """Write down what is known so far."""
    if out:
        out.write_text(json.dumps(found, indent=1), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(BATCH_SIZES))
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument(
        "--cases", nargs="+", choices=tuple(TIMED_CASES), metavar="NAME", help=f"only these: {tuple(TIMED_CASES)}"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models: to try the script, not to measure")
    parser.add_argument("--out", type=Path, help="write all numbers to this JSON file")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    sys.path.insert(0, str(PROJECT_ROOT))
    if asked.child:
        print(json.dumps(print_result(asked.child)))
        return
    found = {"machine": run_child("machine"), "cases": []}
    save_measurements(found, asked.out)
    print(json.dumps(found["machine"]))
    print(
        f"{'':4} {'batch':>5} {'case':36} {'s/step':>8} {'x eager':>8} {'MFU':>6} {'GiB':>6} {'first step':>11} "
        f"{'graphs':>6} {'compile s':>10}",
        flush=True,
    )
    for family in [asked.only] if asked.only else BATCH_SIZES:
        for number in asked.batches or BATCH_SIZES[family]:
            measure_family(family, number, asked, found)


if __name__ == "__main__":
    main()
