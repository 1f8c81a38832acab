"""A LoRA from the difference of two checkpoints."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from library.adapter_files import storage, writing
from library.adapter_files.adapters import Lora
from library.adapter_files.factors import AdapterFactors
from library.adapter_files.models import ModelFile
from library.adapter_files.names import Module
from library.adapter_files.storage import silent
from library.config.problems import ConfigError, Message, Report

ROUNDING = 0.25  # of a step of the type, on average


@dataclass(frozen=True)
class ExtractOptions:
    """How much of the difference is kept."""

    rank: int = 16
    conv_rank: int | None = None  # also SDXL's residual blocks, 3x3 convolutions with this rank
    clamp: float = 0.99  # values beyond this quantile are cut to it; 1 leaves all
    min_diff: float = 0.01  # text encoders that differ nowhere by more are left out
    iterations: int = 4  # of the quick decomposition; 0 for the exact one, which takes hours for FLUX.1
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("rank", "conv_rank"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError("{name} is {value}: it must be at least 1", name=name, value=value)
        if not 0.5 < self.clamp <= 1:
            raise ConfigError("clamp is {clamp}: it is a quantile, above 0.5 and at most 1", clamp=f"{self.clamp:g}")
        if self.min_diff < 0 or self.iterations < 0:
            raise ConfigError("min_diff and iterations cannot be negative")
        if not self.device.startswith(("cpu", "cuda")):
            raise ConfigError("device is {device}: use cpu or cuda", device=repr(self.device))
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError("device is cuda, but PyTorch finds no NVIDIA GPU here: use cpu")


@dataclass
class Extracted:
    """What came of it."""

    path: Path
    modules: int
    same: int  # modules that do not differ at all, which are left out
    left_out: tuple[str, ...]  # text encoders that hardly differ


def extract(
    tuned: str | Path,
    base: str | Path,
    out: str | Path,
    *,
    choices: ExtractOptions | None = None,
    dtype: str | None = None,
    report: Report = silent,
) -> Extracted:
    """Write the LoRA that comes nearest to `tuned` minus `base`, module by module, alpha = rank.

    Differences are made in float32; only one module is in memory at a time. Matrices much larger than the rank are
    decomposed by random projection with `iterations` power steps. Raises ConfigError when the two do not fit.
    """
    choices, out = choices or ExtractOptions(), storage.fresh(out, tuned, base)
    new, old, kind = ModelFile(tuned), ModelFile(base), storage.dtype_of(dtype)
    if new.family != old.family:
        raise ConfigError("{tuned} and {base} are models of different families", tuned=tuned, base=base)
    modules = [m for m in new.modules(choices.conv_rank is not None) if old.size(m) is not None]
    left_out = tuple(sorted(_alike(new, old, modules, choices.min_diff, report)))
    modules = [module for module in modules if module.part not in left_out]
    made, same = {}, 0
    for i, module in enumerate(modules):
        report(Message("extracting"), i, len(modules))
        change = difference(new, old, module)
        if not bool(change.any()):
            same += 1
            continue
        made[module] = nearest(change, choices).to(kind)
    if not made:
        raise ConfigError(
            "{tuned} and {base} do not differ in any layer that a LoRA can change", tuned=tuned, base=base
        )
    comment = f"extracted from {Path(tuned).name} minus {Path(base).name}"
    metadata = writing.described(new.family, comment, model=new.found)
    writing.save(writing.sized(Lora(new.family, made, metadata)), out, report=report)
    return Extracted(out, len(made), same, left_out)


def difference(new: ModelFile, old: ModelFile, module: Module) -> Tensor:
    """The change of one weight in float32, in its own shape. ConfigError when sizes differ or it holds no numbers."""
    sides = []
    for model in (new, old):
        place = model.place(module)
        if place is None or model.size(module) != new.size(module):
            raise ConfigError(
                "{module} has another size in {second} than in {first}: are they one family?",
                module=module.kohya,
                second=old.path,
                first=new.path,
            )
        sides.append(place.of(model.tensor(place.key)))
    change = _without_rounding(*sides)
    if not storage.is_finite(change):
        raise ConfigError(
            "{module} holds NaN or infinity in {first} or {second}: one of them is damaged",
            module=module.kohya,
            first=new.path,
            second=old.path,
        )
    return change


def _without_rounding(new: Tensor, old: Tensor) -> Tensor:
    """The difference of two weights in float32, without what one type has rounded off the other.

    A weight that equals the base in its own, coarser type has not changed. Where the base is the coarser one, a matrix
    has not changed when all its differences are within that type's rounding and as large as rounding makes them, which
    is a quarter of a step on average: a training that changes less than a step leaves smaller ones.
    """
    change = new.float() - old.float()
    if new.dtype == old.dtype:
        return change
    change = torch.where(new == old.to(new.dtype), 0.0, change)
    steps = change.abs() / _step(old)
    is_rounding = bool((change.abs() <= (_step(old) + _step(new)) / 2 * (1 + 1e-6)).all())
    return torch.zeros_like(change) if is_rounding and float(steps.mean()) > ROUNDING / 2 else change


def _step(weight: Tensor) -> Tensor:
    """The distance of neighbouring numbers of a weight's type, at each of its numbers."""
    about = torch.finfo(weight.dtype)
    exponent = torch.frexp(weight.float()).exponent
    smallest = torch.tensor(about.smallest_normal * about.eps)
    return torch.maximum(torch.ldexp(torch.tensor(about.eps), exponent - 1), smallest)


def nearest(change: Tensor, choices: ExtractOptions) -> AdapterFactors:
    """The adapter of limited rank that comes nearest to a change, clamped as the choices say."""
    large = change.ndim == 4 and change.shape[2:] != (1, 1)
    matrix = change.flatten(1).to(choices.device)
    rank = min((choices.conv_rank or choices.rank) if large else choices.rank, *matrix.shape)
    u, s, v = writing.decomposed(matrix, rank, choices.iterations)
    up, down = (u[:, :rank] * s[:rank]).cpu(), v[:rank].cpu()
    if choices.clamp < 1:
        values = torch.cat([up.flatten(), down.flatten()])
        place = 1 + round(choices.clamp * (len(values) - 1))
        limit = float(values.kthvalue(place).values)
        up, down = up.clamp(-limit, limit), down.clamp(-limit, limit)
    up = up.reshape(len(up), rank, *(1 for _ in change.shape[2:]))
    return AdapterFactors(
        down.reshape(rank, *change.shape[1:]).contiguous(), up.contiguous(), torch.tensor(float(rank))
    )


def _alike(new: ModelFile, old: ModelFile, modules: list[Module], least: float, report: Report) -> set[str]:
    """Text encoders of which no value differs by more than `least`."""
    parts = {module.part for module in modules} - {"denoiser"}
    for part in sorted(parts):
        own = [module for module in modules if module.part == part]
        for i, module in enumerate(own):
            report(Message("comparing text encoders"), i, len(own))
            if float(difference(new, old, module).abs().max()) > least:
                parts = parts - {part}
                break
    return parts
