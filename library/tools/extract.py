"""Extract a LoRA from the difference of two checkpoints."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from library.adapter_files import storage, writing
from library.adapter_files.adapters import Lora
from library.adapter_files.factors import AdapterFactors
from library.adapter_files.joining import refuse_small_ranks
from library.adapter_files.models import ModelFile
from library.adapter_files.names import Module
from library.adapter_files.storage import silent
from library.config.problems import ConfigError, Message, Problem, Report, attempted, option_name

ROUNDING_SHARE = 0.25  # mean rounding error, in steps of the dtype


@dataclass(frozen=True)
class ExtractOptions:
    """How much of the difference to keep."""

    rank: int = 16
    conv_rank: int | None = None  # also SDXL's residual blocks, 3x3 convolutions with this rank
    clamp: float = 0.99  # clamp values to this quantile; 1 for no clamping
    min_diff: float = 0.01  # skip text encoders without a larger difference
    iterations: int = 4  # of the randomised SVD; 0 for the exact one, which takes hours for FLUX.1
    device: str = "cpu"

    def __post_init__(self) -> None:
        refuse_small_ranks(rank=self.rank, conv_rank=self.conv_rank)
        if not 0.5 < self.clamp <= 1:
            template = "{name} is {value}: it is a quantile, above 0.5 and at most 1"
            raise ConfigError(template, name=option_name("clamp"), value=f"{self.clamp:g}")
        for name in ("min_diff", "iterations"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(
                    "{name} is {value}: it cannot be negative", name=option_name(name), value=f"{value:g}"
                )
        if not self.device.startswith(("cpu", "cuda")):
            raise ConfigError(
                "{name} is {device}: use cpu or cuda", name=option_name("device"), device=repr(self.device)
            )
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(
                "{name} is cuda, but PyTorch finds no NVIDIA GPU here: use cpu", name=option_name("device")
            )


@dataclass
class Extracted:
    """The result."""

    path: Path
    modules: int
    same: int  # skipped modules without any difference
    left_out: tuple[str, ...]  # skipped text encoders that hardly differ
    others: int = 0  # tensors that differ, too, but are no weights of these modules


def extract_lora(
    tuned: str | Path,
    base: str | Path,
    out: str | Path,
    *,
    choices: ExtractOptions | None = None,
    dtype: str | None = None,
    report: Report = silent,
) -> Extracted:
    """Write the LoRA closest to `tuned` minus `base`, module by module, alpha = rank.

    Differences are in float32; only one module is in memory at a time. Matrices much larger than the rank get a
    randomised SVD with `iterations` power steps. Raises ConfigError if the checkpoints do not match.
    """
    choices, problems = choices or ExtractOptions(), list[Problem]()
    place = attempted(problems, lambda: storage.fresh(out, tuned, base))
    kind = attempted(problems, lambda: storage.storage_dtype(dtype))
    new, old = (attempted(problems, lambda path=path: ModelFile(path)) for path in (tuned, base))
    if place is None or new is None or old is None or problems:
        raise ConfigError(*problems)
    if new.family != old.family:
        raise ConfigError("{tuned} and {base} are models of different families", tuned=tuned, base=base)
    modules = [m for m in new.modules(choices.conv_rank is not None) if old.size(m) is not None]
    others = _changed_others(new, old, modules)
    left_out = tuple(sorted(_unchanged_encoders(new, old, modules, choices.min_diff, report)))
    modules = [module for module in modules if module.part not in left_out]
    adapters, num_unchanged = {}, 0
    for i, module in enumerate(modules):
        report(Message("extracting"), i, len(modules))
        change = weight_difference(new, old, module)
        if not bool(change.any()):
            num_unchanged += 1
            continue
        adapters[module] = nearest_adapter(change, choices).to(kind)
    if not adapters:
        raise ConfigError(
            "{tuned} and {base} do not differ in any layer that a LoRA can change", tuned=tuned, base=base
        )
    comment = f"extracted from {Path(tuned).name} minus {Path(base).name}"
    metadata = writing.made_lora_metadata(new.family, comment, model=new.description)
    writing.save_lora(writing.sized(Lora(new.family, adapters, metadata)), place, report=report)
    return Extracted(place, len(adapters), num_unchanged, left_out, others)


def _changed_others(new: ModelFile, old: ModelFile, modules: Iterable[Module]) -> int:
    """Count the tensors besides the weights of the modules that differ: biases, norms, embeddings, convolutions."""
    covered = {place.key for module in modules if (place := new.place(module))}
    shared = [key for key in new.shapes if key not in covered and old.shapes.get(key) == new.shapes[key]]
    pairs = ((new.tensor(key), old.tensor(key)) for key in shared)
    return sum(before.is_floating_point() and bool(_without_rounding(before, other).any()) for before, other in pairs)


def weight_difference(new: ModelFile, old: ModelFile, module: Module) -> Tensor:
    """Return the change of one weight in float32, in its shape. Raises ConfigError if sizes differ or values are not
    finite.
    """
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
    """Return the difference of two weights in float32, without the rounding between their dtypes."""
    # A weight equal to the base in its own, coarser dtype is unchanged. If the base is coarser, a matrix is unchanged
    # if all differences are within that dtype's rounding and average a quarter of a step, as rounding produces: smaller
    # changes by training would average less.
    change = new.float() - old.float()
    if new.dtype == old.dtype:
        return change
    change = torch.where(new == old.to(new.dtype), 0.0, change)
    steps = change.abs() / _step(old)
    is_rounding = bool((change.abs() <= (_step(old) + _step(new)) / 2 * (1 + 1e-6)).all())
    return torch.zeros_like(change) if is_rounding and float(steps.mean()) > ROUNDING_SHARE / 2 else change


def _step(weight: Tensor) -> Tensor:
    """Return the distance to the next representable value, for each value of a weight."""
    info = torch.finfo(weight.dtype)
    exponent = torch.frexp(weight.float()).exponent
    smallest = torch.tensor(info.smallest_normal * info.eps)
    return torch.maximum(torch.ldexp(torch.full_like(exponent, info.eps, dtype=torch.float32), exponent - 1), smallest)


def nearest_adapter(change: Tensor, choices: ExtractOptions) -> AdapterFactors:
    """Return the closest adapter of limited rank for a change, clamped by the options."""
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


def _unchanged_encoders(
    new: ModelFile, old: ModelFile, modules: list[Module], min_diff: float, report: Report
) -> set[str]:
    """Return text encoders without a difference above `min_diff`."""
    parts = {module.part for module in modules} - {"denoiser"}
    for part in sorted(parts):
        encoder_modules = [module for module in modules if module.part == part]
        for i, module in enumerate(encoder_modules):
            report(Message("comparing text encoders"), i, len(encoder_modules))
            if float(weight_difference(new, old, module).abs().max()) > min_diff:
                parts = parts - {part}
                break
    return parts
