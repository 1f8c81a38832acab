"""Krea 2's tensor names: those of its own files, which are ours and ComfyUI's, and diffusers'."""

import re
from collections.abc import Iterable
from typing import ClassVar

from library.families.krea_2.facts import KREA_2_TRANSFORMER
from library.families.shared.lora_names import LoraNames, SharedForm
from library.families.shared.tensor_names import inverse, rename_path

# diffusers' names -> ours, of layers and lists outside of blocks, and inside of a block.
OUR_OUTSIDE = {
    "img_in": "first",
    "time_embed.linear_1": "tmlp.0",
    "time_embed.linear_2": "tmlp.2",
    "time_mod_proj": "tproj.1",
    "txt_in.norm.weight": "txtmlp.0.scale",
    "txt_in.linear_1": "txtmlp.1",
    "txt_in.linear_2": "txtmlp.3",
    "text_fusion": "txtfusion",
    "transformer_blocks": "blocks",
    "final_layer.linear": "last.linear",
    "final_layer.norm.weight": "last.norm.scale",
    "final_layer.scale_shift_table": "last.modulation.lin",
}
OUR_INSIDE = {
    "attn.to_q": "attn.wq",
    "attn.to_k": "attn.wk",
    "attn.to_v": "attn.wv",
    "attn.to_out.0": "attn.wo",
    "attn.to_gate": "attn.gate",
    "attn.norm_q.weight": "attn.qknorm.qnorm.scale",
    "attn.norm_k.weight": "attn.qknorm.knorm.scale",
    "ff": "mlp",
    "norm1.weight": "prenorm.scale",
    "norm2.weight": "postnorm.scale",
    "scale_shift_table": "mod.lin",
}
DIFFUSERS_OUTSIDE, DIFFUSERS_INSIDE = inverse(OUR_OUTSIDE), inverse(OUR_INSIDE)
IN_BLOCK = re.compile(r"((?:.+\.)?(?:\w+_)?blocks\.\d+)\.(.+)")  # of either tree
MODULATION = re.compile(r"^blocks\.\d+\.mod\.lin$")


def canonical_krea_2_path(path: str) -> str:
    """Convert a path, or the name of a tensor, of either tree to ours."""
    return rename_path(path, IN_BLOCK, OUR_OUTSIDE, OUR_INSIDE)


def diffusers_krea_2_path(path: str) -> str:
    return rename_path(path, IN_BLOCK, DIFFUSERS_OUTSIDE, DIFFUSERS_INSIDE)


def krea_2_sources(names: Iterable[str]) -> dict[str, tuple[str, int, int]]:
    """Plain keys of a file in either layout -> {our key: key in the file, index of the row slice, number of slices}."""
    return {canonical_krea_2_path(name): (name, 0, 1) for name in names}


def krea_2_view(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return our shape of a tensor: a block's modulation is one row, and six in diffusers."""
    return (shape[0] * shape[1],) if len(shape) == 2 and MODULATION.search(name) else shape


class Krea2LoraNames(LoraNames):
    """The tree of Krea 2's own files, and diffusers'."""

    trees: ClassVar[tuple[str, ...]] = ("blocks.", "txtfusion.", "transformer_blocks.", "text_fusion.")
    # Others share the names of lists of blocks, and those of attention in diffusers.
    marks: ClassVar[str] = (
        r"\.attn\.(w[qkvo]|gate|to_gate)$|\.(mlp|ff)\.(gate|up|down)$|^(txtfusion|text_fusion)\."
        r"|^(tmlp|txtmlp|tproj)\.\d|^time_mod_proj$"
    )
    version_word: ClassVar[str] = "krea2"
    words: ClassVar[tuple[str, ...]] = (
        "layerwise_blocks",
        "refiner_blocks",
        "text_fusion",
        "time_mod_proj",
        "to_gate",
        "txt_in",
    )
    adapted: ClassVar[str] = r"blocks\.\d+\.(attn|mlp)\."  # without the fusion of the text's layers and embedders
    mergeable: ClassVar[tuple[str, ...]] = (KREA_2_TRANSFORMER,)
    shared: ClassVar[SharedForm] = SharedForm(has_alphas=False)  # diffusers rejects alphas
    elsewhere: ClassVar[str] = r"^lora_unet_(transformer_blocks|text_fusion)_"

    def canonical(self, path: str) -> tuple[str, int, int]:
        return canonical_krea_2_path(path), 0, 1

    def pieces(self, path: str) -> tuple[str, ...]:
        return (diffusers_krea_2_path(path),)

    def rows(self, names: Iterable[str]) -> dict[str, tuple[str, int, int]]:
        return krea_2_sources(names)


LORA_NAMES = Krea2LoraNames()
