"""One module of several adapters: their sum, exact or reduced to a rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from library.adapter_files import writing
from library.adapter_files.changes import BIAS, NORM_BIAS, LayerChange
from library.adapter_files.factors import AdapterFactors
from library.adapter_files.models import ModelFile
from library.adapter_files.names import ALPHA, DOWN, UP, Module, lora_names_of
from library.config.problems import ConfigError, option_name

Weighted = Sequence[tuple[str | Path, float]]  # adapter files and their weights
Part = AdapterFactors | LayerChange
POWER_STEPS = 6  # power iterations of the randomised SVD
KERNEL = (3, 3)  # kernel of all large convolutions with adapters


def refuse_small_ranks(**ranks: int | None) -> None:
    """Raise ConfigError for a rank below 1, by the name of its option."""
    for name, value in ranks.items():
        if value is not None and value < 1:
            raise ConfigError("{name} is {value}: it must be at least 1", name=option_name(name), value=value)


@dataclass(frozen=True)
class Ranks:
    """The ranks that sums are reduced to; None keeps them exact."""

    rank: int | None = None
    conv_rank: int | None = None  # of convolutions; the same as `rank` when not given

    def __post_init__(self) -> None:
        refuse_small_ranks(rank=self.rank, conv_rank=self.conv_rank)

    @property
    def how(self) -> str:
        return f"cut to rank {self.rank}" if self.rank else "exact sum"

    def limit(self, shape: Sequence[int]) -> int | None:
        is_large = len(shape) == 4 and tuple(shape[2:]) != (1, 1)
        return (self.conv_rank or self.rank) if is_large else self.rank


EXACT = Ranks()


def join_parts(
    module: Module, family: str, parts: Sequence[tuple[Part, float]], ranks: Ranks, model: ModelFile | None
) -> Part:
    """Return the sum of several files' changes to one layer. Raises ConfigError if they are for different
    layer sizes.
    """
    shapes = [_shape(module, family, part, model) for part, _ in parts]
    shape = max(shapes, key=len)  # the most precise one: the kernel of a convolution may be flattened
    if any(
        other != shape and (other[0], torch.Size(other).numel()) != (shape[0], torch.Size(shape).numel())
        for other in shapes
    ):
        raise ConfigError(
            "the LoRAs have {module} in different sizes: they are for different models", module=module.kohya
        )
    limit = ranks.limit(shape)
    factors = [_factors(part, weight) for part, weight in parts]
    exact = [pair for pair in factors if pair is not None]
    if len(exact) == len(parts):
        up, down = torch.cat([up for up, _ in exact], dim=1), torch.cat([down for _, down in exact])
        if limit is not None:
            u, s, v = writing.decompose(module.kohya, up, down)
            up, down = u[:, :limit] * s[:limit], v[:limit]
        if (
            limit is not None
            or down.shape[0] * (shape[0] + down.shape[1]) < torch.Size(shape).numel()
            or all(isinstance(part, AdapterFactors) for part, _ in parts)
        ):
            return adapter_of(up, down, shape)
    return _whole_matrix(module, parts, shape, limit, model)


def adapter_of(up: Tensor, down: Tensor, shape: Sequence[int]) -> AdapterFactors:
    """Return a LoRA with alpha = rank from matrices [out, r] and [r, in * k * k], for a weight's shape."""
    rank = down.shape[0]
    up = up.reshape(up.shape[0], rank, *(1 for _ in shape[2:])).contiguous()
    return AdapterFactors(down.reshape(rank, *shape[1:]).contiguous(), up, torch.tensor(float(rank)))


def with_bias(adapter: AdapterFactors, bias: Tensor | None) -> Part:
    """Return a LoRA that also changes the bias, if that changes."""
    if bias is None:
        return adapter
    alpha = torch.tensor(float(adapter.rank)) if adapter.alpha is None else adapter.alpha
    return LayerChange({DOWN: adapter.down, UP: adapter.up, ALPHA: alpha, BIAS: bias})


def weight_shape(module: Module, family: str, part: Part) -> tuple[int, ...] | None:
    """Return the shape of the weight that a module is for, from its own tensors; None if only the weight
    determines it.
    """
    if isinstance(part, AdapterFactors):
        return part.up.shape[0], *part.down.shape[1:]
    shape = part.shape()
    if shape and len(shape) == 2 and lora_names_of(family).is_large_conv(module.path) and shape[1] % 9 == 0:
        return shape[0], shape[1] // 9, *KERNEL
    return shape


def _shape(module: Module, family: str, part: Part, model: ModelFile | None) -> tuple[int, ...]:
    model_size = model.size(module) if model is not None else None
    if isinstance(part, LayerChange) and model_size is not None and not part.fits(model_size):
        raise ConfigError(
            "{module} does not fit {model}: is it for another model?",
            module=module.kohya,
            model=model.path if model else "",
        )
    bias = part.bias() if isinstance(part, LayerChange) else None
    size = model_size or weight_shape(module, family, part) or (tuple(bias.shape) if bias is not None else None)
    if size is None:
        raise ConfigError(
            "{module} is not in {model}: is it for another model?",
            module=module.kohya,
            model=model.path if model else "",
        )
    return size


def _factors(part: Part, weight: float) -> tuple[Tensor, Tensor] | None:
    factors = part.factors() if isinstance(part, AdapterFactors) else part.exact_factors()
    return None if factors is None else (factors[0] * weight, factors[1])


def _whole_matrix(
    module: Module,
    parts: Sequence[tuple[Part, float]],
    shape: Sequence[int],
    limit: int | None,
    model: ModelFile | None,
) -> Part:
    """Return the sum as a full matrix, kept or reduced to a rank."""
    place = model.place(module) if model is not None else None
    base = place.of(model.tensor(place.key)).float() if model is not None and place else torch.zeros(*shape)
    total, biases, has_weight = torch.zeros(*shape), [], False
    for part, weight in parts:
        if isinstance(part, AdapterFactors):
            total += weight * part.product().reshape(total.shape)
        elif part.has_weight:
            total += part.ready().delta(base, weight)
        has_weight = has_weight or isinstance(part, AdapterFactors) or part.has_weight
        if isinstance(part, LayerChange) and (bias := part.bias(weight)) is not None:
            biases.append(bias)
    bias = torch.stack(biases).sum(0) if biases else None
    if len(shape) == 1 and has_weight:
        return LayerChange({"w_norm": total} | ({} if bias is None else {NORM_BIAS: bias}))
    if limit is not None and has_weight:
        return with_bias(nearest_lora(total, limit), bias)
    return LayerChange(({"diff": total} if has_weight else {}) | ({} if bias is None else {BIAS: bias}))


def nearest_lora(change: Tensor, rank: int) -> AdapterFactors:
    """Return the best LoRA of a rank for a weight change."""
    u, s, v = writing.decomposed(change.flatten(1), min(rank, *change.flatten(1).shape), POWER_STEPS)
    rank = min(rank, len(s))
    return adapter_of(u[:, :rank] * s[:rank], v[:rank], change.shape)
