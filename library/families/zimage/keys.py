"""Z-Image's tensor names: diffusers', which are ours, and those of the original and of ComfyUI's files."""

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from library.families.shared.lora_names import LoraNames, SharedForm
from library.families.zimage.facts import ZIMAGE_TRANSFORMER
from library.families.zimage.model import PATCH

# Path in the single file -> ours, outside of blocks and inside of attention.
OUTSIDE_OF_BLOCKS = {"x_embedder": f"all_x_embedder.{PATCH}", "final_layer": f"all_final_layer.{PATCH}"}
INSIDE = {"q_norm": "norm_q", "k_norm": "norm_k", "out": "to_out.0"}
FUSED, PIECES = "attention.qkv", ("to_q", "to_k", "to_v")
UNUSED = ("norm_final.weight",)  # present in some files, used by no program


def canonical_zimage_path(path: str) -> str:
    """Convert a path of either tree to ours; the fused matrix keeps its path."""
    first, _, below = path.partition(".")
    if first in OUTSIDE_OF_BLOCKS:
        return f"{OUTSIDE_OF_BLOCKS[first]}.{below}" if below else OUTSIDE_OF_BLOCKS[first]
    block, separator, layer = path.partition(".attention.")
    name, _, ending = layer.partition(".")
    if separator and name in INSIDE:
        return f"{block}{separator}{INSIDE[name]}{'.' if ending else ''}{ending}"
    return path


def split_path(path: str) -> tuple[str, ...]:
    """Split a `canonical` path into our layers, in the order of its rows."""
    if not path.endswith(f".{FUSED}"):
        return (path,)
    return tuple(path.replace(FUSED, f"attention.{piece}") for piece in PIECES)


def zimage_sources(names: Iterable[str]) -> dict[str, tuple[str, int, int]]:
    """Plain keys of a file in either layout -> {our key: key in the file, index of the row slice, number of slices}."""
    sources = {}
    for name in names:
        path, _, ending = name.rpartition(".")
        if name in UNUSED:
            continue
        if not path:  # the padding tokens, which are parameters of the model itself
            sources[name] = (name, 0, 1)
            continue
        pieces = split_path(canonical_zimage_path(path))
        sources |= {f"{piece}.{ending}": (name, number, len(pieces)) for number, piece in enumerate(pieces)}
    return sources


def zimage_to_single(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert our tensors to those of the single file, with query, key and value as one matrix."""
    renames = {new: old for old, new in INSIDE.items()}
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for old, new in OUTSIDE_OF_BLOCKS.items():
            name = name.replace(f"{new}.", f"{old}.")
        block, separator, layer = name.partition(".attention.")
        if separator and layer == f"{PIECES[0]}.weight":
            rows = [tensors[f"{block}{separator}{piece}.weight"] for piece in PIECES]
            out[f"{block}.{FUSED}.weight"] = torch.cat(rows)
        elif not separator:
            out[name] = tensor
        elif not layer.startswith(PIECES):
            path = layer.removesuffix(".weight")
            out[f"{block}{separator}{renames[path]}.weight"] = tensor
    return out


class ZImageLoraNames(LoraNames):
    """diffusers' tree; files of the original tree are read, too."""

    trees: ClassVar[tuple[str, ...]] = ("layers.", "noise_refiner.", "context_refiner.")
    version_word: ClassVar[str] = "z_image"
    words: ClassVar[tuple[str, ...]] = (
        "all_x_embedder",
        "all_final_layer",
        "noise_refiner",
        "context_refiner",
        "cap_embedder",
        "t_embedder",
        "feed_forward",
    )
    adapted: ClassVar[str] = r"layers\.\d+\.(attention|feed_forward)\."  # without refiners and modulation
    mergeable: ClassVar[tuple[str, ...]] = (ZIMAGE_TRANSFORMER,)
    shared: ClassVar[SharedForm] = SharedForm(is_peft=False, has_lokr=True)
    saved: ClassVar[str] = "comfy"
    elsewhere: ClassVar[str] = r"^lora_unet_(layers|noise_refiner|context_refiner)_\d+_attention_(qkv|out)\."

    def canonical(self, path: str) -> tuple[str, int, int]:
        return canonical_zimage_path(path), 0, 1

    def apart(self, path: str) -> tuple[str, ...]:
        return split_path(path)

    def rows(self, names: Iterable[str]) -> dict[str, tuple[str, int, int]]:
        return zimage_sources(names)


LORA_NAMES = ZImageLoraNames()
