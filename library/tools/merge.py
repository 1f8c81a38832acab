"""LoRAs merged into a checkpoint, or several into one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from library import families
from library.config.problems import ConfigError, Report, Text
from library.tools import adapters, storage, writing
from library.tools.adapters import AdapterFactors, Lora
from library.tools.models import ModelFile, WeightSlice, delta_shape
from library.tools.names import Module
from library.tools.storage import Planned, silent

Weighted = Sequence[tuple[str | Path, float]]  # LoRA files and their weights


@dataclass
class Merged:
    """What came of it."""

    path: Path
    modules: int  # that were added to weights
    left_out: list[str] = field(default_factory=list)  # of text encoders that this file does not hold


def merge(
    base: str | Path, loras: Weighted, out: str | Path, *, dtype: str | None = None, report: Report = silent
) -> Merged:
    """Add LoRAs, each with its weight, to the weights of an SDXL single file or a FLUX.1 transformer.

    Each sum is made in float32 and rounded once, to `dtype` ("float", "fp16", "bf16", "fp8") or to what the tensor is
    stored in. The file is read and written tensor by tensor. Raises ConfigError when a LoRA is of another family, or
    has modules that the model has not or in other sizes.
    """
    out, model, kind = storage.fresh(out, base, *(path for path, _ in loras)), ModelFile(base), storage.dtype_of(dtype)
    given = _read(loras, report, model.family)
    wanted: dict[str, list[tuple[WeightSlice, AdapterFactors, float]]] = {}
    left_out: list[str] = []
    for (path, _), (lora, weight) in zip(loras, given, strict=True):
        if lora.family != model.family:
            raise ConfigError("{path} is a LoRA of {family}, and {base} is of another family", path=path,
                family=_name(lora), base=base)  # fmt: skip
        for module, adapter in lora.adapters.items():
            place = _fitting(model, module, adapter, path)
            if place is None:
                left_out.append(module.kohya)
            else:
                wanted.setdefault(place.key, []).append((place, adapter, weight))
    if not wanted:
        raise ConfigError(
            "no module of the LoRA is in {base}, which holds no text encoders: nothing to merge", base=base
        )
    tensors = {key: model.planned(key, kind) for key in model.shapes}
    for key, changes in wanted.items():
        about = tensors[key]
        tensors[key] = Planned(about.dtype, about.shape, partial(_sum, model, key, changes))
    storage.FilePlan(tensors).write_new(out, _metadata(base, loras, out), report)
    return Merged(out, sum(len(changes) for changes in wanted.values()), sorted(set(left_out)))


def join(
    loras: Weighted,
    out: str | Path,
    *,
    rank: int | None = None,
    conv_rank: int | None = None,
    dtype: str | None = None,
    report: Report = silent,
) -> Merged:
    """Make one LoRA of several.

    Without `rank` the matrices are put together: the sum is exact, and ranks add up. With `rank` (and `conv_rank` for
    convolutions, the same when not given) each sum is cut to its largest singular values. Raises ConfigError when the
    LoRAs are of different families or sizes.
    """
    out = storage.fresh(out, *(path for path, _ in loras))
    for name, value in (("rank", rank), ("conv_rank", conv_rank)):
        if value is not None and value < 1:
            raise ConfigError("{name} is {value}: it must be at least 1", name=name, value=value)
    given = _read(loras, report)
    family = given[0][0].family
    for (path, _), (lora, _) in zip(loras, given, strict=True):
        if lora.family != family:
            raise ConfigError("{path} is a LoRA of {family}, and {other} is of another family", path=path,
                family=_name(lora), other=loras[0][0])  # fmt: skip
    modules = sorted({module for lora, _ in given for module in lora.adapters})
    kind = max((lora.dtype for lora, _ in given), key=lambda kind: (kind.itemsize, str(kind)))
    made: dict[Module, AdapterFactors] = {}
    for i, module in enumerate(modules):
        report(Text("merging"), i, len(modules))
        parts = [(lora.adapters[module], weight) for lora, weight in given if module in lora.adapters]
        limit = (conv_rank or rank) if parts[0][0].is_large_conv else rank
        made[module] = _joined(module, parts, limit).to(storage.dtype_of(dtype) or kind)
    how = f"cut to rank {rank}" if rank else "exact sum"
    comment = f"merged ({how}): {_listed(loras)}"
    metadata = writing.described(family, comment, [lora for lora, _ in given])
    metadata["modelspec.merged_from"] = ", ".join(Path(path).name for path, _ in loras)
    writing.save(writing.sized(Lora(family, made, metadata)), out, report=report)
    return Merged(out, len(made))


def _read(loras: Weighted, report: Report, family: str = "") -> list[tuple[Lora, float]]:
    if not loras:
        raise ConfigError("no LoRA was given: name at least one file")
    given = []
    for i, (path, weight) in enumerate(loras):
        report(Text("reading"), i, len(loras))
        given.append((adapters.read(path, family), float(weight)))
    return given


def _fitting(model: ModelFile, module: Module, adapter: AdapterFactors, path: str | Path) -> WeightSlice | None:
    """Where an adapter goes; None when it is of a text encoder that this file does not hold."""
    shape, rows, columns = model.size(module), adapter.up.shape[0], adapter.down[0].numel()
    if shape is None:
        if module.part != "denoiser" and not any(model.size(m) for m in model.modules(False) if m.part == module.part):
            return None
        raise ConfigError("{path} has the module {module}, which {model} has not: is it for another model?", path=path,
            module=module.kohya, model=model.path)  # fmt: skip
    if (rows, columns) != (shape[0], torch.Size(shape[1:]).numel()):
        raise ConfigError("{path}: {module} is for a layer of {rows} x {columns}, and that of {model} is {shape}",
            path=path, module=module.kohya, rows=rows, columns=columns, model=model.path,
            shape=list(shape))  # fmt: skip
    return model.place(module)


def _sum(model: ModelFile, key: str, changes: list[tuple[WeightSlice, AdapterFactors, float]]) -> Tensor:
    tensor = model.tensor(key).to(torch.float32, copy=True)
    for place, adapter, weight in changes:
        rows = place.of(tensor)  # a view
        change = adapter.product()
        if not delta_shape(tuple(rows.shape), change):
            raise ConfigError("{key} has another size than the LoRA expects", key=key)
        rows += weight * change.reshape(rows.shape)
    if not storage.is_finite(tensor):
        raise ConfigError(
            "{key} becomes NaN or infinite: the model or a LoRA is damaged, or a weight is far too large", key=key
        )
    return tensor


def _joined(module: Module, parts: list[tuple[AdapterFactors, float]], rank: int | None) -> AdapterFactors:
    first = parts[0][0]
    sizes = {(a.up.shape[0], *a.down.shape[1:]) for a, _ in parts}
    if len(sizes) > 1:
        raise ConfigError(
            "the LoRAs have {module} in different sizes: they are for different models", module=module.kohya
        )
    up = torch.cat([a.factors()[0] * weight for a, weight in parts], dim=1)
    down = torch.cat([a.factors()[1] for a, _ in parts])
    if rank is None:
        return first.like(up, down)
    u, s, v = writing.cut(module.kohya, up, down)
    return first.like(u[:, :rank] * s[:rank], v[:rank])


def _metadata(base: str | Path, loras: Weighted, out: Path) -> storage.Metadata:
    """That of the checkpoint, where it is known to be true still."""
    metadata = storage.metadata_of(base) or {"modelspec.sai_model_spec": "1.0.1"}
    for key in ("modelspec.hash_sha256", "modelspec.thumbnail", "sshs_model_hash", "sshs_legacy_hash"):
        metadata.pop(key, None)
    date = datetime.now().replace(microsecond=0).isoformat()
    merged = f"{Path(base).name}, {_listed(loras)}"
    return metadata | {"modelspec.title": out.stem, "modelspec.date": date, "modelspec.merged_from": merged}


def _listed(loras: Weighted) -> str:
    return ", ".join(f"{Path(path).name} x {weight:g}" for path, weight in loras)


def _name(lora: Lora) -> str:
    return families.facts(lora.family).title
