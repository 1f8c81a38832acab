"""The weight change of an adapter module that is no plain LoRA: LyCORIS' kinds, and DoRA.

Formulas follow the package's forward pass in training. Sums are in float32. Strength 0 leaves the layer unchanged; for
kinds that multiply the weight (DoRA, OFT), a strength below 1 interpolates towards the identity.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from library.adapter_files import storage
from library.adapter_files.names import ALPHA, DOWN, UP
from library.config.problems import Message, MessageLike

MID, MAGNITUDE, BIAS, NORM_BIAS = "lora_mid.weight", "dora_scale", "diff_b", "b_norm"
ON_INPUT = "on_input"
NUMBERS = (ALPHA, ON_INPUT)
LACKS = "{name}, of {kind}, lacks {parts}: the file is damaged or was edited"
BROKEN = "{name} holds NaN or infinity ({parts})"
ONE = torch.ones(1)
OF_RANK = (DOWN, "hada_w1_b", "lokr_w2_b", "lokr_w1_b", "a2.weight")  # tensors with a row per rank
OFT_EPSILON = 1e-8  # added to the norm of OFT's generator, as in the package
Parts = Mapping[str, Tensor]
Sizes = tuple[tuple[str, tuple[int, ...]], ...]  # of tensors, by their names
Formula = Callable[[Parts, Tensor, float], Tensor]  # tensors of a module, weight, strength -> change of the weight


def rank_of(parts: Parts) -> int | None:
    # Alpha is relative to this rank; None for kinds without one.
    return next((parts[name].shape[0] for name in OF_RANK if name in parts), None)


def _scale(parts: Parts) -> float:
    rank = rank_of(parts)
    return float(parts[ALPHA]) / rank if ALPHA in parts and rank else 1.0


def low_rank(parts: Parts) -> tuple[Tensor, Tensor]:
    """Return (up [out, rank], down [rank, in * k * k]) of a LoRA, with or without a Tucker core."""
    up, down = parts[UP].flatten(1), parts[DOWN].flatten(1)
    if MID in parts:
        down = torch.einsum("m n ..., n i -> m i ...", parts[MID], down).flatten(1)
    return up, down


def _lora(parts: Parts, weight: Tensor, strength: float) -> Tensor:
    up, down = low_rank(parts)
    return (up @ down).reshape(weight.shape) * (strength * _scale(parts))


def _tucker(core: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return torch.einsum("i j ..., i p, j r -> p r ...", core, rows, columns)


def _loha(parts: Parts, weight: Tensor, strength: float) -> Tensor:
    halves = []
    for half in "12":
        rows, columns = parts[f"hada_w{half}_a"], parts[f"hada_w{half}_b"]
        product = _tucker(parts[f"hada_t{half}"], rows, columns) if f"hada_t{half}" in parts else rows @ columns
        halves.append(product.reshape(weight.shape))
    return halves[0] * halves[1] * (strength * _scale(parts))


def _lokr_factors(parts: Parts) -> tuple[Tensor, Tensor]:
    """Return both factors of LoKr's product."""
    left = parts["lokr_w1"] if "lokr_w1" in parts else parts["lokr_w1_a"] @ parts["lokr_w1_b"]
    if "lokr_w2" in parts:
        right = parts["lokr_w2"]
    elif "lokr_t2" in parts:
        right = _tucker(parts["lokr_t2"], parts["lokr_w2_a"], parts["lokr_w2_b"])
    else:
        rows, columns = parts["lokr_w2_a"], parts["lokr_w2_b"]
        right = (rows @ columns.flatten(1)).reshape(rows.shape[0], *columns.shape[1:])
    return left, right


def _lokr(parts: Parts, weight: Tensor, strength: float) -> Tensor:
    left, right = _lokr_factors(parts)
    left = left.reshape(*left.shape, *(1 for _ in range(right.ndim - left.ndim)))
    product = torch.kron(left, right.contiguous()).reshape(weight.shape)
    return product * (strength * _scale(parts))  # two whole matrices have no rank, so alpha has no effect


def _rotations(parts: Parts, rows: int) -> Tensor:
    """Return orthogonal blocks by Cayley's transform of the stored ones."""
    blocks = parts["oft_blocks"]
    generator = blocks - blocks.transpose(-1, -2)
    if limit := float(parts.get(ALPHA, 0.0)) * rows:  # the constraint, stored as alpha
        generator = generator * (limit / (generator.norm() + OFT_EPSILON)).clamp(max=1.0)
    identity = torch.eye(blocks.shape[-1], device=blocks.device)
    return (identity + generator) @ torch.linalg.inv(identity - generator)


