"""What the machine, its GPU and its number of processes cannot do for a config."""

import contextlib
import os
from collections.abc import Iterator

import torch

from library import families
from library.compiler import cache, checks
from library.config import building, compile_modes, fixes, ineffective, schema
from library.config.environment import SWITCHED_ON, cpu_requested, process_count, shards_asked
from library.config.problems import ConfigError, Problem, together
from library.config.run_config import RunConfig
from library.memory import attention
from library.memory.quantization import fp8_matmul, int8_matmul

# Variables that `accelerate launch` sets if its config shards models.
SHARDING = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}


def find_machine_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what this machine cannot do."""
    device = training_device()
    if device.type == "cpu" and config.precision.mixed_precision == "fp16":
        template = ": fp16 needs a GPU, and none was found; use bf16 or no"
        yield Problem("mixed_precision", template, fix=fixes.compute_in_bf16(config))
    if missing := attention.missing_kernel(device, config.memory.attention_kernel):
        yield missing
    launchers = [launcher for switch, launcher in SHARDING.items() if os.environ.get(switch, "").lower() in SWITCHED_ON]
    for launcher in [*launchers, *["version 1 of FSDP"] * (shards_asked() == 1)]:
        yield Problem(
            "",
            topic="training",
            what=launcher,
            template=(
                "accelerate is set to use {what}, which is not supported here: choose MULTI_GPU in `accelerate "
                "config`, and set fsdp = true to shard a full fine-tune (FSDP2)"
            ),
        )
    if shards_asked() == 2 and os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() in SWITCHED_ON:
        yield Problem(
            "fsdp",
            ": accelerate is set to offload shards to CPU memory (fsdp_offload_params), which is not supported: "
            "set it to false in `accelerate config`",
        )
    if process_count() > 1 and config.memory.blocks_to_swap and not config.adapters and not config.optim.stepped_early:
        yield Problem(
            "blocks_to_swap",
            ": a full fine-tune on several GPUs can swap blocks only with Adafactor and fused_backward_pass; set "
            "both, or leave blocks_to_swap out",
        )
    if config.compile.compile and not config.compile.compile_fallback:
        yield from checks.find_compile_problems(config.compile, device)


def find_machine_notes(config: RunConfig) -> Iterator[Problem]:
    """Remark on options that this machine ignores, or handles badly."""
    for name in schema.changed(config).get("distributed", {}) if process_count() == 1 else ():
        yield ineffective.remark(name, "this training has a single process")
    yield from find_half_precision_notes(config)
    yield from find_missing_gpu_features(config)


def find_half_precision_notes(config: RunConfig) -> Iterator[Problem]:
    """Remark on a 16-bit dtype that the model exceeds, or that the GPU only emulates."""
    device, kind, facts = training_device(), config.precision.mixed_precision, families.facts_of(config.family)
    if kind == "fp16" and facts.exceeds_fp16:
        instead = together(["bf16", *["full_bf16"] * config.precision.full_fp16])
        yield Problem(
            "mixed_precision",
            "= fp16: the activations of {title} exceed its range, so the loss is likely to become NaN; use {instead}",
            title=facts.title,
            instead=instead,
            fix=fixes.compute_in_bf16(config),
        )
    is_old = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
    if kind == "bf16" and is_old and not facts.exceeds_fp16:
        fp16 = {"mixed_precision": "fp16"}
        with contextlib.suppress(ConfigError):  # other options may need bf16, which leaves no advice
            building.replace_options(config, **fp16)
            yield Problem("mixed_precision", "= bf16: this GPU emulates it, which is slow; fp16 is fast here", fix=fp16)


def find_missing_gpu_features(config: RunConfig) -> Iterator[Problem]:
    """Yield options that this machine's device does not support."""
    recorded_by = compile_modes.recorded_on_gpu_alone(config.compile)
    if recorded_by and training_device().type != "cuda":
        yield ineffective.remark(recorded_by, "no GPU was found that can record CUDA graphs")
    if config.compile.compile or (config.sample.wanted and config.sample.sample_compile == "true"):
        yield from cache.find_cache_problems(config.compile.compile_cache_dir, training_device())
    if not config.adapters:
        return
    fp8, int8 = fp8_matmul.supports_fp8(training_device()), int8_matmul.supports_int8(training_device())
    for name, works in (("fp8_compute", fp8), ("int8_compute", int8), ("auto_compute", fp8 or int8)):
        if not getattr(config.precision, name) or works:
            continue
        if name == "fp8_compute" and int8:
            yield Problem(
                name,
                "has no effect here: this GPU multiplies in int8, not in fp8; use auto_compute, which times both ways",
                fix={"fp8_compute": False, "auto_compute": True},
            )
        else:
            yield ineffective.remark(name, "this machine can store weights in 8 bits, but not multiply them")


def training_device() -> torch.device:
    return torch.device("cpu" if cpu_requested() or not torch.cuda.is_available() else "cuda")
