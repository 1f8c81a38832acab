"""Results of compile_autotune, stored for the next start of a training with the same fingerprint."""

import contextlib
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
import torch

from library.compiler import cache
from library.config.json_types import JsonObject
from library.config.schema import values
from library.files import write_atomic
from library.memory import attention

if TYPE_CHECKING:
    from library.train.compiling.autotune import Tuner

ROOT = Path(__file__).resolve().parents[2]
CODE = (
    "compiler/*.py",
    "memory/**/*.py",
    "methods/*.py",
    "train/compiling/autotune.py",
    "measuring/*.py",
    "train/compiling/precompile.py",
    "train/step/loss.py",
)
PACKAGES = ("diffusers", "transformers", "lycoris-lora")  # their code runs in a pass, too
SECTIONS = ("compile", "memory", "precision", "network")
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
# Left out: what changes only values of tensors (shapes are in the fingerprint), or happens between passes.
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
SHARES = 20  # frequencies of image sizes are compared in twentieths of all batches
VERSION = 4


def folder() -> Path:
    """The folder of stored results: beside compiled code, in the user's cache folder."""
    return platformdirs.user_cache_path("kohya", appauthor=False) / "tuning"


def fingerprint(tuner: "Tuner") -> str:
    """A training's fingerprint: machine, PyTorch, code, model, trained weights, options, sizes of batches."""
    config, world, known = tuner.config, tuner.world, tuner.compute_loss
    ours = values(config)
    sections = {n for section in SECTIONS for n in getattr(getattr(config, section, None), "__dataclass_fields__", ())}
    kinds = tuner.batches.kinds()  # with rounded frequencies, so that one image more or less changes nothing
    facts = {
        "version": VERSION,
        "machine": [cache.key(world.device), torch.get_num_threads(), world.ranks, attention.offered(world.device)],
        "code": [_code(known.family.name), *map(_version, PACKAGES)],
        "model": [
            [n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in known.components.denoiser.named_parameters()
        ],
        "encoders": {name: bool(known.method.trained_parts.get(name)) for name in sorted(known.components.encoders)},
        "options": {n: ours[n] for n in sorted(sections.union(MATTER) & set(ours)) if n not in NO_MATTER},
        "sizes": sorted([*kind, round(SHARES * number / kinds.total())] for kind, number in kinds.items()),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _code(family: str) -> str:
    found = hashlib.sha256()
    for pattern in (*CODE, f"families/{family}/*.py"):
        for path in sorted(ROOT.glob(pattern)):
            found.update(path.read_bytes())
    return found.hexdigest()


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def read(name: str, passes: int) -> list[JsonObject]:
    """Stored results; empty if there are none, they are damaged, or were measured for a training too short for this
    one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads((folder() / f"{name}.json").read_text(encoding="utf-8"))
        enough = known["complete"] or passes <= known["passes"]
        if known["version"] == VERSION and enough and all(isinstance(r["changes"], dict) for r in known["results"]):
            return known["results"]
    return []


def write(name: str, results: list[JsonObject], passes: int, complete: bool) -> None:
    """Store the results. If the folder cannot be written, the next start measures again."""
    with contextlib.suppress(OSError, ValueError):
        facts = {"version": VERSION, "passes": passes, "complete": complete, "results": results}
        write_atomic(folder() / f"{name}.json", json.dumps(facts, indent=1))
