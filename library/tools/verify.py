"""Is this LoRA in order? Shapes, numbers, strength, and whether a model has all its modules."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library.config.problems import ConfigError, Report, Text
from library.tools import adapters, names, storage
from library.tools.adapters import AdapterFactors
from library.tools.models import ModelFile
from library.tools.names import ALPHA, DOWN, UP, Module
from library.tools.storage import silent

SHOWN = 5  # of a kind, in a sentence
MEDIAN_FACTOR = 100.0  # a module whose change is so many times the usual one is worth a look


@dataclass(frozen=True)
class ModuleReport:
    """One module."""

    module: str
    rank: int
    alpha: float
    strength: float  # alpha / rank
    norm: float  # Frobenius, of the change of the weight
    largest: float  # of the values in both matrices
    dead: bool  # changes nothing


@dataclass
class Findings:
    """What was found; in order when there are no problems."""

    path: str
    family: str = ""
    style: str = ""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    modules: list[ModuleReport] = field(default_factory=list)
    checked_against: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(lora: str | Path, base: str | Path | None = None, *, report: Report = silent) -> Findings:
    """Look at a LoRA file, and with `base` whether that model has each module in the right size (headers only).

    What is wrong with the LoRA is in the answer. Raises ConfigError for a base model that cannot be read.
    """
    model = ModelFile(base) if base is not None else None
    found = Findings(str(lora), checked_against=str(base or ""))
    try:
        stored, metadata = storage.opened(lora), storage.metadata_of(lora)
        groups, unknown = _groups(stored)
        adapters.add_alphas(groups, metadata)
    except ConfigError as e:
        found.problems.append(e.said)
        return found
    plain = any({DOWN, UP} & parts.keys() for parts in groups.values())
    if not plain and (key := next(filter(adapters.other_kind, unknown), "")):
        kind = adapters.other_kind(key)
        found.problems.append(
            Text("{key} belongs to {kind}, not to a plain LoRA, and only those are handled", key=key, kind=kind)
        )
        return found
    if unknown:
        found.problems.append(
            Text("{names}: no part of a plain LoRA, so most programs leave it out", names=_some(unknown))
        )
    if not groups:
        found.problems.append(Text("there is no LoRA in this file"))
        return found
    found.style = adapters.style_of(groups)
    for i, (name, parts) in enumerate(sorted(groups.items())):
        report(Text("checking modules"), i, len(groups))
        _look(found, name, parts)
    _overall(found)
    try:
        found.family = names.family_of(groups, metadata, names.sizes_of(stored.shapes()), model.family if model else "")
        modules = adapters.assembled({name: parts for name, parts in groups.items() if _whole(parts)}, found.family)
    except ConfigError as e:
        found.problems.append(e.said)
        return found
    if model is not None:
        _compare(found, modules, model)
    return found


def _groups(stored: Any) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    groups: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key in stored:
        parts = names.split(key)
        if parts is None:
            unknown.append(key)
        else:
            groups.setdefault(parts[0], {})[parts[1]] = stored[key]
    return groups, unknown


def _whole(parts: dict[str, Tensor]) -> bool:
    if not {DOWN, UP} <= parts.keys():
        return False
    up, down = parts[UP], parts[DOWN]
    return min(up.ndim, down.ndim) >= 2 and up.shape[1] == down.shape[0] and not adapters.odd_alpha("", parts)


def _look(found: Findings, name: str, parts: dict[str, Tensor]) -> None:
    """One module by itself."""
    for missing in sorted({DOWN, UP} - parts.keys()):
        found.problems.append(Text("{name} has no {part} matrix", name=name, part=missing))
    if not {DOWN, UP} <= parts.keys():
        return
    if odd := adapters.odd_alpha(name, parts):
        found.problems.append(odd)
        return
    up, down = parts[UP], parts[DOWN]
    if not _whole(parts):
        template = "{name} has matrices {up} and {down}, which do not fit together"
        found.problems.append(Text(template, name=name, up=list(up.shape), down=list(down.shape)))
        return
    broken = [part for part, tensor in parts.items() if not bool(torch.isfinite(tensor.float()).all())]
    if broken:
        found.problems.append(Text("{name} holds NaN or infinity ({parts})", name=name, parts=", ".join(broken)))
        return
    adapter = AdapterFactors(down, up, parts.get(ALPHA))
    alpha = float(parts[ALPHA]) if ALPHA in parts else float(adapter.rank)
    if alpha <= 0:
        template = "{name} has alpha {alpha}: it must be above 0, or the module does nothing"
        found.problems.append(Text(template, name=name, alpha=f"{alpha:g}"))
    left, right = adapter.factors()
    # ||U D||^2 = sum((U^T U) * (D D^T)): small matrices instead of one as large as the layer.
    norm = float(((left.T @ left) * (right @ right.T)).sum().clamp(min=0).sqrt())
    largest = max(float(up.float().abs().max()), float(down.float().abs().max()))
    dead = not (bool(up.any()) and bool(down.any()) and norm > 0)
    found.modules.append(ModuleReport(name, adapter.rank, alpha, adapter.strength, norm, largest, dead))
    if adapter.rank > min(left.shape[0], right.shape[1]):
        found.warnings.append(
            Text("{name} has rank {rank}, more than its layer can use: resize it", name=name, rank=adapter.rank)
        )


def _overall(found: Findings) -> None:
    dead = [row.module for row in found.modules if row.dead]
    if dead and len(dead) == len(found.modules):
        found.problems.append(
            Text("every module is dead: this LoRA changes nothing (was it trained with a rate of 0?)")
        )
    elif dead:
        found.warnings.append(Text("{count} modules change nothing: {names}", count=len(dead), names=_some(dead)))
    norms = sorted(row.norm for row in found.modules if not row.dead)
    if norms:
        usual = norms[len(norms) // 2]
        strong = [row.module for row in found.modules if row.norm > MEDIAN_FACTOR * usual]
        if strong:
            template = "{count} modules change their layer over {factor} times the usual: {names}"
            found.warnings.append(Text(template, count=len(strong), factor=f"{MEDIAN_FACTOR:g}", names=_some(strong)))
    if above := [row.module for row in found.modules if row.strength > 1]:
        found.warnings.append(
            Text("{count} modules have an alpha above their rank: {names}", count=len(above), names=_some(above))
        )


def _compare(found: Findings, modules: dict[Module, AdapterFactors], model: ModelFile) -> None:
    """Every module against the model's header."""
    if model.family != found.family:
        template = "the LoRA is for {family}, and {path} is a model of {other}"
        found.problems.append(Text(template, family=found.family, path=model.path, other=model.family))
        return
    absent, wrong, elsewhere = [], [], Counter()
    present = {module.part for module in model.modules(False)}
    for module, adapter in modules.items():
        shape = model.size(module)
        if shape is None and module.part not in present:
            elsewhere[module.part] += 1
        elif shape is None:
            absent.append(module.kohya)
        elif (adapter.up.shape[0], adapter.down[0].numel()) != (shape[0], torch.Size(shape[1:]).numel()):
            wrong.append(f"{module.kohya} ({adapter.up.shape[0]} x {adapter.down[0].numel()} for {list(shape)})")
    if absent:
        template = "{count} modules are not in {path}: {names}"
        found.problems.append(Text(template, count=len(absent), path=model.path, names=_some(absent)))
    if wrong:
        template = "{count} modules do not fit {path}: {names}"
        found.problems.append(Text(template, count=len(wrong), path=model.path, names=_some(wrong)))
    for part, count in elsewhere.items():
        template = "{count} modules of {part} could not be compared: {path} holds no such encoder"
        found.warnings.append(Text(template, count=count, part=part, path=model.path))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    more = len(names) - SHOWN
    return Text("{shown} and {more} more", shown=shown, more=more) if more > 0 else shown
