"""What compiled code depends on, and its speed: machine, PyTorch, code, model, trained weights and options."""

import hashlib
from collections.abc import Collection
from pathlib import Path

import torch

from library.compiler import cache
from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.config.schema import option_values
from library.data.loading import Kind
from library.distributed.world import World
from library.measuring import stored_results
from library.memory import attention
from library.packages import installed_version
from library.train.step.loss import LossFunction

PROJECT_ROOT = Path(__file__).resolve().parents[2]
CODE = (
    "compiler/*.py",
    "families/shared/*.py",
    "memory/**/*.py",
    "methods/*.py",
    "train/compiling/autotune.py",
    "measuring/*.py",
    "train/compiling/precompile.py",
    "train/step/loss.py",
)
PACKAGES_IN_A_PASS = ("diffusers", "transformers", "lycoris-lora")  # a pass runs their code, too
DECIDING_SECTIONS = ("compile", "memory", "precision", "network")
MATTER = (
    "t5xxl_max_token_length",
    "t5xxl_train_length",
    "apply_t5_attn_mask",
    "max_token_length",
    "cache_latents",
    "cache_latents_to_disk",
    "cache_text_encoder_outputs",
    "cache_text_encoder_outputs_to_disk",
    "fused_backward_pass",
)
# Excluded, as they change only the values of tensors (shapes are in the fingerprint), or act between passes.
NO_MATTER = (
    "compile_cache_dir",
    "compile_compare_steps",
    "compile_fallback",
    "compile_warmup",
    "network_alpha",
    "network_weights",
    "dim_from_weights",
    "base_weights",
    "base_weights_multiplier",
    "scale_weight_norms",
    "training_comment",
    "no_metadata",
)


def fingerprint_settings(config: RunConfig, world: World, kinds: Collection[Kind]) -> str:
    """Identify a training's graphs as far as known before its model is read; `kinds` are those of its batches."""
    dynamic, sides = config.compile.dynamic, {kind[1:] for kind in kinds}
    # Graphs of one size serve no other; those of several sizes serve all, but no other number of images.
    is_single = dynamic is False or (dynamic is None and len(sides) == 1)
    batches = sorted(map(list, kinds)) if is_single else sorted({kind[0] for kind in kinds})
    return stored_results.digest(_settings_facts(config, world) | {"batches": batches})


def training_facts(config: RunConfig, world: World, loss: LossFunction) -> JsonObject:
    """Return what the compiled code of a training depends on, except the sizes of its batches."""
    return _settings_facts(config, world) | {
        "model": [
            [n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in loss.components.denoiser.named_parameters()
        ],
        "encoders": {name: bool(loss.method.trained_parts.get(name)) for name in sorted(loss.components.encoders)},
    }


def _settings_facts(config: RunConfig, world: World) -> JsonObject:
    ours = option_values(config)
    sections = {
        n for section in DECIDING_SECTIONS for n in getattr(getattr(config, section, None), "__dataclass_fields__", ())
    }
    return {
        "machine": [
            cache.cache_key(world.device),
            torch.get_num_threads(),
            world.ranks,
            attention.offered(world.device),
        ],
        "code": [_code(config.family), *map(installed_version, PACKAGES_IN_A_PASS)],
        "script": config.script,
        "options": {n: ours[n] for n in sorted(sections.union(MATTER) & set(ours)) if n not in NO_MATTER},
    }


def _code(family: str) -> str:
    digest = hashlib.sha256()
    for pattern in (*CODE, f"families/{family}/*.py"):
        for path in sorted(PROJECT_ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()
