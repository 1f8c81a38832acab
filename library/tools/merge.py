"""Merge adapters into a checkpoint, or several into one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from library import families
from library.adapter_files import adapters, joining, storage, writing
from library.adapter_files.adapters import Lora
from library.adapter_files.changes import LayerChange
from library.adapter_files.factors import AdapterFactors
from library.adapter_files.joining import Part, Weighted
from library.adapter_files.models import ModelFile, WeightSlice, delta_shape
from library.adapter_files.names import Module
from library.adapter_files.storage import Planned, silent
from library.config.problems import (
    ConfigError,
    Message,
    Problem,
    Report,
    attempted,
    collecting,
    option_name,
    raise_if_any,
)

Addition = Callable[[Tensor], Tensor]  # rows of a base weight, in float32 -> the addition to them


@dataclass
class Merged:
    """The result."""

    path: Path
    modules: int  # modules added to weights
    left_out: list[str] = field(default_factory=list)  # modules of text encoders missing from this file


def merge_into_checkpoint(
    base: str | Path, loras: Weighted, out: str | Path, *, dtype: str | None = None, report: Report = silent
) -> Merged:
    """Add adapters of any kind, each with its weight, to a checkpoint or the transformer of another model.

    Each sum is computed in float32 and rounded once, to `dtype` ("float", "fp16", "bf16", "fp8") or to the stored
    dtype; fp8 applies only to adaptable matrices, all other tensors keep their dtype. Kinds that depend on weights
    (DoRA, OFT and others) use those of the base. The file is read and written tensor by tensor. Raises ConfigError if a
    file is of another family, or has modules that the model lacks or in other sizes.
    """
    problems: list[Problem] = []
    place = attempted(problems, lambda: storage.fresh(out, base, *(path for path, _ in loras)))
    kind = attempted(problems, lambda: storage.storage_dtype(dtype))
    model = attempted(problems, lambda: _model_to_write(base))
    weighted = attempted(
        problems, lambda: _read_loras(loras, silent if problems else report, model.family if model else "")
    )
    if place is None or model is None or weighted is None or problems:
        raise ConfigError(*problems)
    additions_by_key, merged, left_out = _additions_by_key(model, loras, weighted)
    in_8_bits = _adaptable(model) if kind == torch.float8_e4m3fn else None
    tensors = {key: model.planned(key, None if in_8_bits and key not in in_8_bits else kind) for key in model.shapes}
    for key, changes in additions_by_key.items():
        planned = tensors[key]
        tensors[key] = Planned(planned.dtype, planned.shape, partial(_add_changes, model, key, changes))
    storage.FilePlan(tensors).write_new(place, _metadata(base, loras, place), report)
    return Merged(place, merged, left_out)


def _model_to_write(base: str | Path) -> ModelFile:
    model = ModelFile(base)
    for key in model.shapes:
        model.dtype(key)  # raises ConfigError for one that cannot be written
    return model


def _additions_by_key(
    model: ModelFile, loras: Weighted, weighted: Sequence[tuple[Lora, float]]
) -> tuple[dict[str, list[tuple[WeightSlice, Addition]]], int, list[str]]:
    """Return what is added to each tensor, the number of modules, and those of text encoders that the model lacks.
    Raises ConfigError with the problem of each file that does not fit the model."""
    additions_by_key: dict[str, list[tuple[WeightSlice, Addition]]] = {}
    left_out: set[str] = set()
    merged, problems = 0, list[Problem]()
    for (path, _), (lora, weight) in zip(loras, weighted, strict=True):
        with collecting(problems):
            _check_family(path, lora, model.family, model.path)
            for module, part in parts_of(lora).items():
                additions = _additions(model, module, part, weight, path)
                merged += bool(additions)
                left_out |= set() if additions else {module.kohya}
                for place, addition in additions:
                    additions_by_key.setdefault(place.key, []).append((place, addition))
    raise_if_any(problems)
    if not additions_by_key:
        raise ConfigError(
            "no module of the LoRA is in {base}, which holds no text encoders: nothing to merge", base=model.path
        )
    return additions_by_key, merged, sorted(left_out)


def _check_family(path: str | Path, lora: Lora, family: str, other: str | Path) -> None:
    if lora.family != family:
        raise ConfigError(
            "{path} is a LoRA of {family}, and {base} is of another family",
            path=path,
            family=families.facts_of(lora.family).title,
            base=other,
        )


def join_loras(
    loras: Weighted,
    out: str | Path,
    *,
    ranks: joining.Ranks = joining.EXACT,
    dtype: str | None = None,
    trained_on: str | Path | None = None,
    report: Report = silent,
) -> Merged:
    """Make one LoRA of several adapters of any kind.

    Without ranks the matrices of plain LoRA are concatenated: the sum is exact, and ranks add up; other kinds become
    full differences, unless a LoRA of the same product is smaller. With ranks each sum is reduced to its largest
    singular values. Kinds that depend on weights need the model that they were `trained_on`. Raises ConfigError if the
    files are of different families or sizes.
    """
    problems: list[Problem] = []
    place = attempted(problems, lambda: storage.fresh(out, *(path for path, _ in loras)))
    kind = attempted(problems, lambda: storage.storage_dtype(dtype))
    model = attempted(problems, lambda: ModelFile(trained_on)) if trained_on is not None else None
    weighted = attempted(problems, lambda: _read_loras(loras, silent if problems else report))
    if place is None or weighted is None or problems:
        raise ConfigError(*problems)
    _check_joined(loras, weighted, model)
    family = weighted[0][0].family
    kind = kind or max((lora.dtype for lora, _ in weighted), key=lambda candidate: (candidate.itemsize, str(candidate)))
    tables = [(parts_of(lora), weight) for lora, weight in weighted]
    modules = sorted({module for table, _ in tables for module in table})
    plain: dict[Module, AdapterFactors] = {}
    changes: dict[Module, LayerChange] = {}
    for i, module in enumerate(modules):
        report(Message("merging"), i, len(modules))
        parts = [(table[module], weight) for table, weight in tables if module in table]
        part = joining.join_parts(module, family, parts, ranks, model)
        if isinstance(part, AdapterFactors):
            plain[module] = part.to(kind)
        else:
            changes[module] = part.to(kind)
    comment = f"merged ({ranks.how}): {_list_weighted(loras)}"
    metadata = writing.made_lora_metadata(family, comment, [lora for lora, _ in weighted])
    metadata["modelspec.merged_from"] = ", ".join(Path(path).name for path, _ in loras)
    writing.save_lora(writing.sized(Lora(family, plain, metadata, other_changes=changes)), place, report=report)
    return Merged(place, len(modules))


def parts_of(lora: Lora) -> Mapping[Module, Part]:
    return {**lora.adapters, **lora.other_changes}


def _check_joined(loras: Weighted, weighted: Sequence[tuple[Lora, float]], model: ModelFile | None) -> None:
    """Raise ConfigError with the problem of each file that cannot be joined with the first, or without a model."""
    problems: list[Problem] = []
    family = model.family if model else weighted[0][0].family
    for (path, _), (lora, _) in zip(loras, weighted, strict=True):
        with collecting(problems):
            _check_family(path, lora, family, model.path if model else loras[0][0])
            bound = next((change for change in lora.other_changes.values() if change.uses_weight), None)
            if bound is not None and model is None:
                template = (
                    "{path} is {kind}, whose change depends on the model that it was trained on: give that as {name}"
                )
                raise ConfigError(template, path=path, kind=bound.title, name=option_name("trained_on"))
    raise_if_any(problems)


def _read_loras(loras: Weighted, report: Report, family: str = "") -> list[tuple[Lora, float]]:
    """Return all files and their weights. Raises ConfigError with the problem of each that cannot be read."""
    if not loras:
        raise ConfigError("no LoRA was given: name at least one file")
    weighted, problems = [], list[Problem]()
    for i, (path, weight) in enumerate(loras):
        report(Message("reading"), i, len(loras))
        with collecting(problems):
            weighted.append((adapters.read_lora(path, family), float(weight)))
    raise_if_any(problems)
    return weighted


def _additions(
    model: ModelFile, module: Module, part: Part, weight: float, path: str | Path
) -> list[tuple[WeightSlice, Addition]]:
    """Return where a module goes, and its addition; empty for a text encoder that this file lacks."""
    if isinstance(part, AdapterFactors):
        place = _fitting(model, module, (part.up.shape[0], part.down[0].numel()), path)
        return [(place, lambda rows: weight * part.product().reshape(rows.shape))] if place else []
    if (shape := model.size(module)) is None or (part.has_weight and not part.fits(shape)):
        place = _fitting(model, module, None, path)  # raises, unless the file lacks this text encoder
    else:
        place = model.place(module)
    if place is None:
        return []
    additions: list[tuple[WeightSlice, Addition]] = []
    if part.has_weight:
        additions.append((place, lambda rows: part.ready().delta(rows, weight)))
    if (bias := part.bias(weight)) is not None:
        where = model.bias_place(module)
        if where is None or model.shapes[where.key][0] // where.parts != bias.numel():
            raise ConfigError(
                "{path} changes the bias of {module}, which {model} does not have: is it for another model?",
                path=path,
                module=module.kohya,
                model=model.path,
            )
        additions.append((where, lambda rows: bias.reshape(rows.shape)))
    return additions


def _fitting(model: ModelFile, module: Module, sizes: tuple[int, int] | None, path: str | Path) -> WeightSlice | None:
    """Return where an adapter of these rows and columns goes (None: the size does not fit); None for a text encoder
    that this file lacks.
    """
    shape = model.size(module)
    if shape is None:
        if module.part != "denoiser" and not any(model.size(m) for m in model.modules(False) if m.part == module.part):
            return None
        raise ConfigError(
            "{path} has the module {module}, which {model} does not have: is it for another model?",
            path=path,
            module=module.kohya,
            model=model.path,
        )
    if sizes is None:
        template = "{path}: {module} does not fit its layer, which is {shape} in {model}: is it for another model?"
        raise ConfigError(template, path=path, module=module.kohya, shape=list(shape), model=model.path)
    if sizes != (shape[0], torch.Size(shape[1:]).numel()):
        raise ConfigError(
            "{path}: {module} is for a layer of {rows} x {columns}, and that of {model} is {shape}",
            path=path,
            module=module.kohya,
            rows=sizes[0],
            columns=sizes[1],
            model=model.path,
            shape=list(shape),
        )
    return model.place(module)


def _adaptable(model: ModelFile) -> set[str]:
    places = (model.place(module) for module in model.modules(True))
    return {place.key for place in places if place}


def _add_changes(model: ModelFile, key: str, changes: list[tuple[WeightSlice, Addition]]) -> Tensor:
    """Return a tensor with all changes added."""
    # Each change is computed from the base's own weight, so that the order of files does not matter.
    base = model.tensor(key).float()
    tensor = base.to(torch.float32, copy=True)
    for place, addition in changes:
        rows = place.of(tensor)  # a view, so that the sum changes the tensor
        change = addition(place.of(base))
        if not delta_shape(tuple(rows.shape), change.flatten(1) if change.ndim > 1 else change[:, None]):
            raise ConfigError("{key} has another size than the LoRA expects", key=key)
        rows += change
    if not storage.is_finite(tensor):
        raise ConfigError(
            "{key} becomes NaN or infinite: the model or a LoRA is damaged, or a weight is far too large", key=key
        )
    return tensor


def _metadata(base: str | Path, loras: Weighted, out: Path) -> storage.Metadata:
    """Return the checkpoint's metadata, as far as it is certainly still true."""
    metadata = storage.metadata_of(base) or {"modelspec.sai_model_spec": "1.0.1"}
    for key in ("modelspec.hash_sha256", "modelspec.thumbnail", "sshs_model_hash", "sshs_legacy_hash"):
        metadata.pop(key, None)
    date = datetime.now().replace(microsecond=0).isoformat()
    merged = f"{Path(base).name}, {_list_weighted(loras)}"
    return metadata | {"modelspec.title": out.stem, "modelspec.date": date, "modelspec.merged_from": merged}


def _list_weighted(loras: Weighted) -> str:
    return ", ".join(f"{Path(path).name} x {weight:g}" for path, weight in loras)
