"""Results of compile_autotune, stored for the next start of a training with the same fingerprint."""

import contextlib
import hashlib
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from library.compiler import cache
from library.config.json_types import JsonObject
from library.config.schema import option_values
from library.measuring import stored_results
from library.memory import attention

if TYPE_CHECKING:
    from library.train.compiling.autotune import Tuner

PROJECT_ROOT = Path(__file__).resolve().parents[2]
CODE = (
    "compiler/*.py",
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
SHARES = 20  # resolution of image-size frequencies: twentieths of all batches
VERSION = 4


def fingerprint_training(tuner: "Tuner") -> str:
    """Identify a training by machine, PyTorch, code, model, trained weights, options and batch sizes."""
    config, world, known = tuner.config, tuner.world, tuner.compute_loss
    ours = option_values(config)
    sections = {
        n for section in DECIDING_SECTIONS for n in getattr(getattr(config, section, None), "__dataclass_fields__", ())
    }
    kinds = tuner.batches.kinds()  # frequencies are rounded below, so that one image more changes nothing
    facts = {
        "version": VERSION,
        "machine": [cache.key(world.device), torch.get_num_threads(), world.ranks, attention.offered(world.device)],
        "code": [_code(known.family.name), *map(_installed_version, PACKAGES_IN_A_PASS)],
        "model": [
            [n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in known.components.denoiser.named_parameters()
        ],
        "encoders": {name: bool(known.method.trained_parts.get(name)) for name in sorted(known.components.encoders)},
        "options": {n: ours[n] for n in sorted(sections.union(MATTER) & set(ours)) if n not in NO_MATTER},
        "sizes": sorted([*kind, round(SHARES * number / kinds.total())] for kind, number in kinds.items()),
    }
    return stored_results.digest(facts)


def _code(family: str) -> str:
    found = hashlib.sha256()
    for pattern in (*CODE, f"families/{family}/*.py"):
        for path in sorted(PROJECT_ROOT.glob(pattern)):
            found.update(path.read_bytes())
    return found.hexdigest()


def _installed_version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def read_results(name: str, passes: int) -> list[JsonObject]:
    """Return stored results; empty if there are none, they are damaged, or were measured for a much shorter
    training.
    """
    known = stored_results.read_result(name)
    with contextlib.suppress(KeyError, TypeError):
        # A short training skips candidates that would pay in a longer one.
        enough = known["complete"] or passes <= known["passes"]
        if known["version"] == VERSION and enough and all(isinstance(r["changes"], dict) for r in known["results"]):
            return known["results"]
    return []


def store_results(name: str, results: list[JsonObject], passes: int, complete: bool) -> None:
    """Store the results. If the folder is not writable, the next start measures again."""
    facts = {"version": VERSION, "passes": passes, "complete": complete, "results": results}
    stored_results.store_result(name, facts)
