"""A process that compiles a training's blocks into the cache, before the first step of the training or beside them.

It reads lines from stdin. The first has the training's settings, in JSON, by which it builds the model without weights
while the training reads them. The second has the calls of blocks; it gives one block of each kind random weights. Each
further line has the index of a call: it calls that block as the training does, and prints a line of JSON. An empty
line ends it. It also ends when stdin is closed, so it never outlives the training. An error is printed as the last
line, with a non-zero exit code.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from dataclasses import dataclass

import torch
from torch import nn

from library import families, methods
from library.compiler import block_calls, blocks, torch_private
from library.compiler.block_calls import BlockCall
from library.compiler.log import CompileLog
from library.config.building import build_config
from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.config.schema import options_of
from library.families.base import Family, ModelComponents
from library.families.shared import weights
from library.memory.prepare import prepare_denoiser
from library.memory.quantization import fp8_storage
from library.methods.base import TrainingMethod
from library.train.compiling.compile_process import LACKS_MEMORY

NICENESS = 10  # niceness: the training has priority

# Options that do not affect graphs: control of the training, and files that no shape depends on.
WITHOUT_GRAPH_INFLUENCE = {
    "compile_autotune": False,
    "compile_from_step": None,
    "compile_compare_steps": 0,
    "compile_blocks": None,
    "compile_fallback": False,
    "base_weights": None,
    "base_weights_multiplier": None,
    "resume": None,
}


@dataclass(frozen=True)
class MetaModel:
    """A training's model with shapes alone."""

    config: RunConfig
    family: Family
    components: ModelComponents
    method: TrainingMethod


def main() -> int:
    """Read the settings and the calls of blocks, and compile the block that each further line names."""
    torch_private.import_inductor()  # while the training loads its model
    settings = json.loads(sys.stdin.readline())
    if not settings.pop("waited_for"):
        with contextlib.suppress(AttributeError, OSError):  # on Windows the parent process sets the priority
            os.nice(NICENESS)
    device = torch.device(settings["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = build_model(settings)
    job = json.loads(sys.stdin.readline())
    # Not earlier: until now the training may need the whole GPU to encode the images, and it has stopped the processes
    # that do not fit.
    make_context(device)
    if job["settings"] != settings:  # the training has chosen other settings since
        model = build_model(job["settings"])
    wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    threading.Thread(target=_read_numbers, args=(wanted,), daemon=True).start()
    calls = [BlockCall(**call) for call in job["calls"]]
    with CompileLog() as log:
        prepare_called_blocks(model, job, calls, device, log)
        while (number := wanted.get()) is not None:
            call, began = calls[number], time.perf_counter()
            block_calls.repeat(model.components.denoiser, call, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(json.dumps({"compiled": call.path, "seconds": time.perf_counter() - began}), flush=True)
    return 0


def make_context(device: torch.device) -> None:
    """Make the CUDA context, which takes hundreds of MiB of a GPU, ahead of the first block."""
    if device.type == "cuda":
        torch.empty(1, device=device)


def build_model(settings: JsonObject) -> MetaModel:
    """Build the model of a training from the headers of its files, with what the training adds to it."""
    cls = families.config_class(settings["script"])
    plain = {name: value for name, value in WITHOUT_GRAPH_INFLUENCE.items() if name in options_of(cls)}
    config = build_config(cls, settings["values"] | plain, notes=[])
    with weights.shapes_only():
        family: Family = families.family_for(config)
        components = family.load(fp8_storage.storage_type(config), fp8_storage.compute_type(config))
        return MetaModel(config, family, components, methods.attach_method(components, family, config))


def prepare_called_blocks(
    model: MetaModel, job: JsonObject, calls: list[BlockCall], device: torch.device, log: CompileLog
) -> None:
    """Prepare the called blocks as in the training, with random weights; all other blocks are deleted."""
    denoiser, family, method = model.components.denoiser, model.family, model.method
    kept = {call.path for call in calls}
    learning = [path for path, p in denoiser.named_parameters() if p.requires_grad]
    if learning:  # the first trained layer decides which blocks come before all trainable ones
        path = min(learning, key=family.execution_key).rpartition(".")[0]
        outer = path.rpartition(".")[0]  # the adapter of the layer
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
    prepare_denoiser(denoiser, family, model.config, device, list(map(tuple, job["sizes"])), job["text_learns"], log)
    method.train()


def _thin_out(module: nn.Module, path: str, kept: set[str]) -> None:
    """Delete all submodules but `kept`, which keep their paths."""
    module._parameters.clear()
    module._buffers.clear()
    for name, child in list(module._modules.items()):
        full = f"{path}.{name}".removeprefix(".")
        if any(inner.startswith(f"{full}.") for inner in kept) and child is not None and full not in kept:
            _thin_out(child, full, kept)
        elif full not in kept:
            del module._modules[name]


def _read_numbers(indices: "queue.SimpleQueue[int | None]") -> None:
    """Queue the indices of calls, None for an empty line; end this process when stdin ends."""
    for line in sys.stdin:
        indices.put(int(line) if line.strip() else None)
    os._exit(1)


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    except Exception as error:
        code = LACKS_MEMORY if isinstance(error, torch.OutOfMemoryError) else code
        traceback.print_exc()
        print(f"{type(error).__name__}: {blocks.compile_error_cause(error)}", flush=True)
    os._exit(code)  # sys.exit could not close the input, which the other thread reads
