"""Training steps of full-size models with random weights on one GPU: time, memory, share of the GPU's rate, compiling.

    python benchmarks/full_size.py                           # everything, about 25 minutes on an H200
    python benchmarks/full_size.py --only flux --batches 1   # a part of it
    python benchmarks/full_size.py --out results.json

LoRA of rank 16 on all layers that sd-scripts adapts, 1024 x 1024, the trainer's own step: noise, forward, backward,
clipping, fused AdamW. `eager` with checkpointing is the habit of most users, and what the others are compared with.
Each case runs in a process of its own; the first compiles with an empty cache, `again` with the cache it left.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

SIDE = 1024
WARM_UP, TIMED = 3, 8
CKPT = {"gradient_checkpointing": True}
COMPILED = {"compile": True, "compile_fullgraph": True}
FP8 = {"fp8_base": True, "fp8_compute": True}
CASES = {
    "eager, checkpointing": CKPT,
    "eager": {},
    "compiled, checkpointing": {**COMPILED, **CKPT},
    "compiled, keeps attention": {**COMPILED, **CKPT, "checkpoint_keep_attention": True},
    "compiled, half the activations": {**COMPILED, "compile_activation_budget": 0.5},
    "compiled": COMPILED,
    "compiled again": COMPILED,
    "compiled, transformer blocks only": {**COMPILED, "compile_blocks": "transformer:all"},
    "compiled, fp8 stored, checkpointing": {**COMPILED, **CKPT, "fp8_base": True},
    "compiled, fp8, checkpointing": {**COMPILED, **CKPT, **FP8},
    "compiled, fp8": {**COMPILED, **FP8},
    "compiled, 20 swapped": {**COMPILED, **CKPT, "blocks_to_swap": 20},
    "compiled, CUDA graphs": {**COMPILED, "compile_mode": "reduce-overhead"},
    "compiled, max-autotune": {**COMPILED, "compile_mode": "max-autotune-no-cudagraphs"},
}
SIZES = {"flux": (1, 4), "sdxl": (1, 4, 8)}
GIB = 2**30


def denoiser_of(family, device):
    """The full-size denoiser with random weights, and the shape of its latents."""
    from library.bench import networks

    model, channels = (networks.flux(True), 16) if family == "flux" else (networks.unet(True), 4)
    return filled(model, device), (channels, SIDE // 8, SIDE // 8)


def filled(model, device):
    """Random weights, small enough that activations stay within half precision."""
    import torch

    model = model.to(torch.bfloat16).to_empty(device=device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1) if p.ndim < 2 and name.endswith(("scale", "weight")) else p.normal_(0, 0.02)
    return model


def text(family, number, device):
    """Random text outputs in the shapes of the caches."""
    import torch

    shapes = {
        "flux": {"l_pooled": (768,), "t5_out": (512, 4096), "txt_ids": (512, 3), "t5_attn_mask": (512,)},
        "sdxl": {"hidden_state1": (77, 768), "hidden_state2": (77, 1280), "pool2": (1280,)},
    }
    return {name: torch.randn(number, *shape, device=device) for name, shape in shapes[family].items()}


def prepared(family, number, name, folder):
    """A model that is ready to train, and the function that does a step."""
    import torch

    from library import families, learners, memory
    from library.config.schema import build
    from library.families.base import Parts
    from library.train import loss, optim

    device = torch.device("cuda")
    torch.manual_seed(0)
    module = {"flux": "networks.lora_flux", "sdxl": "networks.lora"}[family]
    values = {
        **{"mixed_precision": "bf16", "resolution": str(SIDE), "train_batch_size": number, "max_train_steps": 100},
        **{"network_module": module, "network_dim": 16, "network_alpha": 16, "network_train_unet_only": True},
        **{"optimizer_type": "AdamW", "cache_latents": True, "cache_text_encoder_outputs": True},
        **{"pretrained_model_name_or_path": "random", "train_data_dir": ".", "output_dir": folder},
        **({"clip_l": "random", "t5xxl": "random", "ae": "random"} if family == "flux" else {}),
        **{"compile_cache_dir": folder, **CASES[name]},
    }
    config = build(families.config_class(f"{family}_train_network"), values, notes=[])
    kind = families.of(config)
    denoiser, latent = denoiser_of(family, device)
    kind.depth = (19, 38)
    if family == "sdxl":
        from library.families.sdxl import keys

        kind.layout = keys.Layout.of({n: tuple(p.shape) for n, p in denoiser.named_parameters()})
    parts = Parts(denoiser, None, {}, {}, {})
    learner = learners.attach(parts, kind, config)
    memory.prepare(denoiser, kind, config, device, [(SIDE // 8, SIDE // 8)])
    made = optim.optimizer(learner, config)
    learner.train()
    run = SimpleNamespace(
        **{"device": device, "generator": torch.Generator(device).manual_seed(1), "encoding": None},
        **{"ranks": 1, "rank": 0, "config": config, "autocast": lambda: torch.autocast("cuda", torch.bfloat16)},
    )
    batch = random_batch(family, number, latent, device)

    def step():
        wrong = loss.of(batch, kind, parts, learner, run)
        wrong.backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        made.step()
        made.zero_grad(set_to_none=True)
        return wrong.detach()

    return step


def random_batch(family, number, latent, device):
    """Cached latents and text outputs, without anything that was encoded."""
    import torch

    from library.data.loading import Batch

    return Batch(
        captions=[""] * number,
        paths=[""] * number,
        latents=torch.randn(number, *latent, device=device),
        sizes=torch.tensor([[SIDE, SIDE, 0, 0, SIDE, SIDE]] * number, dtype=torch.float32, device=device),
        weights=torch.ones(number, device=device),
        text=text(family, number, device),
    )


def measure(family, number, name, folder):
    """One case in this process."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from library.compile_ledger import LEDGER

    step = prepared(family, number, name, folder)
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    counter = FlopCounterMode(display=False) if name == "eager" else contextlib.nullcontext()
    with counter:
        losses = [step()]
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    losses += [step() for _ in range(WARM_UP)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]
    for mark in marks[:-1]:
        mark.record()
        losses.append(step())
    marks[-1].record()
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1000 for a, b in zip(marks, marks[1:], strict=False)]
    LEDGER.drain()
    return {
        **{"step": statistics.median(seconds), "spread": [min(seconds), max(seconds)], "first": first},
        **{"peak_gib": torch.cuda.max_memory_allocated() / GIB, "compile": LEDGER.summary()},
        "flops": counter.get_total_flops() if name == "eager" else None,
        "graphs": [(e.block, e.forward, round(e.seconds, 1)) for e in LEDGER.events],
        "losses": [round(float(value), 5) for value in losses[:6]],
    }


