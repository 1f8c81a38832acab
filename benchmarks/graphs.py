"""Graphs, recompilations and compile seconds over a dozen buckets: blocks wrapped one by one, and compiled in place.

    python benchmarks/graphs.py                 # FLUX.1 and SDXL, inductor, each way in a process of its own
    python benchmarks/graphs.py --backend aot_eager --family flux

The models have the real depth ratio and a small width: 8 double and 16 single blocks for FLUX.1, three levels for SDXL.
All Linear layers of the blocks carry a LoRA, and blocks recompute in backward, inside of what is compiled. `wrapped` is
`blocks[i] = torch.compile(blocks[i])` with nothing else, `diffusers` the same with diffusers' own FLUX.1 and without
recomputing, `in place` is what the trainer does, `again` is a second process with the caches of the first. `seconds`
are those of compiling, `CPU s` those of the whole process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BUCKETS = [(8, 8), (8, 10), (10, 8), (6, 12), (12, 6), (8, 12), (12, 8), (6, 10), (10, 6), (10, 10), (6, 14), (14, 6)]
TEXT = 24
FLUX_DEPTH = 8, 16  # double and single blocks


def flux():
    """A FLUX.1 denoiser with adapters, and a function that calls it for a bucket."""
    import torch

    from library.families.flux.family import FluxFamily as Family
    from library.families.flux.model import Flux, Sizes
    from library.families.shared.packing import Positions

    torch.manual_seed(0)
    model = Flux(Sizes(16, 16, 32, 48, 96, 24, 384, *FLUX_DEPTH, guidance=True))
    positions = Positions()

    def call(height, width):
        device = torch.device("cpu")
        img = torch.randn(2, height * width, 16)
        ids = {"img_ids": positions.image(height, width, device), "txt_ids": positions.text(TEXT, device)}
        given = {"txt": torch.randn(2, TEXT, 48), "y": torch.randn(2, 32), "guidance": torch.ones(2)}
        return model(img=img, timesteps=torch.rand(2), **ids, **given)

    return model, call, Family


def diffusers():
    """The same sizes in diffusers' own tree of FLUX.1, which keeps q, k and v apart."""
    import torch
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model: Any = FluxTransformer2DModel(
        in_channels=16,
        num_layers=8,
        num_single_layers=16,
        attention_head_dim=24,
        num_attention_heads=4,
        joint_attention_dim=48,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 10, 10),
    )

    def call(height, width):
        places = torch.cartesian_prod(torch.zeros(1), torch.arange(float(height)), torch.arange(float(width)))
        given = {"encoder_hidden_states": torch.randn(2, TEXT, 48), "pooled_projections": torch.randn(2, 32)}
        ids = {"img_ids": places, "txt_ids": torch.zeros(TEXT, 3), "guidance": torch.ones(2), "timestep": torch.rand(2)}
        return model(hidden_states=torch.randn(2, height * width, 16), **given, **ids, return_dict=False)[0]

    return model, call, ("FluxTransformerBlock", "FluxSingleTransformerBlock")


