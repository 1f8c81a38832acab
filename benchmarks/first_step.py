"""Measure where the seconds from launch to the first step go: full-size models, cached latents and captions.

    python -m benchmarks.first_step --work /tmp/first                      # SDXL and FLUX.1, on a GPU
    python -m benchmarks.first_step --family sdxl --cold --launcher        # cold page cache; also by accelerate
    python -m benchmarks.first_step --tiny                         # a quick trial with tiny models, also on a CPU

The first training of a family writes the caches and is not shown. Every other one is a separate process, timed from
outside until its line "Ready", and listed with its own figures. `--cold` adds a training after the model's file was
dropped from the page cache, `--options` one for each NAME=VALUE,NAME=VALUE.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import versus, versus_files
from benchmarks.versus_files import PROJECT_ROOT

READY = re.compile(r"Ready for the first step after ([\d.]+) s: (.*)")
SHOWN_WORDS = ("Ready", "Read ", "graphs", "recorded", "Peak", "Warning", "error", "Error")


def drop(path: Path) -> str:
    """Drop a file from the page cache; return the share that is still cached, or "unknown"."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size, left, there = path.stat().st_size, 0, bytearray(4096)
        offsets = range(0, size, max(size // 200, 4096))
        for offset in offsets:
            try:
                left += os.preadv(file.fileno(), [there], offset, os.RWF_NOWAIT) > 0
            except BlockingIOError:
                continue
            except OSError:
                return "unknown"
    return f"{left / len(offsets):.0%}"


# ---- one training


def run_until_first_step(name: str, command: list[str], environment: dict[str, str], log: Path) -> dict[str, Any]:
    """Run one training; return the seconds until its line "Ready", timed from outside, and its own figures."""
    began, row = time.time(), dict[str, Any](case=name)
    with log.open("w") as log_file:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=PROJECT_ROOT,
            stdout=subprocess.PIPE,
            text=True,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        assert process.stdout
        for line in process.stdout:
            log_file.write(f"{time.time() - began:7.2f} {line}")
            if match := READY.search(line):
                row |= {"ready_s": round(time.time() - began, 1), "own_s": float(match[1]), "phases": match[2]}
            elif "step 1/" in line:
                row["first_step_s"] = round(time.time() - began, 1)
            if any(word in line for word in SHOWN_WORDS):
                print(f"    {time.time() - began:6.2f} {line.strip()[:300]}", flush=True)
    row["code"] = process.wait()
    if row["code"]:
        print(log.read_text()[-3000:])
    print(json.dumps(row), flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    """Measure all cases; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=("sdxl", "flux"), default=["sdxl", "flux"])
    parser.add_argument("--work", type=Path, default=Path("first_step"), help="the folder of models and results")
    parser.add_argument("--cold", action="store_true", help="also with the model dropped from the page cache")
    parser.add_argument("--launcher", action="store_true", help="also by the command that the page uses")
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE,...", help="more cases")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="tiny models: a quick trial, not a measurement")
    args = parser.parse_args(arguments)
    rows = [row for family in args.family for row in measure_trainings(family, args)]
    print(json.dumps(rows, indent=1))
    (args.work / "first_step.json").write_text(json.dumps(rows, indent=1))
    return int(any(row["code"] for row in rows))


def measure_trainings(family: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run all trainings of a family."""
    work, began = args.work.resolve(), time.time()
    versus_files.make_versus_inputs(work / "inputs", {family}, args.tiny)
    print(f"{family}: files after {time.time() - began:.1f} s", flush=True)
    case = versus_files.plain_case(family, args.tiny, args.steps)
    toml = versus_files.write_toml(case, work, work / "inputs")
    script = str(PROJECT_ROOT / "sd-scripts" / f"{case.script}.py")
    model = work / "inputs/models" / f"{family}.safetensors"
    ours = versus.Program(versus.THIS_TRAINER, PROJECT_ROOT, PROJECT_ROOT / "sd-scripts", sys.executable)
    environment, plain = ours.environment(work, "first_step"), [sys.executable, script]

    def train(name: str, start: list[str], more: str = "") -> dict[str, Any]:
        flags = [part for pair in filter(None, more.split(",")) for part in f"--{pair}".split("=", 1)]
        title = f"{family}-{time.time() - began:.0f}-{name}"
        print(title, flush=True)
        arguments = [
            "--config_file",
            str(toml),
            "--train_data_dir",
            str(work / "inputs/images"),
            "--output_dir",
            str(work / "out"),
            "--output_name",
            title,
            *flags,
        ]
        return run_until_first_step(title, [*start, *arguments], environment, work / f"{title}.log")

    yield train("caches", plain, "max_train_steps=1")
    yield train("warm", plain)
    if args.launcher:
        from library.config import command

        yield train("launcher", command.training_command("", Path(script).name)[:-2])
    if args.cold:
        print(f"{family}: {drop(model)} of the model left in the page cache", flush=True)
        yield train("cold", plain)
    for more in args.options:
        yield train("options", plain, more)


if __name__ == "__main__":
    sys.exit(main())
