"""A full fine-tune whose model each GPU holds whole, and in shards (FSDP2): memory, seconds a step, losses.

    python -m benchmarks.sharding --out sharding.json   # all GPUs that there are; FLUX.1 on two H200s: 6 minutes
    python -m benchmarks.sharding --tiny --number 2     # tiny models, on a CPU too: to try it, not to measure

The same training is started three times, as a user starts it: on one GPU, on all with the whole model on each, and on
all with a part of it on each. A row says: seconds a step over the second half of the steps, the most memory in use on
each GPU, seconds until the first step, the wall from launch to the saved file, and the losses that were printed. Losses
of the last two should agree, as each process sees the same images and draws the same noise in both.
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks import versus, versus_files, versus_measure
from benchmarks.versus_files import PROJECT_ROOT

OPTIONS = {
    "optimizer_type": "AdamW",
    "optimizer_args": [],
    "fused_backward_pass": False,
    "save_precision": "bf16",
    "gradient_checkpointing": True,
    "cuda_graphs": "false",
}
SHARDING_WAYS = ("one GPU", "whole on each", "in shards")
LOSS = re.compile(r"^step \d+/\d+, epoch \d+, loss ([\d.]+)", re.MULTILINE)


def main(arguments: list[str] | None = None) -> int:
    """Run the trainings; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("sdxl", "flux"), default="flux")
    parser.add_argument("--number", type=int, help="how many GPUs; default: all")
    parser.add_argument("--ways", nargs="+", choices=SHARDING_WAYS, default=list(SHARDING_WAYS))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="tiny models: to try it, not to measure")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a training is ended")
    parser.add_argument("--work", type=Path, default=Path("versus"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    from library.runs.machine import read_gpus

    gpus = [gpu.index for gpu in read_gpus()]
    number, work = asked.number or max(2, len(gpus)), asked.work.resolve()
    (case,) = [
        case
        for case in versus_files.versus_cases(asked.tiny, asked.steps)
        if (case.family, case.kind, case.name) == (asked.family, "full", "checkpointing")
    ]
    case.options.update(OPTIONS | {"compile": asked.compile})
    versus_files.make_versus_inputs(work / "inputs", {asked.family}, asked.tiny)
    toml = versus_files.write_toml(case, work, work / "inputs")
    ours, rows = versus.Program(versus.THIS_TRAINER, PROJECT_ROOT, PROJECT_ROOT / "sd-scripts", sys.executable), []
    images = work / "sharding-images"
    if not images.exists():
        shutil.copytree(work / "inputs" / "images", images)
    for name in asked.ways:
        processes, sharded = 1 if name == "one GPU" else number, name == "in shards"
        title = name.replace(" ", "-")
        out = work / "sharding" / title
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        command = [
            sys.executable,
            "-m",
            "library.cli.main",
            "train",
            str(toml),
            "--num_processes",
            str(processes),
            "--train_data_dir",
            str(images),
            "--output_dir",
            str(out),
            "--output_name",
            title,
        ]
        environment = ours.environment(work, title) | {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        log = work / "sharding" / f"{title}.log"
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:processes])
        command += ["--fsdp"] * sharded
        training = versus_measure.measure_training(command, asked.steps, log, environment, PROJECT_ROOT, asked.limit)
        losses = [float(loss) for loss in LOSS.findall(log.read_text(encoding="utf-8", errors="replace"))]
        if not (out / f"{title}.safetensors").is_file():
            training.setdefault("failed", "left no file")
        rows.append({"model": name, "processes": processes, **training, "losses": losses})
        (out / f"{title}.safetensors").unlink(missing_ok=True)  # tens of GB each
        print(json.dumps(rows[-1]), flush=True)
    if asked.out:
        table: dict[str, Any] = {"machine": versus.machine_facts(), "family": asked.family, "steps": asked.steps}
        table |= {"options": case.options, "rows": rows}
        asked.out.write_text(json.dumps(table, indent=1), encoding="utf-8")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