def sdxl():
    """An SDXL U-Net with adapters, and a function that calls it for a bucket."""
    import torch
    from diffusers import UNet2DConditionModel
    from diffusers.models.attention_processor import AttnProcessor2_0

    from library.families.sdxl.family import SdxlFamily as Family

    torch.manual_seed(0)
    unet: Any = UNet2DConditionModel  # which declares numbers where it takes one for each level
    model = unet(
        block_out_channels=(32, 64, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(2, 4, 8),
        cross_attention_dim=64,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=64 + 6 * 32,
    )
    model.set_attn_processor(AttnProcessor2_0())
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "output_scale_factor"):
            module.output_scale_factor = float(module.output_scale_factor)

    def call(height, width):
        added = {"text_embeds": torch.randn(2, 64), "time_ids": torch.rand(2, 6)}
        noisy, text = torch.randn(2, 4, 4 * (height // 2), 4 * (width // 2)), torch.randn(2, 77, 64)
        return model(noisy, torch.rand(2), text, added_cond_kwargs=added, return_dict=False)[0]

    return model, call, Family


def adapt(model, block_classes):
    """A LoRA on every Linear layer of the blocks."""
    from torch import nn

    from library.methods.adapters import AdapterSpec, LoraLinear
    from library.methods.factor_cache import FactorCache

    model.requires_grad_(False)
    adapters = []
    for block in (m for m in model.modules() if type(m).__name__ in block_classes):
        for name, layer in list(block.named_modules()):
            if isinstance(layer, nn.Linear):
                parent = block.get_submodule(name.rpartition(".")[0])
                adapters.append(LoraLinear.around(layer, AdapterSpec(rank=4, alpha=4.0)))
                setattr(parent, name.rpartition(".")[2], adapters[-1])
    FactorCache(model, adapters)


def wrap(model, block_classes, backend):
    """The usual way: every block becomes an OptimizedModule."""
    import torch

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in block_classes:
                setattr(parent, name, torch.compile(child, backend=backend))


def measure(family, way, backend):
    """Forward and backward over all buckets in this process; what it cost."""
    import torch

    from library import families
    from library.compiler import torch_private
    from library.compiler.log import CompileLog
    from library.config.building import build
    from library.memory import checkpointing
    from library.memory.compile_targets import blocks_by_class
    from library.memory.prepare import prepare_denoiser

    make: Any = {"flux": flux, "sdxl": sdxl, "diffusers": diffusers}[way if way == "diffusers" else family]
    model, call, kind = make()
    block_classes = getattr(kind, "block_classes", kind)
    adapt(model, block_classes)
    dynamo: Any = torch_private.config_module("dynamo")
    dynamo.recompile_limit = 64
    log = CompileLog()
    if way in ("wrapped", "diffusers"):
        if way == "wrapped":
            checkpointing.wrap(blocks_by_class(model, block_classes))
        wrap(model, block_classes, backend)
        log.listen()
    else:
        values = {"compile": True, "compile_fullgraph": True, "compile_backend": backend}
        values["gradient_checkpointing"] = True
        config = build(families.config_class(f"{family}_train_network"), values, notes=[])
        kind = object.__new__(kind)  # a family of a training holds its config, which blocks do not ask for
        prepare_denoiser(model, kind, config, torch.device("cpu"), sizes=BUCKETS, log=log)
    for height, width in BUCKETS:
        call(height, width).square().mean().backward()
    log.drain()
    return {
        "graphs": torch_private.compile_counters("stats")["unique_graphs"],
        "recompiles": sum(bool(e.reason) for e in log.events),
        "predicted": sum(log.predicted().values()) or None,
        "seconds": log.summary()["seconds"],
        "cpu": round(time.process_time(), 1),
        "cache_hits": sum(e.cache_hits for e in log.events),
        "wrapped_keys": sum("_orig_mod" in key for key in model.state_dict()),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("flux", "sdxl"), action="append")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--one", nargs=2, metavar=("FAMILY", "WAY"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one[0], asked.one[1], asked.backend)))
        return
    print(
        f"{'':6} {'way':9} {'graphs':>7} {'predicted':>10} {'recompiles':>11} {'seconds':>8} "
        f"{'CPU s':>6} {'cache hits':>10} {'wrapped keys':>13}"
    )
    for family in asked.family or ("flux", "sdxl"):
        with tempfile.TemporaryDirectory() as folder:
            for way in (*(("diffusers",) if family == "flux" else ()), "wrapped", "in place", "again"):
                cache = Path(folder) / (way if way in ("wrapped", "diffusers") else "ours")
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
                command = [sys.executable, __file__, "--backend", asked.backend, "--one", family, way]
                out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
                r = json.loads(out.splitlines()[-1])
                print(
                    f"{family:6} {way:9} {r['graphs']:7} {r['predicted'] or '-':>10} {r['recompiles']:11} "
                    f"{r['seconds']:8} {r['cpu']:6} {r['cache_hits']:10} {r['wrapped_keys']:13}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
