"""Measure every preset on a full-size model with random weights, within the memory in its name, beside other settings.

    python -m benchmarks.presets --family sdxl --out results.json    # on an H100 or H200, 5 to 8 minutes per family
    python -m benchmarks.presets --family flux --only lora-8gb       # one preset and its comparisons
    python -m benchmarks.presets --family sdxl --tiny                # a quick trial with tiny models, also on a CPU

Each case is the trainer's own step (noise, forward, backward, clipping, optimizer) with the preset's batch, rank and
optimizer, for images of three sizes in turn, in a separate process. First all cases compile in parallel into one cache;
then they are measured one after the other. For a preset the allocator is limited to the memory in its name, less 0.7
GiB for the desktop and the driver's share. Comparisons have no limit; their peak memory shows which GPU they need.

A row has: seconds per step (median over rounds), the GPU's busy time in it (kernels, and copies from and to the host),
peak memory of the whole GPU, the driver's included, seconds of compiling with a warm cache, and the recorded CUDA
graphs.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.preset_cases import PROJECT_ROOT, PresetCase, choose_case, known_models, preset_cases

BUCKET_SIZES = ((1024, 1024), (832, 1216), (1216, 832))
TINY_SIZES = ((128, 128), (64, 128), (128, 64))
DESKTOP = 0.7  # GiB that desktop and browser take on a user's GPU
BYTES_PER_GIB = 2**30
ROUNDS = 5  # over all sizes that are timed
WARMUP_ROUNDS = 4  # rounds before them if steps are recorded: compiling, two warm-up passes and the recording
COMPILE_PROCESSES = 8  # parallel compiling processes


# ---- in the child process


def serve_cases() -> None:
    """Import slow packages, wait for a case on stdin, and print its measurement."""
    import torch

    from library.bench import machine, prepared_model, subjects  # noqa: F401 - loaded while the case before is measured

    case = PresetCase(**json.loads(sys.stdin.readline()))
    # Not earlier: this process' driver memory would count for the others.
    device = machine.choose_device("auto")
    try:
        measurement: dict[str, Any] = measure_case(case, device)
    except Exception as error:  # a failure is a row, too
        import traceback

        traceback.print_exc()
        measurement = {
            "failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}" if str(error) else repr(error)
        }
        if device.type == "cuda":
            measurement["reserved_gib"] = round(torch.cuda.max_memory_reserved(device) / BYTES_PER_GIB, 2)
    print("\n" + json.dumps(measurement), flush=True)
    os._exit(0)  # compiler threads may not end


def measure_case(case: PresetCase, device: Any) -> dict[str, Any]:
    """Return the measurement of one case: seconds per step, the GPU's busy time in it, memory, compiling."""
    import torch

    from library.bench import prepared_model, subjects
    from library.measuring import timing

    sizes = bucket_sizes(case)
    values = {**case.values, "resolution": str(sizes[0][0]), "enable_bucket": False}
    if case.size == "tiny" and values.get("blocks_to_swap"):
        values["blocks_to_swap"] = 2  # of the few that there are
    subject = subjects.FamilySubject(case.script, values, case.size)
    config = subject.config({})
    torch.manual_seed(0)
    began = time.perf_counter()
    trainable = subject.make(config, device)
    loaded = time.perf_counter()
    with prepared_model.open_prepared(subject, config, device, sizes, trainable) as ready:
        del trainable
        timing.release_memory(device)  # random weights were drawn on the GPU; a training reads them from a file
        watch = MemoryPeak(device)
        limit, graphs = case.cap and watch.hold_to(case.cap), LogCapture("library.compiler.cudagraph")
        recorded = config.compile.records_graphs and not case.warm
        losses: list[Any] = []
        rounds = [
            timing.time_call(lambda: losses.extend(ready.step() for _ in sizes), device)
            for _ in range(WARMUP_ROUNDS if recorded else 2)
        ]
        measurement: dict[str, Any] = {
            "loading_s": round(loaded - began, 1),
            "settling_s": round(time.perf_counter() - loaded, 1),
        }
        measurement["rounds_s"] = [round(seconds, 2) for seconds in rounds]  # warm-up rounds over all sizes
        if not case.warm:
            each = [timing.time_call(lambda: [ready.step() for _ in sizes], device) / len(sizes) for _ in range(ROUNDS)]
            measurement |= {"s_it": round(sorted(each)[len(each) // 2], 4), "fastest": round(min(each), 4)}
            measurement |= busy(ready, len(sizes), device)
        done = ready.compiling()
        again = [f"{event.block}: {event.reason}" for event in ready.compile_log.recompilations()]
    if device.type == "cuda":  # of this process alone, in case others use the GPU
        measurement |= {"reserved_gib": round(torch.cuda.max_memory_reserved(device) / BYTES_PER_GIB, 2)}
        measurement |= {"allocated_gib": round(torch.cuda.max_memory_allocated(device) / BYTES_PER_GIB, 2)}
    measurement |= {
        "gib": watch.most(),
        "limit_gib": limit,
        "cuda_graphs": graphs.lines,
        "why_recompiled": again,
        **done,
    }
    return measurement | {"losses": [round(float(loss), 4) for loss in losses[:3]]}


def bucket_sizes(case: PresetCase) -> tuple[tuple[int, int], ...]:
    """Return three sizes, (width, height) in pixels, of about the preset's training area."""
    if case.size == "tiny":
        return TINY_SIZES
    side, multiple = int(case.values.get("resolution", 1024)), 64
    return tuple(
        (width * side // 1024 // multiple * multiple, height * side // 1024 // multiple * multiple)
        for width, height in BUCKET_SIZES
    )


class LogCapture(logging.Handler):
    """Collects a logger's messages."""

    def __init__(self, logger: str) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logging.getLogger(logger).setLevel(logging.INFO)
        logging.getLogger(logger).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class MemoryPeak:
    """Polls the memory in use on the whole GPU, as another program would see it."""

    def __init__(self, device: Any) -> None:
        import torch

        self.device, self.torch, self.peak = device, torch, 0
        if device.type == "cuda":
            threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            free, total = self.torch.cuda.mem_get_info(self.device)
            self.peak = max(self.peak, total - free)
            time.sleep(0.02)

    def hold_to(self, memory: float) -> float | None:
        """Limit the allocator to what a GPU of `memory` GiB would leave it; return that limit in GiB."""
        if self.device.type != "cuda":
            return None
        a = self.torch.randn(1024, 1024, device=self.device, dtype=self.torch.bfloat16)
        (a @ a).sum().item()  # loads cuBLAS
        free, total = self.torch.cuda.mem_get_info(self.device)
        taken = (total - free - self.torch.cuda.memory_reserved(self.device)) / BYTES_PER_GIB
        limit = memory - DESKTOP - taken
        self.torch.cuda.set_per_process_memory_fraction(min(1.0, limit * BYTES_PER_GIB / total), self.device)
        return round(limit, 2)

    def most(self) -> float | None:
        """Return the peak since the start, in GiB."""
        return round(self.peak / BYTES_PER_GIB, 2) if self.device.type == "cuda" else None


def busy(ready: Any, number: int, device: Any) -> dict[str, float]:
    """Return the seconds of a step in which the GPU ran kernels, copied from the host, copied to it, or did any of
    these."""
    if device.type != "cuda":
        return {}
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(number):
            ready.step()
        torch.cuda.synchronize(device)
    spans: dict[str, list[tuple[float, float]]] = {"busy_s": [], "kernels_s": [], "to_gpu_s": [], "to_host_s": []}
    for event in (event for event in profiler.events() or () if event.device_type.name == "CUDA"):
        copies = "to_gpu_s" if "HtoD" in event.name else "to_host_s" if "DtoH" in event.name else ""
        for name in ("busy_s", copies or "kernels_s"):
            spans[name].append((event.time_range.start, event.time_range.end))
    return {name: round(covered(sorted(some)) / 1e6 / number, 4) for name, some in spans.items()}


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans, which are sorted by their start."""
    total, end = 0.0, 0.0
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


# ---- in the parent process


class Process:
    """A child process that has imported slow packages and waits for its case."""

    def __init__(self, cache: Path, logs: Path, threads: int) -> None:
        places = {
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH")])),
        }
        handle, name = tempfile.mkstemp(suffix=".log", dir=logs)
        os.close(handle)
        self.log = Path(name)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.presets", "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("wb"),
            env=os.environ | places,
        )

    def begin(self, case: PresetCase) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(case.__dict__).encode() + b"\n")
        self.process.stdin.flush()

    def end(self, seconds: float) -> dict[str, Any]:
        """Return the child's measurement, or end the child after the time limit."""
        try:
            out, _ = self.process.communicate(timeout=max(1.0, seconds))
            return json.loads(out.decode().strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            self.process.kill()
            return {"failed": f"not done after {seconds:.0f} s"}
        except (ValueError, IndexError):
            last = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            return {"failed": f"the process ended: {last}"}


def warm(cases: list[PresetCase], cache: Path, logs: Path, until: float) -> None:
    """Compile all cases in parallel, as far as memory allows, so that measured cases find their graphs in the cache."""
    kinds = {case.graphs: case for case in cases if case.values.get("compile")}
    slow = [case for case in kinds.values() if case.family == "sdxl" and case.values.get("gradient_checkpointing")]
    todo = [*slow, *sorted((case for case in kinds.values() if case not in slow), key=lambda case: -case.room)]
    running: list[tuple[PresetCase, Process, threading.Thread]] = []
    room = 120
    while todo or running:
        running = [entry for entry in running if entry[2].is_alive()]
        free = room - sum(case.room for case, _, _ in running)
        case = next((case for case in todo if case.room <= free), None) if len(running) < COMPILE_PROCESSES else None
        if case and time.monotonic() < until:
            todo.remove(case)
            process = Process(cache, logs, threads=2)
            process.begin(replace(case, warm=True, cap=None))
            thread = threading.Thread(target=_finish, args=(case, process, until), daemon=True)
            thread.start()
            running.append((case, process, thread))
        elif time.monotonic() > until + 5:
            return
        else:
            time.sleep(0.2)


def _finish(case: PresetCase, process: Process, until: float) -> None:
    measurement = process.end(until - time.monotonic())
    note = measurement.get("failed") or f"settled in {measurement['settling_s']} s"
    print(f"  compiled {case.kind} {case.name}: {note} {measurement.get('compile', '')}", flush=True)


# Why: docs/decisions/2026-11-27-finished-experiments-are-removed.md
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=known_models(), nargs="+")
    parser.add_argument("--only", nargs="+", metavar="PRESET", help="only these presets and their comparisons")
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="NAME",
        help='only these, in this order; "flux lora-12gb blocks_to_swap=22" changes an option',
    )
    parser.add_argument("--cold", action="store_true", help="skip the parallel compilation at the start")
    parser.add_argument("--tiny", action="store_true", help="tiny models: a quick trial, not a measurement")
    parser.add_argument("--seconds", type=float, default=3600.0, help="seconds after which no further case begins")
    parser.add_argument("--share", type=float, default=0.5, help="share of the time limit for parallel compilation")
    parser.add_argument("--cache", type=Path, help="compiler cache folder; default: a temporary one")
    parser.add_argument("--out", type=Path, help="write all measurements to this JSON file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve_cases()
    if not args.family:
        parser.error(f"--family is needed: {', '.join(known_models())}")
    began = time.monotonic()
    cases = [
        case for family in args.family for case in preset_cases(family, args.only, "tiny" if args.tiny else "full")
    ]
    if args.cases:
        try:
            cases = [choose_case(cases, wanted) for wanted in args.cases]
        except ValueError as error:
            parser.error(str(error))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cache, logs = args.cache or Path(folder) / "cache", Path(folder)
        if not args.cold:
            warm(cases, cache, logs, began + args.seconds * args.share)
            print(f"compiled in parallel in {time.monotonic() - began:.0f} s", flush=True)
        following = Process(cache, logs, threads=8)
        for number, case in enumerate(cases):
            left = began + args.seconds - time.monotonic()
            if left < 0:
                break
            process = following
            process.begin(case)
            if number + 1 < len(cases):
                following = Process(cache, logs, threads=8)
            measurement = process.end(left)
            rows.append({"family": case.family, "kind": case.kind, "case": case.name, "cap": case.cap, **measurement})
            batch = case.values.get("train_batch_size", 1)
            print(preset_row(rows[-1], batch, time.monotonic() - began), flush=True)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        following.process.kill()


def preset_row(row: dict[str, Any], batch: int, at: float) -> str:
    start = f"{at:5.0f} s  {row['kind']:8} {row['case']:46} {row['cap'] or '':>5} batch {batch}"
    if "failed" in row:
        return f"{start} failed: {row['failed']} {row.get('reserved_gib', '')}"
    rounds = ", ".join(f"{seconds:.1f}" for seconds in row["rounds_s"])
    memory = f"{row['gib']} GiB (limit {row['limit_gib']}, used {row.get('allocated_gib')})"
    copies = f"kernels {row.get('kernels_s')}, copies {row.get('to_gpu_s')} and {row.get('to_host_s')}"
    numbers = f"{row['s_it']:8.4f} s, busy {row.get('busy_s')} ({copies}), {memory}"
    compiled = f"{row.get('compile', '')} {row.get('not_compiled', '')}"
    sentences = "".join(f"\n        {sentence}" for sentence in (*row["cuda_graphs"], *row["why_recompiled"]))
    return f"{start} {numbers}, settling {row['settling_s']} s ({rounds}) {compiled}{sentences}"


if __name__ == "__main__":
    main()
