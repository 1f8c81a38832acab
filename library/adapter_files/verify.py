"""Verify an adapter file: shapes, values, strength, and whether a model has all its modules."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from library import families
from library.adapter_files import adapters, names, storage
from library.adapter_files.changes import LayerChange, rank_of
from library.adapter_files.factors import AdapterFactors
from library.adapter_files.joining import Part
from library.adapter_files.models import ModelFile
from library.adapter_files.names import ALPHA, DOWN, UP, Module
from library.adapter_files.storage import silent
from library.config.problems import ConfigError, Message, MessageLike, Problem, Report, attempted, counted

MAX_LISTED_NAMES = 5  # modules listed per sentence
MEDIAN_FACTOR = 100.0  # a change this many times the median is suspicious


@dataclass(frozen=True)
class ModuleReport:
    """One module."""

    module: str
    kind: str
    rank: int  # 0 for kinds without one
    alpha: float
    strength: float  # alpha / rank
    norm: float | None  # Frobenius norm of the weight's change; None if it depends on the weight
    largest: float  # largest value in its tensors
    dead: bool  # changes nothing


@dataclass
class Findings:
    """The findings; the file is valid without problems."""

    path: str
    family: str = ""
    style: str = ""
    problems: list[MessageLike] = field(default_factory=list)
    warnings: list[MessageLike] = field(default_factory=list)
    modules: list[ModuleReport] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_lora(lora: str | Path, base: str | Path | None = None, *, report: Report = silent) -> Findings:
    """Verify a LoRA file, and with `base` that the model has each module in the right size (headers only).

    All problems are returned, that of an unreadable base model among them.
    """
    findings, unread = Findings(str(lora)), list[Problem]()
    model = attempted(unread, lambda: ModelFile(base)) if base is not None else None
    findings.problems += unread
    try:
        stored, metadata = storage.open_adapter(lora)
        groups, unknown = adapters.split_by_module(stored)
        adapters.add_alphas(groups, metadata)
    except ConfigError as e:
        findings.problems.append(e.said)
        return findings
    if not groups:
        kinds = filter(adapters.other_kind, unknown)
        findings.problems.append(next(map(adapters.unknown_key_message, kinds), Message(adapters.NO_LORA)))
        return findings
    if unknown:
        template = "{names}: no part of an adapter that is known, so most programs leave it out"
        findings.problems.append(Message(template, names=_shorten_list(unknown)))
    findings.style = adapters.style_of(groups)
    sound = {}
    for i, (name, parts) in enumerate(sorted(groups.items())):
        report(Message("checking modules"), i, len(groups))
        if _check_module(findings, name, parts):
            sound[name] = parts
    _overall(findings)
    _note_own_names(findings, list(stored))
    try:
        findings.family = names.find_lora_family(
            groups, metadata, names.module_sizes(stored.shapes()), model.family if model else ""
        )
        plain = {name: parts for name, parts in sound.items() if LayerChange(parts).is_plain}
        modules: dict[Module, Part] = {**adapters.assemble_adapters(plain, findings.family)}
        modules |= adapters.place_changes(
            {name: parts for name, parts in sound.items() if name not in plain}, findings.family
        )
    except ConfigError as e:
        findings.problems.append(e.said)
        return findings
    if model is not None:
        _compare_modules(findings, modules, model)
    return findings


def _check_module(findings: Findings, name: str, parts: dict[str, Tensor]) -> bool:
    """Check one module by itself; return whether it is valid."""
    change = LayerChange(parts)
    if problem := _fit_problem(name, parts, change):
        findings.problems.append(problem)
        return False
    rank = rank_of(parts) or 0
    alpha = float(parts[ALPHA]) if ALPHA in parts and rank else float(rank)
    if rank and alpha <= 0:
        template = "{name} has alpha {alpha}: it must be above 0, or the module does nothing"
        findings.problems.append(Message(template, name=name, alpha=f"{alpha:g}"))
    if change.is_plain:
        left, right = AdapterFactors(parts[DOWN], parts[UP], parts.get(ALPHA)).factors()
        # ||U D||^2 = sum((U^T U) * (D D^T)): small matrices instead of one as large as the layer.
        norm = float(((left.T @ left) * (right @ right.T)).sum().clamp(min=0).sqrt())
        dead = not (bool(parts[UP].any()) and bool(parts[DOWN].any()) and norm > 0)
        if rank > min(left.shape[0], right.shape[1]):
            template = "{name} has rank {rank}, more than its layer can use: resize it"
            findings.warnings.append(Message(template, name=name, rank=rank))
    else:
        norm, dead = change.norm(), change.is_dead
    largest = max(float(tensor.float().abs().max()) for part, tensor in parts.items() if part != ALPHA)
    strength = alpha / rank if rank else 1.0
    findings.modules.append(ModuleReport(name, change.title, rank, alpha, strength, norm, largest, dead))
    return True


def _fit_problem(name: str, parts: dict[str, Tensor], change: LayerChange) -> MessageLike:
    if change.kind.title == "LoRA" and (missing := sorted({DOWN, UP} - parts.keys())):
        return Message("{name} has no {part} matrix", name=name, part=missing[0])
    if odd := adapters.find_odd_alpha(name, parts):
        return odd
    if {DOWN, UP} <= parts.keys() and not adapters.matrices_fit(parts):
        template = "{name} has matrices {up} and {down}, which do not fit together"
        return Message(template, name=name, up=list(parts[UP].shape), down=list(parts[DOWN].shape))
    if problem := change.problem(name):
        return problem
    try:
        shape = change.shape()
        fits = shape is None or change.fits(shape)
    except (IndexError, RuntimeError, ValueError):
        fits = False
    return "" if fits else Message("{name} has tensors that do not fit together ({kind})", name=name, kind=change.title)


def _note_own_names(findings: Findings, keys: list[str]) -> None:
    """Report names that this program reads but most others do not."""
    odd = [key for key in keys if names.cleaned(key) != key or ".default." in key]
    if odd:
        template = "other programs do not look for {keys}: {names}; write the file again with {command}"
        command = "kohya tools convert FILE --to kohya --out NEW"
        findings.warnings.append(
            Message(template, keys=counted(len(odd), "name"), names=_shorten_list(odd), command=command)
        )


def _overall(findings: Findings) -> None:
    dead = [row.module for row in findings.modules if row.dead]
    if dead and len(dead) == len(findings.modules):
        findings.problems.append(
            Message("every module is dead: this LoRA changes nothing (was it trained with a rate of 0?)")
        )
    elif dead:
        findings.warnings.append(_about_modules("nothing is changed by {modules}: {names}", dead))
    norms = sorted(row.norm for row in findings.modules if not row.dead and row.norm is not None)
    if norms:
        usual = norms[len(norms) // 2]
        strong = [row.module for row in findings.modules if (row.norm or 0.0) > MEDIAN_FACTOR * usual]
        if strong:
            template = "{modules} with a change of over {factor} times the usual: {names}"
            findings.warnings.append(_about_modules(template, strong, factor=f"{MEDIAN_FACTOR:g}"))
    if above := [row.module for row in findings.modules if row.strength > 1]:
        findings.warnings.append(_about_modules("{modules} with an alpha above the rank: {names}", above))


def _compare_modules(findings: Findings, modules: Mapping[Module, Part], model: ModelFile) -> None:
    """Compare every module with the model's header."""
    if model.family != findings.family:
        template = "the LoRA is for {family}, and {path} is a model of {other}"
        trained, other = (families.facts_of(name).title for name in (findings.family, model.family))
        findings.problems.append(Message(template, family=trained, path=model.path, other=other))
        return
    absent, wrong, elsewhere = [], [], Counter()
    present = {module.part for module in model.modules(False)}
    for module, part in modules.items():
        shape = model.size(module)
        if shape is None and module.part not in present:
            elsewhere[module.part] += 1
        elif shape is None:
            absent.append(module.kohya)
        elif misfit := _misfit(part, shape):
            wrong.append(f"{module.kohya} ({misfit} for {list(shape)})")
        elif isinstance(part, LayerChange) and part.bias() is not None and model.bias_place(module) is None:
            absent.append(f"{module.kohya} (bias)")
    if absent:
        template = "{path} has no layer for {modules}: {names}"
        findings.problems.append(_about_modules(template, absent, path=model.path))
    if wrong:
        template = "{path} has layers of other shapes for {modules}: {names}"
        findings.problems.append(_about_modules(template, wrong, path=model.path))
    for part, count in elsewhere.items():
        template = "{modules} of {part} could not be compared: {path} holds no such encoder"
        findings.warnings.append(Message(template, modules=counted(count, "module"), part=part, path=model.path))


def _misfit(part: Part, shape: tuple[int, ...]) -> str:
    """Describe the size that a module is for, if it does not match a weight's shape."""
    if isinstance(part, LayerChange):
        return "" if part.fits(shape) else part.title
    rows, columns = part.up.shape[0], part.down[0].numel()
    return "" if (rows, columns) == (shape[0], torch.Size(shape[1:]).numel()) else f"{rows} x {columns}"


def _about_modules(template: str, names: list[str], **facts: object) -> Message:
    return Message(template, modules=counted(len(names), "module"), names=_shorten_list(names), **facts)


def _shorten_list(names: list[str]) -> MessageLike:
    shown = ", ".join(names[:MAX_LISTED_NAMES])
    more = len(names) - MAX_LISTED_NAMES
    return Message("{shown} and {more} more", shown=shown, more=more) if more > 0 else shown
