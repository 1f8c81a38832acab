"""Names of Z-Image's tensors: those of diffusers, which are ours, and those of the original and of ComfyUI's files."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from library.families.zimage.model import PATCH

# Path in the single file -> ours, outside of blocks and inside of attention.
OUTSIDE_OF_BLOCKS = {"x_embedder": f"all_x_embedder.{PATCH}", "final_layer": f"all_final_layer.{PATCH}"}
INSIDE = {"q_norm": "norm_q", "k_norm": "norm_k", "out": "to_out.0"}
FUSED, PIECES = "attention.qkv", ("to_q", "to_k", "to_v")
UNUSED = ("norm_final.weight",)  # in some files, and read by nobody


def canonical_zimage_path(path: str) -> str:
    """A path of either tree -> ours; that of the fused matrix stays as it is."""
    first, _, rest = path.partition(".")
    if first in OUTSIDE_OF_BLOCKS:
        return f"{OUTSIDE_OF_BLOCKS[first]}.{rest}" if rest else OUTSIDE_OF_BLOCKS[first]
    block, inside, layer = path.partition(".attention.")
    name, _, ending = layer.partition(".")
    if inside and name in INSIDE:
        return f"{block}{inside}{INSIDE[name]}{'.' if ending else ''}{ending}"
    return path


def split_path(path: str) -> tuple[str, ...]:
    """A path as `canonical` gives it -> our layers that it is, in the order of its rows."""
    if not path.endswith(f".{FUSED}"):
        return (path,)
    return tuple(path.replace(FUSED, f"attention.{piece}") for piece in PIECES)


def zimage_sources(names: Iterable[str]) -> dict[str, tuple[str, int, int]]:
    """Plain keys of a file in either layout -> {our key: key in the file, which of its row pieces, of how many}."""
    sources = {}
    for name in names:
        path, _, ending = name.rpartition(".")
        if name in UNUSED:
            continue
        if not path:  # the tokens of padding
            sources[name] = (name, 0, 1)
            continue
        pieces = split_path(canonical_zimage_path(path))
        sources |= {f"{piece}.{ending}": (name, number, len(pieces)) for number, piece in enumerate(pieces)}
    return sources


def zimage_to_single(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors -> those of the single file, with query, key and value as one matrix."""
    back = {new: old for old, new in INSIDE.items()}
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for old, new in OUTSIDE_OF_BLOCKS.items():
            name = name.replace(f"{new}.", f"{old}.")
        block, inside, layer = name.partition(".attention.")
        if inside and layer == f"{PIECES[0]}.weight":
            rows = [tensors[f"{block}{inside}{piece}.weight"] for piece in PIECES]
            out[f"{block}.{FUSED}.weight"] = torch.cat(rows)
        elif not inside:
            out[name] = tensor
        elif not layer.startswith(PIECES):
            path = layer.removesuffix(".weight")
            out[f"{block}{inside}{back[path]}.weight"] = tensor
    return out
