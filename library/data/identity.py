"""Fingerprints of the networks that a cache was made with: samples of their weights, comparable across dtypes."""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError
from library.families.base import ModelComponents
from library.files import cache_folder, write_atomic

SAMPLED_WEIGHTS = 32  # numbers of a fingerprint, which are compared across dtypes
# Relative rounding error by dtype.
ROUNDING_ERRORS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = 2.0**-24  # the absolute error of float16 for small numbers


def fingerprint_networks(*networks: Any) -> JsonObject:
    """Identify networks: `exact`, a hash of weights; their dtype `type`, and a sample of them as numbers."""
    import torch

    digest, types, ends = hashlib.blake2b(digest_size=16), set(), []
    for network in networks:
        for name, tensor in sorted(network.state_dict().items()):
            piece = tensor.detach().flatten()[:256].contiguous().cpu()
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(piece.view(torch.uint8).numpy().tobytes() if piece.numel() else b"")
            # Vectors are often all 0 or 1, which identifies nothing.
            if tensor.is_floating_point() and tensor.ndim > 1 and piece.numel():
                types.add(str(tensor.dtype).removeprefix("torch."))
                ends.append(float(piece[-1]))
    sampled = min(SAMPLED_WEIGHTS, len(ends))
    marks = [ends[i * len(ends) // sampled] for i in range(sampled)]
    coarsest = max(types, key=lambda kind: ROUNDING_ERRORS.get(kind, 1.0), default="")
    return {"exact": digest.hexdigest(), "type": coarsest, "marks": marks}


# With complete caches, reading 10 GB of T5 just to check them would waste seconds.
# Why: docs/decisions/2026-11-22-networks-read-when-needed.md
def fingerprint_components(components: ModelComponents, names: Sequence[str]) -> JsonObject:
    """Return the fingerprint of these networks of a model, all of them read or none.

    The fingerprint of deferred networks is stored with the size and time of their files: while these are unchanged,
    caches are checked without reading the networks.
    """
    waiting = [components.deferred[name] for name in names if name in components.deferred]
    if not waiting:
        return fingerprint_networks(*_networks(components, names))
    facts = [[network.kind, [[str(f), *_file_version(f)] for f in network.files]] for network in waiting]
    stored_file = cache_folder() / "networks" / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(ConfigError, OSError, ValueError):
        stored = json.loads(stored_file.read_text(encoding="utf-8"))
        if isinstance(stored, dict) and {"exact", "type", "marks"} == stored.keys():
            return stored
    if "vae" in names:
        components.read_vae()
    else:
        components.read_encoders()
    fingerprint = fingerprint_networks(*_networks(components, names))
    with contextlib.suppress(ConfigError, OSError):  # if this fails, the networks are read again the next time
        write_atomic(stored_file, json.dumps(fingerprint))
    return fingerprint


def _networks(components: ModelComponents, names: Sequence[str]) -> list[Any]:
    return [components.vae if name == "vae" else components.encoders[name] for name in names]


def _file_version(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def is_same_network(cached: Any, current: JsonMapping | None) -> bool:
    """Return whether the fingerprint `cached` of a cache matches the networks `current`, in any dtype.

    Without networks (None) any fingerprint matches. In the same dtype all sampled weights must be equal. Caches of
    earlier versions hold only the hash.
    """
    if not current:
        return True
    if not isinstance(cached, Mapping):
        return cached == current["exact"]
    if cached.get("exact") == current["exact"]:
        return True
    kinds, marks = {str(cached.get("type")), current["type"]}, cached.get("marks")
    if len(kinds) == 1 or not kinds <= ROUNDING_ERRORS.keys() or not isinstance(marks, list):
        return False
    if not marks or len(marks) != len(current["marks"]) or not all(isinstance(mark, int | float) for mark in marks):
        return False
    tolerance = 1.25 * max(ROUNDING_ERRORS[kind] for kind in kinds)
    return all(abs(a - b) <= tolerance * abs(b) + SMALLEST for a, b in zip(marks, current["marks"], strict=True))
