"""The process that compiles a training's blocks into the cache while that takes its first steps.

It reads one line of JSON from its input, makes one block of each kind with random weights, calls each as the training
does, and prints a line of JSON for each call. It ends when its input is closed, so it never outlives the training. An
error is printed as the last line, and the exit code is not 0.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback

import torch
from torch import nn

from library import families, methods
from library.compiler import block_calls, blocks
from library.compiler.block_calls import BlockCall
from library.compiler.log import CompileLog
from library.config.building import build
from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.config.schema import options
from library.families.base import Family
from library.families.shared import weights
from library.memory.prepare import prepare_denoiser
from library.memory.quantization import fp8_storage

NICER = 10  # niceness: the training has priority

# Options that have no influence on graphs: what a training does besides computing, and files that no shape depends on.
PLAIN = {
    "compile_autotune": False,
    "compile_from_step": None,
    "compile_compare_steps": 0,
    "compile_blocks": None,
    "compile_fallback": False,
    "base_weights": None,
    "base_weights_multiplier": None,
    "resume": None,
}


def main() -> int:
    """Do the job that is the first line of the input."""
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    with contextlib.suppress(AttributeError, OSError):  # on Windows the parent process sets the priority
        os.nice(NICER)
    device = torch.device(job["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    cls = families.config_class(job["script"])
    plain = {name: value for name, value in PLAIN.items() if name in options(cls)}
    config = build(cls, job["values"] | plain, notes=[])
    calls = [BlockCall(**call) for call in job["calls"]]
    with CompileLog() as log:
        denoiser = blocks_alone(config, job, calls, device, log)
        for call in calls:
            began = time.perf_counter()
            block_calls.repeat(denoiser, call, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(json.dumps({"compiled": call.path, "seconds": time.perf_counter() - began}), flush=True)
    return 0


def blocks_alone(
    config: RunConfig, job: JsonObject, calls: list[BlockCall], device: torch.device, log: CompileLog
) -> nn.Module:
    """The denoiser with only the blocks that are called, prepared as in the training; weights are random."""
    with weights.shapes_only():
        family: Family = families.family_for(config)
        components = family.load(fp8_storage.storage_type(config), fp8_storage.compute_type(config))
        method = methods.attach(components, family, config)
    denoiser, kept = components.denoiser, {call.path for call in calls}
    learning = [path for path, p in denoiser.named_parameters() if p.requires_grad]
    if learning:  # it decides which blocks come before all trainable ones
        path = min(learning, key=family.execution_key).rpartition(".")[0]
        outer = path.rpartition(".")[0]  # where the layer of an adapter is
        kept.add(outer if denoiser.get_submodule(outer)._parameters else path)
    _thin_out(denoiser, "", kept)
    for path in kept:
        part = denoiser.get_submodule(path).to_empty(device=device)
        with torch.no_grad():
            for tensor in (*part.parameters(), *part.buffers()):
                tensor.normal_(std=0.02) if tensor.dtype in (torch.float32, torch.bfloat16) else tensor.zero_()
    for cache in method.factor_caches:
        cache.adapters = [adapter for adapter in cache.adapters if adapter.lora_down.weight.device.type != "meta"]
    if not any(cache.adapters for cache in method.factor_caches):
        denoiser._forward_pre_hooks.clear()
    prepare_denoiser(denoiser, family, config, device, list(map(tuple, job["sizes"])), job["text_learns"], log)
    method.train()
    return denoiser


def _thin_out(module: nn.Module, path: str, kept: set[str]) -> None:
    """Remove all submodules of a module but some, which keep their paths."""
    module._parameters.clear()
    module._buffers.clear()
    for name, child in list(module._modules.items()):
        full = f"{path}.{name}".removeprefix(".")
        if any(one.startswith(f"{full}.") for one in kept) and child is not None and full not in kept:
            _thin_out(child, full, kept)
        elif full not in kept:
            del module._modules[name]


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {blocks.why(error)}", flush=True)
    os._exit(code)  # sys.exit could not close the input, which the other thread reads
