"""Qwen-Image-2.1's tensor names: diffusers', which are ours, and those of ComfyUI's files, which join two matrices."""

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from library.families.qwen_image_21.facts import QWEN_21_TRANSFORMER
from library.families.shared.lora_names import LoraNames, SharedForm

FUSED, PIECES = "img_mlp.gate_up", ("img_mlp.gate_layer", "img_mlp.proj")


def split_qwen_21_path(path: str) -> tuple[str, ...]:
    """Split a path of either layout into our layers, in the order of its rows."""
    if not path.endswith(f".{FUSED}"):
        return (path,)
    return tuple(path.replace(FUSED, piece) for piece in PIECES)


def qwen_21_sources(names: Iterable[str]) -> dict[str, tuple[str, int, int]]:
    """Plain keys of a file in either layout -> {our key: key in the file, index of the row slice, number of slices}."""
    sources = {}
    for name in names:
        path, _, ending = name.rpartition(".")
        pieces = split_qwen_21_path(path)
        sources |= {f"{piece}.{ending}": (name, number, len(pieces)) for number, piece in enumerate(pieces)}
    return sources


def qwen_21_to_single(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert our tensors to those of ComfyUI's file, with gate and value of the MLP as one matrix."""
    joined = {
        name.replace(PIECES[0], FUSED): torch.cat((tensor, tensors[name.replace(*PIECES)]))
        for name, tensor in tensors.items()
        if f".{PIECES[0]}." in name
    }
    return {name: tensor for name, tensor in tensors.items() if not any(f".{p}." in name for p in PIECES)} | joined


class Qwen21LoraNames(LoraNames):
    """One tree of names, in which ComfyUI applies the halves of the joined matrix on their own."""

    trees: ClassVar[tuple[str, ...]] = ("transformer_blocks.", "time_text_embed.", "modulation.", "txt_in.")
    # Others share the tree and the names in attention.
    marks: ClassVar[str] = r"\.img_mlp\.(gate_layer|gate_up|proj|out)$|^txt_in\.(in|out)_layer$|^modulation\.1$"
    version_word: ClassVar[str] = "qwen_image_21"
    words: ClassVar[tuple[str, ...]] = ("gate_layer", "gate_up", "text_norm", "img_mlp")
    adapted: ClassVar[str] = r"transformer_blocks\.\d+\.(attn|img_mlp)\."
    mergeable: ClassVar[tuple[str, ...]] = (QWEN_21_TRANSFORMER,)
    # Both programs read plain paths, with alphas. Of kohya's names ComfyUI does not know the two of the joined matrix,
    # and diffusers misreads them.
    prefixes: ClassVar[Mapping[str, Mapping[str, str]]] = {**LoraNames.prefixes, "comfy": {"denoiser": ""}}
    other_prefixes: ClassVar[Mapping[str, str]] = {**LoraNames.other_prefixes, "diffusion_model.": "denoiser"}
    saved: ClassVar[str] = "comfy"
    shared: ClassVar[SharedForm] = SharedForm(is_peft=False)

    def apart(self, path: str) -> tuple[str, ...]:
        return split_qwen_21_path(path)

    def rows(self, names: Iterable[str]) -> dict[str, tuple[str, int, int]]:
        return qwen_21_sources(names)


LORA_NAMES = Qwen21LoraNames()
