"""LoRA files in memory: modules with their two matrices, whatever the names in the file are."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import parse_json
from library.config.problems import ConfigError, Text
from library.tools import names, storage
from library.tools.names import ALPHA, DOWN, UP, Module
from library.tools.storage import Metadata

MLP = 4  # the MLP of fused layers is so many times as wide as its stream
FOLDED = "kohya_folded_alpha"  # metadata: the alphas of a file whose format has none
HALF = "{name} lacks its {matrix} matrix: the file is damaged or was edited"
OTHER_KINDS = {  # by a pattern in keys
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "lora_mid": "LoCon with CP decomposition",
    r"\.oft_": "OFT",
    r"\.diff(_b)?$": "full differences",
    r"\.on_input$": "IA3",
    r"\.[ab][12]\.weight$": "GLoRA",
    r"^lllite_": "ControlNet-LLLite",
    r"^(clip_l|clip_g|emb_params)$": "an embedding",
}


@dataclass(frozen=True)
class AdapterFactors:
    """One module's change of its weight: alpha / rank * up @ down. Tensors are as the file has them."""

    down: Tensor  # [rank, in] or [rank, in, k, k]
    up: Tensor  # [out, rank] or [out, rank, 1, 1]
    alpha: Tensor | None = None  # none means alpha = rank

    @property
    def rank(self) -> int:
        """Rows of `down`."""
        return self.down.shape[0]

    @property
    def strength(self) -> float:
        """What the product is multiplied by."""
        return 1.0 if self.alpha is None else float(self.alpha) / self.rank

    @property
    def is_large_conv(self) -> bool:
        """A convolution with a real kernel; 1x1 ones count as linear layers."""
        return self.down.ndim == 4 and self.down.shape[2:] != (1, 1)

    def factors(self) -> tuple[Tensor, Tensor]:
        """(up [out, rank] with the strength in it, down [rank, in * k * k]) in float32."""
        return self.up.float().flatten(1) * self.strength, self.down.float().flatten(1)

    def product(self) -> Tensor:
        """The change of the weight, float32 [out, in * k * k]."""
        up, down = self.factors()
        return up @ down

    def like(self, up: Tensor, down: Tensor, alpha: float | None = None) -> "AdapterFactors":
        """An adapter of this kind of layer from matrices [out, r] and [r, in * k * k]."""
        rank = down.shape[0]
        up = up.reshape(up.shape[0], rank, *(1 for _ in self.up.shape[2:]))
        value = torch.tensor(float(rank) if alpha is None else alpha)
        return AdapterFactors(down.reshape(rank, *self.down.shape[1:]).contiguous(), up.contiguous(), value)

    def to(self, dtype: torch.dtype | None) -> "AdapterFactors":
        """The same in another type, alpha as well; None changes nothing."""
        if dtype is None:
            return self
        down, up = (storage.cast("the LoRA", t, dtype) for t in (self.down, self.up))
        return AdapterFactors(down, up, None if self.alpha is None else storage.cast("the LoRA", self.alpha, dtype))


@dataclass
class Lora:
    """A whole file."""

    family: str
    adapters: dict[Module, AdapterFactors]
    metadata: Metadata = field(default_factory=dict)
    style: str = ""  # the family's own by default

    def __post_init__(self) -> None:
        self.style = self.style or names.names_of(self.family).saved

    @property
    def dtype(self) -> torch.dtype:
        """The widest type of its matrices."""
        kinds = {adapter.up.dtype for adapter in self.adapters.values()}
        return max(kinds, key=lambda kind: (kind.itemsize, str(kind)), default=torch.float32)