def _rescaled(parts: Parts, turned: Tensor, strength: float) -> Tensor:
    if "rescale" not in parts:
        return turned
    return turned * (1 + strength * (_along(turned, 0, parts["rescale"]) - 1))


def _along(weight: Tensor, dim: int, values: Tensor) -> Tensor:
    # RuntimeError if there are more or fewer values.
    return values.reshape([size if at == dim else 1 for at, size in enumerate(weight.shape)])


def _oft(parts: Parts, weight: Tensor, strength: float) -> Tensor:
    blocks = parts["oft_blocks"]
    if blocks.ndim == 4:
        return _boft(parts, weight, strength)
    identity = torch.eye(blocks.shape[-1], device=weight.device)
    turns = _rotations(parts, weight.shape[0]) - identity
    rows = weight.reshape(*blocks.shape[:2], *weight.shape[1:])
    turned = weight + strength * torch.einsum("k n m, k n ... -> k m ...", turns, rows).reshape(weight.shape)
    return _rescaled(parts, turned, strength) - weight


def _boft(parts: Parts, weight: Tensor, strength: float) -> Tensor:
    """Apply BOFT's stages."""
    # Stage i rotates rows that are 2^i half blocks apart.
    size = parts["oft_blocks"].shape[-1]
    identity, turned = torch.eye(size, device=weight.device), weight.flatten(1)
    for stage, turns in enumerate(_rotations(parts, weight.shape[0])):
        distance = 2**stage * (size // 2)
        rows = turned.unflatten(0, (-1, 2, distance)).transpose(1, 2).flatten(0, 2).unflatten(0, (-1, size))
        rows = torch.einsum("b i j, b j c -> b i c", identity + strength * (turns - identity), rows)
        turned = rows.flatten(0, 1).unflatten(0, (-1, distance, 2)).transpose(1, 2).flatten(0, 2)
    return _rescaled(parts, turned.reshape(weight.shape), strength) - weight


def _glora(parts: Parts, weight: Tensor, strength: float) -> Tensor:
    a1, a2, b1, b2 = (parts[f"{name}.weight"] for name in ("a1", "a2", "b1", "b2"))
    if "bm.weight" in parts:
        b2 = torch.einsum("m n ..., n i -> m i ...", parts["bm.weight"], b2.flatten(1))
    inner = torch.einsum("o i ..., i r, r j -> o j ...", weight, a1.flatten(1), a2.flatten(1))
    return (inner + (b1.flatten(1) @ b2.flatten(1)).reshape(weight.shape)) * (strength * _scale(parts))


def _ia3(parts: Parts, weight: Tensor, strength: float) -> Tensor:
    return weight * _along(weight, 1 if bool(parts[ON_INPUT]) else 0, parts["weight"]) * strength


def _added(name: str) -> Formula:
    return lambda parts, weight, strength: parts[name].reshape(weight.shape) * strength


@dataclass(frozen=True)
class Kind:
    """A kind of adapter: its tensors in files, and its formula."""

    title: str
    needed: tuple[tuple[str, ...], ...]  # one of each group of tensors; "+" joins several names
    formula: Formula
    uses_weight: bool = False  # whether its change depends on the weight, so on one base model


CHANGE_KINDS = {  # by a unique tensor, or the prefix of its tensors' names; the first match counts
    "oft_blocks": Kind("OFT", (("oft_blocks",),), _oft, True),
    "a1.weight": Kind("GLoRA", tuple((f"{name}.weight",) for name in ("a1", "a2", "b1", "b2")), _glora, True),
    "hada_": Kind("LoHa", tuple((f"hada_w{n}_{half}",) for n in "12" for half in "ab"), _loha),
    "lokr_": Kind("LoKr", tuple((f"lokr_w{n}", f"lokr_w{n}_a+lokr_w{n}_b") for n in "12"), _lokr),
    ON_INPUT: Kind("iA3", (("weight",),), _ia3, True),
    "w_norm": Kind("norm", (("w_norm",),), _added("w_norm")),
    "diff": Kind("full", (("diff",),), _added("diff")),
    DOWN: Kind("LoRA", ((DOWN,), (UP,)), _lora),
    UP: Kind("LoRA", ((DOWN,), (UP,)), _lora),
    "diff_b": Kind("bias", (("diff_b",),), _added("diff")),
    "b_norm": Kind("norm", (("w_norm",),), _added("w_norm")),
}


@dataclass(frozen=True)
class LayerChange:
    """One module of a file, of any kind: its tensors by their names after the module's."""

    parts: Parts

    @functools.cached_property
    def kind(self) -> Kind:
        """Its kind; LoRA if its tensors determine none."""
        for mark, kind in CHANGE_KINDS.items():
            if mark in self.parts or (mark.endswith("_") and any(name.startswith(mark) for name in self.parts)):
                return kind
        return CHANGE_KINDS[DOWN]

    @property
    def title(self) -> str:
        """Return the name of the kind in messages."""
        blocks = self.parts.get("oft_blocks")
        title = self.kind.title if blocks is None or blocks.ndim != 4 else "BOFT"
        if MAGNITUDE not in self.parts:
            return title
        return "DoRA" if self.kind is CHANGE_KINDS[DOWN] else f"{title} with DoRA"

    @property
    def uses_weight(self) -> bool:
        return self.kind.uses_weight or MAGNITUDE in self.parts

    @property
    def is_plain(self) -> bool:
        return {DOWN, UP} <= self.parts.keys() <= {DOWN, UP, ALPHA}

    @property
    def has_weight(self) -> bool:
        return self.kind is not CHANGE_KINDS["diff_b"]

    @property
    def missing(self) -> tuple[str, ...]:
        """Tensors that its kind needs and the file lacks."""
        is_present = (
            any(set(alternative.split("+")) <= self.parts.keys() for alternative in group) for group in self.kind.needed
        )
        return tuple(
            group[-1].replace("+", ", ")
            for group, present in zip(self.kind.needed, is_present, strict=True)
            if not present
        )

    def ready(self, device: torch.device | str | None = None) -> "LayerChange":
        """Return it with all tensors in float32 (on a device), as `delta` requires; scalars are unchanged."""
        return LayerChange(
            {
                name: part if name in NUMBERS else part.to(device or part.device, torch.float32)
                for name, part in self.parts.items()
            }
        )

    def to(self, dtype: torch.dtype | None) -> "LayerChange":
        """Return it in another dtype, including alpha if that can hold it; None changes nothing."""
        if dtype is None:
            return self

        def stored(name: str, tensor: Tensor) -> Tensor:
            if name == ALPHA:
                return storage.exact(tensor, dtype)
            return storage.cast_checked("the LoRA", tensor, dtype) if tensor.is_floating_point() else tensor

        return LayerChange({name: stored(name, part) for name, part in self.parts.items()})

    def delta(self, weight: Tensor, strength: float = 1.0) -> Tensor:
        """Return what is added to a float32 weight. Raises RuntimeError or IndexError if sizes do not match."""
        if MAGNITUDE not in self.parts:
            return self.kind.formula(self.parts, weight, strength)
        changed = weight + self.kind.formula(self.parts, weight, 1.0)
        return strength * (_with_magnitudes(changed, self.parts[MAGNITUDE]) - weight)

    def bias(self, strength: float = 1.0) -> Tensor | None:
        stored = self.parts.get(BIAS, self.parts.get(NORM_BIAS))
        return None if stored is None else stored.float() * strength

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether it fits a weight of this shape."""
        if self.is_plain:  # by its sizes alone: PyTorch would import sympy to multiply tensors without data
            up, down = self.parts[UP].shape, self.parts[DOWN].shape
            fit_each_other = min(len(up), len(down)) >= 2 and math.prod(up[1:]) == down[0]
            return fit_each_other and up[0] * math.prod(down[1:]) == math.prod(shape)
        sizes = tuple((name, tuple(part.shape)) for name, part in self.parts.items())
        numbers = tuple((name, tuple(self.parts[name].flatten().tolist())) for name in NUMBERS if name in self.parts)
        return _fits(sizes, numbers, tuple(shape))

    def shape(self) -> tuple[int, ...] | None:
        """Return its product's shape, maybe with flattened convolution kernels; None if the weight determines it."""
        parts = self.parts
        if self.kind.uses_weight or not self.has_weight:
            return None
        if self.kind is CHANGE_KINDS[DOWN]:
            return parts[UP].shape[0], parts[DOWN].shape[1], *parts[MID if MID in parts else DOWN].shape[2:]
        if self.kind is CHANGE_KINDS["hada_"]:
            if "hada_t1" in parts:
                return parts["hada_w1_a"].shape[1], parts["hada_w1_b"].shape[1], *parts["hada_t1"].shape[2:]
            return parts["hada_w1_a"].shape[0], parts["hada_w1_b"].shape[1]
        if self.kind is CHANGE_KINDS["lokr_"]:
            blank = self.ready("meta")
            left, right = _lokr_factors(blank.parts)
            return left.shape[0] * right.shape[0], left.shape[1] * right.shape[1], *right.shape[2:]
        return tuple(parts[self.kind.needed[0][0]].shape)

    def exact_factors(self) -> tuple[Tensor, Tensor] | None:
        """Return (up, down) of the plain LoRA with alpha = rank and exactly the same product, float32 matrices; None if
        it would not be smaller than the product, or depends on the weight.
        """
        if self.uses_weight or self.bias() is not None:
            return None
        parts = self.ready().parts
        if self.kind is CHANGE_KINDS[DOWN]:
            up, down = low_rank(parts)
            return up * _scale(parts), down
        if self.kind is CHANGE_KINDS["hada_"] and "hada_t1" not in parts:
            rows, columns = parts["hada_w1_a"], parts["hada_w1_b"]
            up = (rows[:, :, None] * parts["hada_w2_a"][:, None, :]).flatten(1)
            down = (columns[:, None, :] * parts["hada_w2_b"][None, :, :]).flatten(0, 1)
            if down.shape[0] * (up.shape[0] + down.shape[1]) < up.shape[0] * down.shape[1]:
                return up * _scale(parts), down
        return None

    def problem(self, name: str) -> MessageLike:
        """Return what is wrong with the module itself, under its name; "" if nothing."""
        if missing := self.missing:
            return Message(LACKS, name=name, kind=self.title, parts=", ".join(missing))
        if broken := sorted(part for part, tensor in self.parts.items() if not storage.is_finite(tensor)):
            is_unread = broken == [ALPHA] and rank_of(self.parts) is None and "oft_blocks" not in self.parts
            return "" if is_unread else Message(BROKEN, name=name, parts=", ".join(broken))
        return ""

    @property
    def is_dead(self) -> bool:
        """Return whether it certainly changes nothing."""
        # Never for DoRA, whose magnitudes alone may change the weight.
        bias = self.bias()
        if MAGNITUDE in self.parts or (bias is not None and bool(bias.any())):
            return False
        parts = self.ready().parts
        if "oft_blocks" in parts:
            blocks = parts["oft_blocks"]
            return torch.equal(blocks, blocks.transpose(-1, -2)) and bool((parts.get("rescale", ONE) == 1).all())
        groups = (
            (("a1.weight", "a2.weight"), ("b1.weight", "b2.weight"))
            if "a1.weight" in parts
            else ([name for name in parts if name not in NUMBERS],)
        )
        return all(any(not bool(parts[name].any()) for name in group) for group in groups)

    def norm(self) -> float | None:
        """Return the Frobenius norm of the weight's change; None if it depends on the weight."""
        if self.uses_weight:
            return None
        shape = self.shape()
        return float(self.ready().delta(torch.empty(shape, device="meta")).norm()) if shape else 0.0


def _with_magnitudes(weight: Tensor, magnitudes: Tensor) -> Tensor:
    """DoRA: rescale each row or column of a weight. `magnitudes` is [out] or [out, 1, ...] for rows, [1, in, ...] for
    columns.
    """
    by_rows = magnitudes.ndim == 1 or magnitudes.shape[0] == magnitudes.numel()
    along = 0 if by_rows else 1
    other_dims = [dim for dim in range(weight.ndim) if dim != along]
    length = torch.linalg.vector_norm(weight, dim=other_dims, keepdim=True) + torch.finfo(torch.float32).eps
    return weight * (_along(weight, along, magnitudes) / length)


@functools.lru_cache(maxsize=4096)  # the many layers of a model have few shapes, and each is tried several times
def _fits(sizes: Sizes, numbers: tuple[tuple[str, tuple[float, ...]], ...], shape: tuple[int, ...]) -> bool:
    """Return whether a change with tensors of these sizes, and these numbers, fits a weight of a shape."""
    parts = {name: torch.empty(size, device="meta") for name, size in sizes}
    parts |= {name: torch.tensor(values).reshape(dict(sizes)[name]) for name, values in numbers}
    change = LayerChange(parts)
    bias = change.bias()
    try:
        whole = not change.has_weight or tuple(change.delta(torch.empty(shape, device="meta")).shape) == shape
    except (KeyError, RuntimeError, IndexError, ValueError):
        return False
    return whole and (bias is None or tuple(bias.shape) == shape[:1])