def matmul_rate():
    """bf16 FLOP/s of a large product of random matrices, which is what this GPU can give."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        a @ b
    end.record()
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (begin.elapsed_time(end) / 1000)


def machine():
    """What all of this ran on."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(), "python": sys.version.split()[0], "matmul": matmul_rate(),
    }  # fmt: skip


def child(*given):
    """Run this file in a process of its own and read what it found."""
    done = subprocess.run([sys.executable, __file__, "--child", *map(str, given)], capture_output=True, text=True)
    if done.returncode:
        why = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["no word"]
        return {"failed": why[-1][:300], "log": done.stderr[-3000:]}
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("flux", "sdxl"))
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--out", type=Path, help="write all numbers to this JSON file")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if asked.child:
        if asked.child == ["machine"]:
            print(json.dumps(machine()))
        else:
            family, number, name, folder = asked.child
            print(json.dumps(measure(family, int(number), name, folder)))
        return
    found = {"machine": child("machine"), "cases": []}
    print(json.dumps(found["machine"]))
    print(
        f"{'':4} {'batch':>5} {'case':36} {'s/step':>8} {'x eager':>8} {'MFU':>6} {'GiB':>6} {'first step':>11} graphs"
    )
    for family in [asked.only] if asked.only else SIZES:
        for number in asked.batches or SIZES[family]:
            with tempfile.TemporaryDirectory() as folder:
                table(family, number, asked.cases, folder, found, asked.out)


def table(family, number, wanted, folder, found, out):
    """All cases of a family and a batch size."""
    base = None
    for name in CASES:
        if family == "flux" and "transformer blocks" in name:
            continue
        if wanted and name not in wanted:  # exactly, as "compiled" is a part of most names
            continue
        cache = Path(folder) / ("shared" if name in ("compiled", "compiled again") else name.replace(" ", "_"))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
        r = child(family, number, name, cache)
        found["cases"].append({"family": family, "batch": number, "case": name, **r})
        if out:
            out.write_text(json.dumps(found, indent=1))
        if "failed" in r:
            print(f"{family:4} {number:5} {name:36} failed: {r['failed']}", flush=True)
            continue
        base = base or r["step"]
        flops = next(
            (c["flops"] / c["batch"] for c in found["cases"] if c.get("flops") and c["family"] == family), None
        )
        share = f"{flops * number / r['step'] / found['machine']['matmul']:.0%}" if flops else "-"
        numbers = f"{r['step']:8.3f} {base / r['step']:8.2f} {share:>6} {r['peak_gib']:6.1f} {r['first']:11.1f}"
        graphs = f"{r['compile']['num_graphs']:6} {r['compile']['seconds']:8.1f}"
        print(f"{family:4} {number:5} {name:36} {numbers} {graphs}", flush=True)


if __name__ == "__main__":
    main()