def read(path: str | Path, wanted: str = "") -> Lora:
    """A plain LoRA in any of the formats; of the family `wanted` where its names may be that one's. Raises ConfigError
    for anything else."""
    stored, metadata = storage.opened(path), storage.metadata_of(path)
    try:
        found = grouped(stored)
        family = names.family_of(found, metadata, names.sizes_of(stored.shapes()), wanted)
        style = style_of(found)
        if style == "diffusers":
            add_alphas(found, metadata)
        adapters = assembled(found, family)
    except ConfigError as e:
        raise ConfigError("{path}: {error}", path=path, error=e) from e
    try:
        if recorded := parse_json(metadata.pop(FOLDED, "{}"), path):
            adapters = {module: _unfolded(module, adapter, recorded) for module, adapter in adapters.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise ConfigError(
            "{path}: its metadata {folded} was changed and cannot be used: remove that key", path=path, folded=FOLDED
        ) from e
    return Lora(family, adapters, metadata, style)


def kohya_named(path: Path, tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """The tensors of a file of adapters of any kind for a family, under kohya's names. Raises ConfigError."""
    if all(name.startswith("lora_") for name in tensors) and not names.of_other_tree(tensors, family):
        return tensors
    if any(names.split(name) is None for name in tensors):  # no plain LoRA
        return {names.kohya_key(name): tensor for name, tensor in tensors.items()}
    return tensors_of(read(path, family), "kohya")[0]


def odd_alpha(name: str, parts: Mapping[str, Tensor]) -> str:
    """What is wrong with the alpha of a module, which is one number where there is one; "" if nothing is."""
    if ALPHA not in parts or parts[ALPHA].numel() == 1:
        return ""
    template = "{name} has an alpha of {count} numbers instead of one: the file is damaged or was edited"
    return Text(template, name=name, count=parts[ALPHA].numel())


def grouped(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """{module's name: {"down", "up", "alpha"}}. ConfigError for keys of other kinds, and for halves of adapters."""
    found: dict[str, dict[str, Tensor]] = {}
    for key in tensors:
        parts = names.split(key)
        if parts is None:
            if not (kind := other_kind(key)):
                raise ConfigError("{key} is no part of a plain LoRA, and only those are handled", key=key)
            raise ConfigError(
                "{key} belongs to {kind}, not to a plain LoRA, and only those are handled", key=key, kind=kind
            )
        found.setdefault(parts[0], {})[parts[1]] = tensors[key]
    for name, parts in found.items():
        if missing := {DOWN, UP} - parts.keys():
            raise ConfigError(HALF, name=name, matrix=min(missing))
        if parts[DOWN].ndim < 2 or parts[UP].ndim < 2 or parts[DOWN].shape[0] != parts[UP].shape[1]:
            shapes = f"{list(parts[UP].shape)} and {list(parts[DOWN].shape)}"
            raise ConfigError("{name} has matrices {shapes}, which do not fit together", name=name, shapes=shapes)
        if odd := odd_alpha(name, parts):
            raise ConfigError(odd)
    if not found:
        raise ConfigError("there is no LoRA in this file")
    return found


def other_kind(key: str) -> str:
    """Which kind of adapter a key belongs to that is none of a plain LoRA, "" for none that is known."""
    return next((kind for mark, kind in OTHER_KINDS.items() if re.search(mark, key)), "")


def style_of(found: Iterable[str]) -> str:
    """Which format the names of modules are in."""
    found = list(found)
    first = min(
        [name for name in found if not name.startswith(names.TEXT)] or found
    )  # encoders' may be kept as they were
    if first.startswith("lora_"):
        return "kohya"
    return "comfy" if first.startswith(("diffusion_model.", "text_encoders.")) else "diffusers"


def assembled(found: Mapping[str, Mapping[str, Tensor]], family: str) -> dict[Module, AdapterFactors]:
    """Adapters by module; pieces of fused layers are put together exactly."""
    adapters: dict[Module, AdapterFactors] = {}
    apart: dict[Module, list[AdapterFactors | None]] = {}
    for name, parts in found.items():
        found_as = names.parsed(name, family)
        adapter = AdapterFactors(parts[DOWN], parts[UP], parts.get(ALPHA))
        if found_as.is_swapped:
            adapter = swapped(adapter)
        if found_as.pieces > 1:
            missing: list[AdapterFactors | None] = [None] * found_as.pieces
            apart.setdefault(found_as.module, missing)[found_as.piece] = adapter
            continue
        paths = names.names_of(family).apart(found_as.module.path)
        for path, piece in zip(paths, taken_apart(adapter, len(paths)) if len(paths) > 1 else [adapter], strict=True):
            if piece:
                adapters[Module(found_as.module.part, path)] = piece
    return adapters | {module: joined(parts) for module, parts in apart.items()}


def swapped(adapter: AdapterFactors) -> AdapterFactors:
    """Where diffusers keeps the halves of its rows the other way round."""
    return AdapterFactors(adapter.down, torch.cat(adapter.up.chunk(2)[::-1]), adapter.alpha)


def joined(parts: list[AdapterFactors | None]) -> AdapterFactors:
    """Adapters of query, key, value (and MLP) as one of the fused layer: the same product.

    With one `down` for all it is kept; otherwise `down` is stacked and `up` block-diagonal, and the rank is the sum.
    """
    present = [part for part in parts if part is not None]
    first, width = present[0], present[0].down.shape[1]
    rows = [width * (MLP if i == 3 else 1) if p is None else p.up.shape[0] for i, p in enumerate(parts)]
    same = all(torch.equal(p.down, first.down) and p.strength == first.strength for p in present)
    if same and len(present) == len(parts):
        return AdapterFactors(first.down, torch.cat([p.up for p in present]), first.alpha)
    # One strength has to do for all; where they differ they go into the matrices.
    differ = len({p.strength for p in present}) > 1
    ups = [p.factors()[0] if differ else p.up for p in present]
    up = torch.zeros(
        sum(rows), sum(p.rank for p in present), dtype=max((u.dtype for u in ups), key=lambda dtype: dtype.itemsize)
    )
    column, row, given = 0, 0, iter(ups)
    for part, size in zip(parts, rows, strict=True):
        if part is not None:
            up[row : row + size, column : column + part.rank] = next(given)
            column += part.rank
        row += size
    alpha = None if differ or first.alpha is None else torch.tensor(first.strength * up.shape[1])
    return AdapterFactors(torch.cat([p.down for p in present]), up, alpha)


def taken_apart(adapter: AdapterFactors, count: int) -> list[AdapterFactors | None]:
    """The other way: the pieces of a fused layer's adapter, with the strength of the whole; None for one that has none.

    A block-diagonal `up` gives each piece its own ranks; otherwise all share `down`.
    """
    width = adapter.down.shape[1]
    sizes = [width, width, width, adapter.up.shape[0] - 3 * width][:count]
    if sum(sizes) != adapter.up.shape[0] or min(sizes) <= 0:
        raise ConfigError("a fused layer of {rows} rows and {width} columns is none that is known",
            rows=adapter.up.shape[0], width=width)  # fmt: skip
    blocks = adapter.up.split(sizes)
    ranks = _ranks([block.ne(0).any(0) for block in blocks])
    if ranks is None:
        alpha = adapter.alpha
        return [AdapterFactors(adapter.down, block, alpha) for block in blocks]
    out: list[AdapterFactors | None] = []
    at = 0
    for block, rank in zip(blocks, ranks, strict=True):
        up, down = block[:, at : at + rank].contiguous(), adapter.down[at : at + rank]
        alpha = None if adapter.alpha is None else torch.tensor(adapter.strength * rank)
        out.append(AdapterFactors(down, up, alpha) if rank else None)
        at += rank
    return out


def _ranks(used: list[Tensor]) -> list[int] | None:
    """How many columns each row block has for itself, from which columns it uses; None when they share some."""
    table = torch.stack(used)  # [blocks, rank]
    count, rank = table.shape
    if rank % count == 0:
        equal = torch.block_diag(*(torch.ones(1, rank // count) for _ in range(count))).bool()
        if not (table & ~equal).any():
            return [rank // count] * count
    owners = table.int().argmax(0)
    if bool((table.sum(0) != 1).any()) or bool((owners.diff() < 0).any()):
        return None
    return [int((owners == i).sum()) for i in range(count)]


# ---- writing


def tensors_of(lora: Lora, style: str) -> tuple[dict[str, Tensor], Metadata]:
    """The file's tensors in a format, and what its metadata must say in addition."""
    out: dict[str, Tensor] = {}
    endings, extra = names.WRITTEN[style], {}
    for module, adapter in sorted(lora.adapters.items()):
        written = _folded(adapter) if style == "diffusers" else adapter
        for name, piece in _spelled(lora.family, module, written, style):
            out[name + endings[DOWN]] = piece.down.clone()  # pieces may share one
            out[name + endings[UP]] = piece.up
            if ALPHA in endings:
                rank = torch.tensor(float(piece.rank))
                out[name + endings[ALPHA]] = rank if piece.alpha is None else piece.alpha
    if style == "diffusers":
        extra[FOLDED] = _record(lora)
    return {name: tensor.contiguous() for name, tensor in out.items()}, extra


def _spelled(family: str, module: Module, adapter: AdapterFactors, style: str) -> list[tuple[str, AdapterFactors]]:
    made_of = names.spelled(module, family, style)
    if style == "diffusers" and names.names_of(family).has_swapped_halves(module.path):
        adapter = swapped(adapter)
    parts = taken_apart(adapter, len(made_of)) if len(made_of) > 1 else [adapter]
    return [(name, part) for name, part in zip(made_of, parts, strict=True) if part is not None]


def _folded(adapter: AdapterFactors) -> AdapterFactors:
    """The strength inside `up`: exact where its type can hold that, else in float32."""
    if adapter.strength == 1.0:
        return AdapterFactors(adapter.down, adapter.up)
    exact = adapter.up.double() * adapter.strength
    fits = torch.equal(exact.to(adapter.up.dtype).double(), exact)
    return AdapterFactors(adapter.down, exact.to(adapter.up.dtype if fits else torch.float32))


def _record(lora: Lora) -> str:
    """The alphas for the way back: the most common one as "*", others by name."""
    each = {
        module.kohya: None
        if a.alpha is None
        else [a.alpha.item(), storage.ORDER[a.alpha.dtype][1], storage.ORDER[a.up.dtype][1]]
        for module, a in lora.adapters.items()
    }
    common = Counter(json.dumps(value) for value in each.values()).most_common(1)[0][0]
    others = {name: value for name, value in each.items() if json.dumps(value) != common}
    return json.dumps({"*": json.loads(common), **others})


def _unfolded(module: Module, adapter: AdapterFactors, recorded: JsonMapping) -> AdapterFactors:
    about = recorded.get(module.kohya, recorded.get("*"))
    if about is None:
        return adapter
    value, code, up_code = about
    alpha = torch.tensor(value).to(storage.CODES[code])
    strength = float(alpha) / adapter.rank
    if not strength:
        return adapter
    return AdapterFactors(adapter.down, (adapter.up.double() / strength).to(storage.CODES[up_code]), alpha)


def add_alphas(found: Mapping[str, dict[str, Tensor]], metadata: Mapping[str, str]) -> None:
    """diffusers keeps alphas in the metadata: one per part, and patterns of names for those that differ."""
    try:
        facts: JsonObject = parse_json(metadata.get("lora_adapter_metadata", "{}"), "lora_adapter_metadata")
        for name, parts in found.items():
            part, _, path = name.partition(".")
            if ALPHA in parts or f"{part}.lora_alpha" not in facts:
                continue
            patterns = facts.get(f"{part}.alpha_pattern") or {}
            matching = (v for k, v in patterns.items() if path == k.lstrip("^") or path.endswith(f".{k.lstrip('^')}"))
            parts[ALPHA] = torch.tensor(float(next(matching, facts[f"{part}.lora_alpha"])))
    except (AttributeError, TypeError, ValueError) as e:
        raise ConfigError("its metadata lora_adapter_metadata is damaged: remove that key") from e
