"""FLUX 3's tensor names: those of the single file, which are ours and ComfyUI's, and diffusers'."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from library.families.flux_3.facts import DISTILLED, FLUX_3_TRANSFORMER
from library.families.shared.double_stream_keys import join_tensors
from library.families.shared.lora_names import LoraNames, Shapes, SharedForm
from library.families.shared.tensor_names import inverse, rename_path

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_KINDS = ("image", "image_cond", "txt")  # of tokens
LAST_MODULATION = "final_layer.image.adaLN_modulation.1"  # whose two halves are swapped in diffusers
# diffusers' names -> ours, of layers and lists outside of blocks, and inside of a block.
OUT_OF_BLOCKS = {
    "x_embedders": "emb_in",
    "context_embedder": "txt_in",
    "timestep_embedder.linear_1": "time_in.in_layer",
    "timestep_embedder.linear_2": "time_in.out_layer",
    "target_timestep_embedder.linear_1": "ref_time_in.in_layer",
    "target_timestep_embedder.linear_2": "ref_time_in.out_layer",
    **{
        f"{kind}_stream_modulations.{tokens}.linear": f"{kind}_stream_modulations.{tokens}.lin"
        for kind in ("early", "single")
        for tokens in TOKEN_KINDS
    },
    "mode_blocks": "content_mode_blocks",
    "single_transformer_blocks": "single_blocks",
    "norm_out.linear": LAST_MODULATION,
    "proj_out": "final_layer.image.linear",
}
IN_A_BLOCK = {
    "attn.to_q": "q_proj",
    "attn.to_k": "k_proj",
    "attn.to_v": "v_proj",
    "attn.to_out.0": "attn_out",
    "attn.norm_q.weight": "norm.query_norm.scale",
    "attn.norm_k.weight": "norm.key_norm.scale",
    "ff.linear_in": "mlp_in",
    "ff.linear_out": "mlp_out",
}
TO_OUT_OF_BLOCKS, TO_IN_A_BLOCK = inverse(OUT_OF_BLOCKS), inverse(IN_A_BLOCK)
LISTS = r"(?:content_)?mode_blocks\.\w+|txt_mode_blocks|single_(?:transformer_)?blocks"  # of either tree
IN_BLOCK = re.compile(rf"((?:{LISTS})\.\d+)\.(.+)")
DIFFUSERS_MARKS = ("context_embedder.weight", "x_embedders.image.weight")


def canonical_flux_3_path(path: str) -> str:
    """Convert a path, or the name of a tensor, of either tree to ours."""
    return rename_path(path, IN_BLOCK, OUT_OF_BLOCKS, IN_A_BLOCK)


def diffusers_flux_3_path(path: str) -> str:
    return rename_path(path, IN_BLOCK, TO_OUT_OF_BLOCKS, TO_IN_A_BLOCK)


class Flux3Layouts:
    """The two layouts of files."""

    def is_diffusers(self, names: Iterable[str]) -> bool:
        names = set(names)
        return any(mark in names for mark in DIFFUSERS_MARKS)


LAYOUTS = Flux3Layouts()


def flux_3_sources(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Diffusers keys -> {our key: its diffusers key}."""
    return {canonical_flux_3_path(name): (name,) for name in names}


class Flux3LoraNames(LoraNames):
    """The tree of FLUX 3's own files, and diffusers'."""

    trees: ClassVar[tuple[str, ...]] = (
        "content_mode_blocks.",
        "txt_mode_blocks.",
        "single_blocks.",
        "mode_blocks.",
        "single_transformer_blocks.",
    )
    # Others have lists of single blocks, too, with fused layers, or in diffusers with another MLP.
    marks: ClassVar[str] = (
        r"^(content_|txt_)?mode_blocks\.|^single_blocks\.\d+\.([qkv]_proj|attn_out|mlp_(in|out))(\.|$)"
        r"|^single_transformer_blocks\.\d+\.(ff\.|attn\.to_out\.0)|^(early|single)_stream_modulations\."
    )
    version_word: ClassVar[str] = "flux_3"
    words: ClassVar[tuple[str, ...]] = (
        "early_stream_modulations",
        "single_stream_modulations",
        "content_mode_blocks",
        "txt_mode_blocks",
        "mode_blocks",
        "image_cond",
        "attn_out",
        "mlp_out",
        "mlp_in",
        "linear_out",
        "linear_in",
        "emb_in",
        "x_embedders",
        "ref_time_in",
        "target_timestep_embedder",
    )
    adapted: ClassVar[str] = IN_BLOCK.pattern
    mergeable: ClassVar[tuple[str, ...]] = (FLUX_3_TRANSFORMER, DISTILLED)
    shared: ClassVar[SharedForm] = SharedForm(has_alphas=False)  # diffusers rejects alphas
    elsewhere: ClassVar[str] = (
        r"^lora_unet_(mode_blocks_\w+?|txt_mode_blocks|single_transformer_blocks)_\d+_(attn_to|ff)_"
    )

    def canonical(self, path: str) -> tuple[str, int, int]:
        return canonical_flux_3_path(path), 0, 1

    def pieces(self, path: str) -> tuple[str, ...]:
        return (diffusers_flux_3_path(path),)

    def has_swapped_halves(self, path: str) -> bool:
        return path == LAST_MODULATION

    def tensors_of(self, path: str, shapes: Shapes) -> dict[str, tuple[str, ...]]:
        return flux_3_sources(shapes) if LAYOUTS.is_diffusers(shapes) else LoraNames.tensors_of(self, path, shapes)

    def joined(self, name: str, rows: "list[Tensor]") -> "Tensor":
        return join_tensors(name, rows)


LORA_NAMES = Flux3LoraNames()
