"""Where the seconds from launch to the first step go: full-size models, latents and captions cached.

    python -m benchmarks.first_step --work /tmp/first                      # SDXL and FLUX.1, on a GPU
    python -m benchmarks.first_step --family sdxl --cold --launcher        # with a cold page cache; by accelerate too
    python -m benchmarks.first_step --tiny                                 # tiny models, on a CPU too: to try it

The denoiser's file has random weights; files of the other networks have the right sizes and hold zeros, as a cached
training does not open them. The first training of a family makes the caches and is not shown. Each other one is a
process of its own, measured from outside until it says that it is ready, beside what it says itself. `--cold` adds one
after the model's file has been dropped from the page cache, `--options` one for each NAME=VALUE,NAME=VALUE.
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
TELLING = ("Ready", "Read ", "graphs", "recorded", "Peak", "Warning", "error", "Error")


# ---- files


def write_sparse(path: Path, tensors: dict[str, tuple[int, ...]], dtype: str, filled: str | None) -> None:
    """A .safetensors file of these shapes. Tensors whose names begin with `filled` are random, all others are holes."""
    import torch

    header, end, size = {}, 0, {"BF16": 2, "F16": 2}[dtype]
    for name, shape in tensors.items():
        begin, end = end, end + size * int(torch.Size(shape).numel())
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    few = torch.randn(2**24) * 0.02
    block = few.to(torch.bfloat16 if dtype == "BF16" else torch.float16).view(torch.uint8).numpy().tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        data = file.tell()
        for name, about in header.items():
            first, last = about["data_offsets"]
            if filled is not None and name.startswith(filled):
                file.seek(data + first)
                for at in range(first, last, len(block)):
                    file.write(block[: min(len(block), last - at)])
        file.truncate(data + end)


def make_inputs(inputs: Path, family: str, tiny: bool) -> None:
    """Images, tokenizers and the files of a model, as far as they are not there yet."""
    import torch
    from torch.nn import Module

    from library.demo import images
    from library.families import random_module
    from library.families.sdxl import keys
    from library.families.shared import clip, random_tokenizers

    def shapes(network: Module, part: str = "") -> dict[str, tuple[int, ...]]:
        tensors = clip.clip_tensors(network) if part.startswith("clip") else network.state_dict()
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    if tiny:
        return versus_files.make_versus_inputs(inputs, {family}, tiny)
    if not (inputs / "images").exists():
        images.draw_images(inputs / "images", sizes=versus_files.IMAGE_SIZES * 2)
    models, module = inputs / "models", random_module(family)
    if (models / f"{family}.safetensors").exists():
        return None
    networks, place = module.make_networks(module.FULL), inputs / "tokenizers"
    parts = {part: shapes(make(), part) for part, make in networks.encoders.items()} | {"vae": shapes(networks.vae())}
    denoiser = shapes(networks.denoiser())
    random_tokenizers.clip_tokenizer(place / versus_files.TOKENIZERS[0])
    if family == "sdxl":
        random_tokenizers.clip_tokenizer(place / versus_files.TOKENIZERS[1])
        meta = {part: {n: torch.empty(s, device="meta") for n, s in named.items()} for part, named in parts.items()}
        meta["denoiser"] = {n: torch.empty(s, device="meta") for n, s in denoiser.items()}
        whole = {
            n: tuple(t.shape) for part, named in meta.items() for n, t in keys.SDXL_FILE.to_single(part, named).items()
        }
        write_sparse(models / "sdxl.safetensors", whole, "F16", keys.SINGLE_FILE_PREFIXES["denoiser"])
        return None
    random_tokenizers.t5_tokenizer(place / versus_files.TOKENIZERS[2])
    write_sparse(models / "flux.safetensors", denoiser, "BF16", "")
    for part, named in parts.items():
        write_sparse(models / f"{'ae' if part == 'vae' else part}.safetensors", named, "F16", None)
    return None


def drop(path: Path) -> str:
    """Take a file out of the page cache; the answer says how much of it is still there, where that can be known."""
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


# ---- a training


def run_until_first_step(name: str, command: list[str], environment: dict[str, str], log: Path) -> dict[str, Any]:
    """One training: seconds until it said that it is ready, seen from outside, and what it said."""
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
            if any(word in line for word in TELLING):
                print(f"    {time.time() - began:6.2f} {line.strip()[:300]}", flush=True)
    row["code"] = process.wait()
    if row["code"]:
        print(log.read_text()[-3000:])
    print(json.dumps(row), flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    """Measure all cases; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=("sdxl", "flux"), default=["sdxl", "flux"])
    parser.add_argument("--work", type=Path, default=Path("first_step"), help="the folder of models and results")
    parser.add_argument("--cold", action="store_true", help="once more with the model out of the page cache")
    parser.add_argument("--launcher", action="store_true", help="once more as the page starts it")
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE,...", help="more cases")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="tiny models: to try it, not to measure")
    asked = parser.parse_args(arguments)
    rows = [row for family in asked.family for row in measure_trainings(family, asked)]
    print(json.dumps(rows, indent=1))
    (asked.work / "first_step.json").write_text(json.dumps(rows, indent=1))
    return int(any(row["code"] for row in rows))


def measure_trainings(family: str, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All trainings of a family."""
    work, began = asked.work.resolve(), time.time()
    make_inputs(work / "inputs", family, asked.tiny)
    print(f"{family}: files after {time.time() - began:.1f} s", flush=True)
    (case,) = (
        case
        for case in versus_files.versus_cases(asked.tiny, asked.steps)
        if (case.family, case.kind, case.name) == (family, "lora", "plain")
    )
    toml = versus_files.write_toml(case, work, work / "inputs")
    script, model = (
        str(PROJECT_ROOT / "sd-scripts" / f"{case.script}.py"),
        work / "inputs/models" / f"{family}.safetensors",
    )
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
    if asked.launcher:
        from library.config import command

        yield train("launcher", command.training_command("", Path(script).name)[:-2])
    if asked.cold:
        print(f"{family}: {drop(model)} of the model left in the page cache", flush=True)
        yield train("cold", plain)
    for more in asked.options:
        yield train("options", plain, more)


if __name__ == "__main__":
    sys.exit(main())
