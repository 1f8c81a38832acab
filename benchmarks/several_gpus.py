"""One GPU against several of the same machine, with CUDA graphs and without: full-size models with random weights.

    python -m benchmarks.several_gpus --out results.json     # all GPUs that there are; on two H200s about 7 minutes
    python -m benchmarks.several_gpus --cases "sdxl eager" "flux compiled" --number 2
    python -m benchmarks.several_gpus --tiny                 # tiny models, on a CPU too: to try it, not to measure

Each case is started once with CUDA graphs and once without, as one process for each GPU. First the first process takes
the trainer's own steps (noise, forward, backward, clipping, optimizer) alone while the others wait; then all of them
take steps together and average their gradients as a training does. Images have three sizes in turn.

A row says: seconds a step over the second half of the steps, alone and together; how many times one GPU's images a
second that is; seconds of averaging alone, when all processes are there; the most GiB in use on a GPU; the first
losses, of which those with and without CUDA graphs should agree.
"""

import argparse
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.presets import path_with

ROOT = Path(__file__).resolve().parents[1]
SIZES, TINY = ((1024, 1024), (832, 1216), (1216, 832)), ((64, 64), (64, 128))
WARMUP_ROUNDS = 4  # rounds over the sizes before anything is timed
SHOWN = 6  # losses of each way
SDXL = {"train_batch_size": 4, "mixed_precision": "bf16"}
FLUX = {
    "train_batch_size": 1,
    "mixed_precision": "bf16",
    "timestep_sampling": "flux_shift",
    "guidance_scale": 1.0,
    "model_prediction_type": "raw",
}
# A name, the script, its options, and the steps that are taken alone and together.
CASES: tuple[tuple[str, str, dict[str, Any], int], ...] = (
    ("sdxl eager", "sdxl_train_network", SDXL, 36),
    ("flux compiled", "flux_train_network", {**FLUX, "compile": True}, 24),
    ("sdxl compiled", "sdxl_train_network", {**SDXL, "compile": True, "compile_blocks": "transformer:all"}, 36),
    ("flux eager", "flux_train_network", {**FLUX, "gradient_checkpointing": True}, 24),
    ("sdxl full", "sdxl_train", {**SDXL, "full_bf16": True, "gradient_checkpointing": True}, 24),
)
Row = dict[str, Any]


# ---- in one of the processes


def child(name: str, recorded: bool, tiny: bool) -> None:
    """Measure a case; the first process prints the row."""
    import torch
    from torch import distributed

    from library.bench import prepared_model, subjects
    from library.distributed import gradients
    from library.measuring import timing

    with_gpu, rank, ranks = torch.cuda.is_available(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if with_gpu else torch.device("cpu")
    if with_gpu:
        torch.cuda.set_device(device)
    store = distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), ranks, rank == 0)
    distributed.init_process_group("nccl" if with_gpu else "gloo", store=store, rank=rank, world_size=ranks)
    _, script, values, steps = next(case for case in CASES if case[0] == name)
    given = {**values, "cuda_graphs": str(recorded).lower(), "resolution": "1024", "enable_bucket": False}
    given |= {"train_batch_size": 1, "mixed_precision": "no", "full_bf16": False} if tiny else {}
    subject = subjects.FamilySubject(script, given, "tiny" if tiny else "full")
    config, sizes = subject.config({}), TINY if tiny else SIZES
    steps = 2 * len(sizes) if tiny else steps
    torch.manual_seed(0)  # the same weights in all processes
    made = subject.make(config, device)
    method = made.method
    torch.manual_seed(1 + rank)
    found: Row = {"case": name, "recorded": recorded, "ranks": ranks, "batch": subject.batch}
    with prepared_model.open_prepared(subject, config, device, sizes, made) as ready:
        warmup = len(sizes) * (1 if tiny else WARMUP_ROUNDS)  # compiles and records
        found["settling_s"] = round(timing.timed(lambda: [ready.step() for _ in range(warmup)], device), 1)
        distributed.barrier()
        if rank == 0:
            found["alone"] = steps_of(ready, steps, device)
            store.set("alone", "done")
        store.wait(["alone"], datetime.timedelta(minutes=10))  # without a kernel that waits on the GPU
        gradients.broadcast(method.snapshot().values())
        for optimizer in (ready.optimizer, *(part.optimizer for part in getattr(ready.optimizer, "bundles", ()))):
            optimizer.state.clear()  # as the weights are the first one's, whose optimizer has seen more steps
        ready.averager = gradients.GradientAverager(gradients.by_arrival(method), ranks)
        distributed.barrier()
        found["together"] = steps_of(ready, steps, device)
        found["averaging_s"] = round(averaging(ready.averager, method.parameters(), device), 4)
        free, total = torch.cuda.mem_get_info(device) if with_gpu else (0, 0)
        each: list[Any] = [None] * ranks
        distributed.all_gather_object(each, round((total - free) / 2**30, 1))
        found |= {"gib": each, **ready.compiling()}
    if rank == 0:
        print("\n" + json.dumps(found), flush=True)
    distributed.destroy_process_group()
    os._exit(0)  # threads of the compiler may hang on


