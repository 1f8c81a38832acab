"""Adapter files in memory: their modules, independent of the names in the file."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from library import families
from library.adapter_files import names, storage
from library.adapter_files.changes import LACKS, LayerChange
from library.adapter_files.factors import AdapterFactors, fuse_factors, swap_halves, taken_apart
from library.adapter_files.names import ALPHA, DOWN, UP, Module
from library.adapter_files.storage import Metadata
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import parse_json
from library.config.problems import ConfigError, Message, MessageLike

FOLDED = "kohya_folded_alpha"  # metadata key for the alphas of a format without alphas
NO_PEFT = (
    "{module} is {kind}, which diffusers has no names for: make a LoRA of it first, with {command}, or choose comfy or "
    "kohya as the names"
)
NO_BIAS = (
    "{module} changes a norm or a bias, which diffusers has no names for: add the file to a checkpoint with {command}, "
    "or choose comfy or kohya as the names"
)
NO_LORA = "there is no LoRA in this file, which may be a whole model: choose the file of a LoRA"
HALF = "{name} lacks its {matrix} matrix: the file is damaged or was edited"
OTHER_KINDS = {  # pattern in keys -> kind
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


@dataclass
class Lora:
    """A whole file."""

    family: str
    adapters: dict[Module, AdapterFactors]  # plain LoRA
    metadata: Metadata = field(default_factory=dict)
    style: str = ""  # "": the family's own
    other_changes: dict[Module, LayerChange] = field(default_factory=dict)  # of all other kinds

    def __post_init__(self) -> None:
        self.style = self.style or names.lora_names_of(self.family).saved

    @property
    def dtype(self) -> torch.dtype:
        """Return the widest dtype of its matrices."""
        tensors = (
            tensor for change in self.other_changes.values() for name, tensor in change.parts.items() if name != ALPHA
        )
        kinds = {adapter.up.dtype for adapter in self.adapters.values()}
        kinds |= {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        return max(kinds, key=lambda kind: (kind.itemsize, str(kind)), default=torch.float32)


def read_lora(path: str | Path, preferred: str = "") -> Lora:
    """Read an adapter of any kind in any of the formats, of the family `preferred` if its names allow that. Raises
    ConfigError for anything else.
    """
    stored, metadata = storage.open_adapter(path)
    try:
        groups = group_by_module(stored)
        family = names.find_lora_family(groups, metadata, names.module_sizes(stored.shapes()), preferred)
        style = style_of(groups)
        if style == "diffusers":
            add_alphas(groups, metadata)
        plain = {name: parts for name, parts in groups.items() if LayerChange(parts).is_plain}
        adapters = assemble_adapters(plain, family)
        changes = place_changes({name: parts for name, parts in groups.items() if name not in plain}, family)
    except ConfigError as e:
        raise ConfigError("{path}: {error}", path=path, error=e) from e
    try:
        if recorded := parse_json(metadata.pop(FOLDED, "{}"), path):
            adapters = {module: _unfold_strength(module, adapter, recorded) for module, adapter in adapters.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise ConfigError(
            "{path}: its metadata {folded} was changed and cannot be used: remove that key", path=path, folded=FOLDED
        ) from e
    return Lora(family, adapters, metadata, style, changes)


def rename_for_kohya(path: Path, tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Return the tensors of an adapter file of any kind for a family, under kohya's names. Raises ConfigError."""
    if all(name.startswith("lora_") for name in tensors) and not names.of_other_tree(tensors, family):
        return tensors
    try:
        return tensors_in_format(read_lora(path, family), "kohya")[0]
    except ConfigError:
        if all(names.split_key(name) for name in tensors):
            raise
        # Layers that our model does not have.
        return {names.kohya_key(name): tensor for name, tensor in tensors.items()}


def find_odd_alpha(name: str, parts: Mapping[str, Tensor]) -> MessageLike:
    """Return what is wrong with a module's alpha, which must be one number if present; "" if nothing."""
    if ALPHA not in parts or parts[ALPHA].numel() == 1:
        return ""
    template = "{name} has an alpha of {count} numbers instead of one: the file is damaged or was edited"
    return Message(template, name=name, count=parts[ALPHA].numel())


