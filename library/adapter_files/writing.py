"""LoRA files written by the tools: their metadata and sizes."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor

from library import families
from library.adapter_files import adapters, storage
from library.adapter_files.adapters import Lora
from library.adapter_files.changes import rank_of
from library.adapter_files.names import ALPHA
from library.adapter_files.storage import Metadata, silent
from library.config.problems import ConfigError, Report, counted
from library.families.network_args import LYCORIS

OVERSAMPLED = 16  # additional directions of the randomised SVD
INHERITED = ("ss_base_model_version", "modelspec.architecture", "modelspec.implementation", "modelspec.prediction_type")


def save_lora(
    lora: Lora, out: Path, *, style: str | None = None, dtype: str | None = None, report: Report = silent
) -> Path:
    """Write a LoRA in a format (by default its own), with its hashes, as `out`, which must be new.

    Raises ConfigError if a tensor has NaN or infinity, or exceeds `dtype`.
    """
    kind = storage.storage_dtype(dtype)
    plain = {module: adapter.to(kind) for module, adapter in lora.adapters.items()}
    changes = {module: change.to(kind) for module, change in lora.other_changes.items()}
    cast = Lora(lora.family, plain, lora.metadata, lora.style, changes)
    tensors, extra = adapters.tensors_in_format(cast, style or lora.style)
    if broken := [name for name, tensor in tensors.items() if not storage.is_finite(tensor)]:
        raise ConfigError(
            "{out} is not written: {tensors} with NaN or infinity, first {tensor}",
            out=out,
            tensor=broken[0],
            tensors=counted(len(broken), "tensor"),
        )
    metadata = {key: value for key, value in lora.metadata.items() if not key.startswith("sshs_")} | extra
    metadata.setdefault("modelspec.title", Path(out).stem)
    plan = storage.FilePlan.of_tensors(tensors)
    return plan.write_new(Path(out), metadata | plan.hashes(metadata), report)


def made_lora_metadata(family: str, comment: str, sources: Sequence[Lora] = (), model: str = "") -> Metadata:
    """Return the metadata of a LoRA made from others, or from models that `recognise` describes as `model`."""
    facts = families.facts_of(family)
    version, architecture = facts.relatives.get(model, (facts.base_model_version, facts.architecture))
    out = {
        "ss_v2": "False",
        "ss_base_model_version": version,
        "ss_network_module": next(iter(facts.adapter_modules)),
        "modelspec.architecture": f"{architecture}/lora",
        "modelspec.implementation": facts.implementation,
    }
    for lora in reversed(sources):
        out |= {key: lora.metadata[key] for key in INHERITED if key in lora.metadata}
    date = datetime.now().replace(microsecond=0).isoformat()
    return out | {"ss_training_comment": comment, "modelspec.sai_model_spec": "1.0.1", "modelspec.date": date}


def sized(lora: Lora) -> Lora:
    """Return the LoRA with its rank and alpha in the metadata; "Dynamic" if modules differ."""
    ranks = {a.rank for a in lora.adapters.values()}
    alphas = {a.rank if a.alpha is None else float(a.alpha) for a in lora.adapters.values()}
    for change in lora.other_changes.values():
        if rank := rank_of(change.parts):
            ranks.add(rank)
            alphas.add(float(change.parts[ALPHA]) if ALPHA in change.parts else rank)
    for key, values in (("ss_network_dim", ranks), ("ss_network_alpha", alphas)):
        if values:
            lora.metadata[key] = f"{values.pop():g}" if len(values) == 1 else "Dynamic"
    if lora.other_changes:
        lora.metadata["ss_network_module"] = LYCORIS
    return lora


def decomposed(matrix: Tensor, rank: int, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, S and V of a matrix, of which the first `rank` count: a randomised SVD with `iterations` power steps if
    the matrix is much larger; 0 for an exact one.
    """
    num_directions = 2 * rank + OVERSAMPLED
    if not iterations or 2 * num_directions > min(matrix.shape):
        return torch.linalg.svd(matrix, full_matrices=False)
    devices = [matrix.device] if matrix.device.type != "cpu" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)  # the same matrix gives the same LoRA
        u, s, v = torch.svd_lowrank(matrix, q=num_directions, niter=iterations)
    return u, s, v.T


def decompose(name: str, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U [out, r], S [r], V [r, in] of a product of thin matrices without forming it; r is at most the rank.

    Raises ConfigError, with the module's name, for NaN or infinity.
    """
    if not (storage.is_finite(up) and storage.is_finite(down)):
        raise ConfigError("{name} holds NaN or infinity: the file is damaged", name=name)
    q_up, r_up = torch.linalg.qr(up)
    q_down, r_down = torch.linalg.qr(down.T)
    u, s, v = torch.linalg.svd(r_up @ r_down.T, full_matrices=False)
    return q_up @ u, s, v @ q_down.T