def steps_of(ready: Any, number: int, device: Any) -> Row:
    """Take steps: seconds a step over the second half of them, and the first losses."""
    from library.measuring import timing

    losses = [ready.step() for _ in range(number - number // 2)]
    seconds = timing.timed(lambda: [ready.step() for _ in range(number // 2)], device) / (number // 2)
    return {"s_it": round(seconds, 4), "losses": [round(float(loss), 5) for loss in losses[:SHOWN]]}


def averaging(averager: Any, parameters: Any, device: Any) -> float:
    """Seconds that averaging takes, where nothing else is done."""
    import torch

    from library.measuring import timing

    for p in parameters:
        p.grad = torch.zeros_like(p)
    averager.finish()
    seconds = timing.timed(lambda: [averager.finish() for _ in range(5)], device) / 5
    for p in parameters:
        p.grad = None
    return seconds


# ---- in the process that was started


def run(name: str, recorded: bool, asked: argparse.Namespace, cache: Path) -> Row:
    """Start the processes of a case; the row, or why there is none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **{"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"},
        **os.environ,
        **{"MASTER_PORT": str(port), "WORLD_SIZE": str(asked.number), "PYTHONPATH": path_with(ROOT)},
        **{"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")},
    }
    command = [sys.executable, "-m", "benchmarks.several_gpus", "--child", name, *["--recorded"] * recorded]
    command += ["--tiny"] * asked.tiny
    logs = [cache / f"{name.replace(' ', '-')}-{recorded}-{rank}.log" for rank in range(asked.number)]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env={**shared, "RANK": str(rank)}, stdout=log.open("wb"), stderr=subprocess.STDOUT
        )
        for rank, log in enumerate(logs)
    ]
    until = time.monotonic() + asked.limit
    while any(process.poll() is None for process in processes):
        failed = any(process.poll() for process in processes)
        if failed or time.monotonic() > until:
            for process in processes:
                process.kill()
        time.sleep(0.2)
    for process, log in zip(processes, logs, strict=True):
        if process.returncode:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
            print("\n".join(last), flush=True)
            return {"case": name, "recorded": recorded, "failed": last[-1][:200] if last else "killed"}
    lines = logs[0].read_text(encoding="utf-8", errors="replace").strip().splitlines()
    given_up = [line for line in lines if "CUDA graphs are not recorded" in line]
    return json.loads(lines[-1]) | ({"not_recorded": given_up[-1]} if given_up else {})


def line(row: Row) -> str:
    """A row of the table."""
    start = f"{row['case']:14} {'recorded' if row['recorded'] else 'without':9}"
    if "failed" in row:
        return f"{start} failed: {row['failed']}"
    alone, together = row["alone"]["s_it"], row["together"]["s_it"]
    return (
        f"{start} 1 GPU {alone:.4f} s, {row['ranks']} GPUs {together:.4f} s: "
        f"{row['ranks'] * alone / together:.2f} times"
        f"; averaging {row['averaging_s']:.4f} s; {max(row['gib'])} GiB; settled in {row['settling_s']} s"
        f"\n    alone {row['alone']['losses']}\n    together {row['together']['losses']}"
        + (f"\n    {row['not_recorded']}" if "not_recorded" in row else "")
    )


def main() -> int:
    """Measure the cases; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[case[0] for case in CASES], help="only these, in this order")
    parser.add_argument("--number", type=int, help="of GPUs; default: all, with --tiny two processes")
    parser.add_argument("--seconds", type=float, default=470, help="begin no further case after this time")
    parser.add_argument("--limit", type=float, default=200, help="seconds after which a case is ended")
    parser.add_argument("--tiny", action="store_true", help="tiny models: to try it, not to measure")
    parser.add_argument("--out", type=Path, help="write all numbers to this JSON file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--recorded", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child, asked.recorded, asked.tiny)
    asked.number = asked.number or (2 if asked.tiny else len(gpus()))
    rows: list[Row] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in asked.cases or [case[0] for case in CASES]:
            for recorded in (True, False):
                if time.monotonic() - began > asked.seconds:
                    print(f"{name}: no time is left", flush=True)
                    continue
                rows.append(run(name, recorded, asked, Path(folder)))
                print(f"{time.monotonic() - began:4.0f} s  {line(rows[-1])}", flush=True)
                if asked.out:
                    asked.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return int(any("failed" in row for row in rows))


def gpus() -> list[Any]:
    """The GPUs of this machine. Ends the program where there is only one."""
    from library.runs.machine import read_gpus

    found = read_gpus()
    if len(found) < 2:
        sys.exit("there are not two GPUs here; --tiny tries it on the processor")
    return found


if __name__ == "__main__":
    sys.exit(main())