def group_by_module(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return {module's name: its tensors, such as "down", "up" and "alpha"}. Raises ConfigError for unknown keys and
    incomplete modules.
    """
    groups, unknown = split_by_module(tensors)
    if unknown:
        raise ConfigError(unknown_key_message(unknown[0]) if _has_adapters(tensors) else NO_LORA)
    for name, parts in groups.items():
        if missing := {DOWN, UP} - parts.keys() if LayerChange(parts).kind.title == "LoRA" else ():
            raise ConfigError(HALF, name=name, matrix=min(missing))
        if len({DOWN, UP} & parts.keys()) == 2 and not matrices_fit(parts):
            shapes = f"{list(parts[UP].shape)} and {list(parts[DOWN].shape)}"
            raise ConfigError("{name} has matrices {shapes}, which do not fit together", name=name, shapes=shapes)
        if odd := find_odd_alpha(name, parts):
            raise ConfigError(odd)
        if missing := LayerChange(parts).missing:
            raise ConfigError(LACKS, name=name, kind=LayerChange(parts).title, parts=", ".join(missing))
    if not groups:
        raise ConfigError(NO_LORA)
    return groups


def split_by_module(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Return {module's name: its tensors}, and the keys that are no part of a known adapter."""
    groups: dict[str, dict[str, Tensor]] = {}
    unknown, keys = [], set(tensors)
    for key in tensors:
        if parts := names.split_any(key, keys):
            groups.setdefault(parts[0], {})[parts[1]] = tensors[key]
        else:
            unknown.append(key)
    return groups, unknown


def _has_adapters(keys: Collection[str]) -> bool:
    """Return whether a key is that of an adapter, or looks like one."""
    return any(key.startswith("lora_") or other_kind(key) or names.split_any(key, keys) for key in keys)


def matrices_fit(parts: Mapping[str, Tensor]) -> bool:
    up, down = parts[UP], parts[DOWN]
    return min(up.ndim, down.ndim) >= 2 and up.shape[1] == down.shape[0]


def unknown_key_message(key: str) -> Message:
    """Return a message about a key that belongs to no adapter."""
    if kind := other_kind(key):
        return Message("{key} belongs to {kind}, not to LoRA or LyCORIS: choose another file", key=key, kind=kind)
    return Message("{key} is not a part of a known adapter: only LoRA and the kinds of LyCORIS are read", key=key)


def other_kind(key: str) -> str:
    return next((kind for mark, kind in OTHER_KINDS.items() if re.search(mark, key)), "")


def style_of(keys: Iterable[str]) -> str:
    """Return the format of the modules' names."""
    keys = list(keys)
    # The names of text encoders may be the same in several formats.
    first = min([name for name in keys if not name.startswith(names.TEXT)] or keys)
    if first.startswith("lora_"):
        return "kohya"
    return "comfy" if first.startswith(("diffusion_model.", "text_encoders.")) else "diffusers"


def assemble_adapters(groups: Mapping[str, Mapping[str, Tensor]], family: str) -> dict[Module, AdapterFactors]:
    """Return adapters by module; slices of fused layers are joined exactly."""
    adapters: dict[Module, AdapterFactors] = {}
    pieces_by_module: dict[Module, list[AdapterFactors | None]] = {}
    for name, parts in groups.items():
        parsed = names.parse_name(name, family)
        adapter = AdapterFactors(parts[DOWN], parts[UP], parts.get(ALPHA))
        if parsed.is_swapped:
            adapter = swap_halves(adapter)
        if parsed.pieces > 1:
            missing: list[AdapterFactors | None] = [None] * parsed.pieces
            pieces_by_module.setdefault(parsed.module, missing)[parsed.piece] = adapter
            continue
        paths = names.lora_names_of(family).apart(parsed.module.path)
        for path, piece in zip(paths, taken_apart(adapter, len(paths)), strict=True):
            if piece:
                adapters[Module(parsed.module.part, path)] = piece
    return adapters | {module: fuse_factors(parts) for module, parts in pieces_by_module.items()}


def place_changes(groups: Mapping[str, Mapping[str, Tensor]], family: str) -> dict[Module, LayerChange]:
    """Return modules that are no plain LoRA. Raises ConfigError for a slice of a layer that is fused here."""
    # Only products of plain LoRA can be joined and split.
    out: dict[Module, LayerChange] = {}
    for name, parts in groups.items():
        parsed, change = names.parse_name(name, family), LayerChange(dict(parts))
        if parsed.pieces > 1 or parsed.is_swapped or len(names.lora_names_of(family).apart(parsed.module.path)) > 1:
            template = (
                "{name} is {kind} for a layer that {title} has otherwise here, which only plain LoRA can be fitted to"
            )
            raise ConfigError(template, name=name, kind=change.title, title=families.facts_of(family).title)
        out[parsed.module] = change
    return out


# ---- writing


def tensors_in_format(lora: Lora, style: str) -> tuple[dict[str, Tensor], Metadata]:
    """Return the file's tensors in a format, and required additions to its metadata."""
    out: dict[str, Tensor] = {}
    endings, extra = names.endings(lora.family, style), {}
    if style == "comfy" and _alphas_are_misread(lora):
        del endings[ALPHA]
    for module, adapter in sorted(lora.adapters.items()):
        stored = adapter if ALPHA in endings else _fold_strength(adapter)
        for name, piece in _spelled(lora.family, module, stored, style):
            out[name + endings[DOWN]] = piece.down.clone()  # slices may share a tensor
            # Of DyLoRA; diffusers requires this shape.
            flat = piece.down.ndim == 4 and piece.up.ndim == 2 and style != "kohya"
            out[name + endings[UP]] = piece.up[:, :, None, None] if flat else piece.up
            if ALPHA in endings:
                rank = torch.tensor(float(piece.rank))
                out[name + endings[ALPHA]] = rank if piece.alpha is None else piece.alpha
    if ALPHA not in endings and lora.adapters:
        extra[FOLDED] = _record(lora)
    for module, change in sorted(lora.other_changes.items()):
        if style == "diffusers":
            raise _no_peft(module, change)
        name = names.whole_name(module, lora.family, style)
        out |= {
            f"{name}{names.WRITTEN['kohya'].get(part, f'.{part}')}": tensor for part, tensor in change.parts.items()
        }
    return {name: tensor.contiguous() for name, tensor in out.items()}, extra


def _alphas_are_misread(lora: Lora) -> bool:
    """Return whether diffusers would take other alphas under kohya's names: it assigns those that differ from the most
    common one of a part to layers by names that it has in neither attention nor text encoders.
    """
    alphas: dict[str, set[float]] = {}
    for module, adapter in lora.adapters.items():
        alphas.setdefault(module.part, set()).add(adapter.rank if adapter.alpha is None else float(adapter.alpha))
    has_kohya_names = names.lora_names_of(lora.family).shared.names == "kohya"
    return has_kohya_names and any(len(of_part) > 1 for of_part in alphas.values())


def _no_peft(module: Module, change: LayerChange) -> ConfigError:
    """Return why a module that is no plain LoRA cannot be written for diffusers, and what to write instead."""
    command = "kohya tools merge FILE {} --out NEW"
    if change.bias() is not None or change.kind.title == "norm":
        return ConfigError(NO_BIAS, module=module.kohya, command=command.format("--base MODEL"))
    options = "--trained_on MODEL --rank 16" if change.uses_weight else "--rank 16"
    return ConfigError(NO_PEFT, module=module.kohya, kind=change.title, command=command.format(options))


def _spelled(family: str, module: Module, adapter: AdapterFactors, style: str) -> list[tuple[str, AdapterFactors]]:
    spelled_names = names.spelled(module, family, style)
    lora_names = names.lora_names_of(family)
    if (lora_names.shared.names if style == "comfy" else style) == "diffusers" and lora_names.has_swapped_halves(
        module.path
    ):
        adapter = swap_halves(adapter)
    parts = zip(spelled_names, taken_apart(adapter, len(spelled_names)), strict=True)
    return [(name, part) for name, part in parts if part is not None]


def _fold_strength(adapter: AdapterFactors) -> AdapterFactors:
    """Fold the strength into `up`: exactly if its dtype can hold that, else in float32."""
    if adapter.strength == 1.0:
        return AdapterFactors(adapter.down, adapter.up)
    exact = adapter.up.double() * adapter.strength
    fits = torch.equal(exact.to(adapter.up.dtype).double(), exact)
    return AdapterFactors(adapter.down, exact.to(adapter.up.dtype if fits else torch.float32))


def _record(lora: Lora) -> str:
    """Return the alphas for converting back: the most common one as "*", others by name."""
    alphas = {
        module.kohya: None
        if a.alpha is None
        else [a.alpha.item(), storage.ORDER[a.alpha.dtype][1], storage.ORDER[a.up.dtype][1]]
        for module, a in lora.adapters.items()
    }
    common = Counter(json.dumps(value) for value in alphas.values()).most_common(1)[0][0]
    exceptions = {name: value for name, value in alphas.items() if json.dumps(value) != common}
    return json.dumps({"*": json.loads(common), **exceptions})


def _unfold_strength(module: Module, adapter: AdapterFactors, recorded: JsonMapping) -> AdapterFactors:
    alpha_record = recorded.get(module.kohya, recorded.get("*"))
    if alpha_record is None:
        return adapter
    value, code, up_code = alpha_record
    alpha = torch.tensor(value).to(storage.CODES[code])
    strength = float(alpha) / adapter.rank
    if not strength:
        return adapter
    return AdapterFactors(adapter.down, (adapter.up.double() / strength).to(storage.CODES[up_code]), alpha)


def add_alphas(groups: Mapping[str, dict[str, Tensor]], metadata: Mapping[str, str]) -> None:
    """Read alphas from diffusers' metadata: one per part, and name patterns for exceptions."""
    try:
        facts: JsonObject = parse_json(metadata.get("lora_adapter_metadata", "{}"), "lora_adapter_metadata")
        for name, parts in groups.items():
            part, _, path = name.partition(".")
            if ALPHA in parts or f"{part}.lora_alpha" not in facts:
                continue
            patterns = facts.get(f"{part}.alpha_pattern") or {}
            matching = (v for k, v in patterns.items() if path == k.lstrip("^") or path.endswith(f".{k.lstrip('^')}"))
            parts[ALPHA] = torch.tensor(float(next(matching, facts[f"{part}.lora_alpha"])))
    except (AttributeError, TypeError, ValueError) as e:
        raise ConfigError("its metadata lora_adapter_metadata is damaged: remove that key") from e
