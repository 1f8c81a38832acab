"""Anima's tensor names: those of its own files, which are ours, and those of diffusers' folders."""

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from library.families.anima.adapter import ADAPTER_NAMES_PREFIX
from library.families.anima.facts import ANIMA_TRANSFORMER
from library.families.shared.lora_names import LoraNames, Shapes, SharedForm, matrices
from library.families.shared.tensor_names import denoiser_prefix

# Path in diffusers -> ours, outside of blocks and inside of them.
OUTSIDE_OF_BLOCKS = {
    "patch_embed.proj": "x_embedder.proj.1",
    "time_embed.t_embedder.linear_1": "t_embedder.1.linear_1",
    "time_embed.t_embedder.linear_2": "t_embedder.1.linear_2",
    "time_embed.norm": "t_embedding_norm",
    "norm_out.linear_1": "final_layer.adaln_modulation.1",
    "norm_out.linear_2": "final_layer.adaln_modulation.2",
    "proj_out": "final_layer.linear",
}
ATTENTION_NAMES = {
    "to_q": "q_proj",
    "to_k": "k_proj",
    "to_v": "v_proj",
    "to_out.0": "output_proj",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
}
BLOCK_PARTS = ("self_attn", "cross_attn", "mlp")
INSIDE = {
    **{
        f"attn{n}.{old}": f"{part}.{new}"
        for n, part in enumerate(BLOCK_PARTS[:2], 1)
        for old, new in ATTENTION_NAMES.items()
    },
    **{f"norm{n}.linear_{i}": f"adaln_modulation_{part}.{i}" for n, part in enumerate(BLOCK_PARTS, 1) for i in (1, 2)},
    "ff.net.0.proj": "mlp.layer1",
    "ff.net.2": "mlp.layer2",
}
DIFFUSERS_BLOCKS = "transformer_blocks."  # prefix of blocks in diffusers
EMBEDDING = "embed.weight"  # of the adapter, in any file that has one
UNUSED = ("pos_embedder.", "accum_")  # tables and counters in some files, which follow from the sizes


def canonical_anima_path(path: str) -> str:
    """Convert a path of either tree to ours."""
    if path.startswith(DIFFUSERS_BLOCKS):
        number, _, layer = path.removeprefix(DIFFUSERS_BLOCKS).partition(".")
        return f"blocks.{number}.{INSIDE.get(layer, layer)}"
    return OUTSIDE_OF_BLOCKS.get(path, path)


def anima_sources(names: Iterable[str]) -> dict[str, tuple[str, int, int]]:
    """Plain keys of a transformer's file in either layout -> {our key: key in the file, the first of one piece}."""
    sources = {}
    for name in names:
        if not name.startswith(UNUSED):
            path, _, ending = name.rpartition(".")
            sources[f"{canonical_anima_path(path)}.{ending}"] = (name, 0, 1)
    return sources


def adapter(names: Iterable[str]) -> dict[str, str]:
    """Keys of a file with an adapter, alone or in a whole model -> {the denoiser's key: key in the file}."""
    names = list(names)
    prefix = next((name.removesuffix(EMBEDDING) for name in names if name.endswith(EMBEDDING)), ADAPTER_NAMES_PREFIX)
    return {ADAPTER_NAMES_PREFIX + name.removeprefix(prefix): name for name in names if name.startswith(prefix)}


ENCODER = "text_encoder"
BLOCK_LAYERS = (".self_attn.", ".cross_attn.", ".mlp.")


class AnimaLoraNames(LoraNames):
    """The tree of Anima's own files; paths of diffusers' transformer are read, too."""

    prefixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "kohya": {"denoiser": "lora_unet_", ENCODER: "lora_te_"},
        "diffusers": {"denoiser": "diffusion_model.", ENCODER: "text_encoder."},
        "comfy": {"denoiser": "diffusion_model.", ENCODER: "text_encoders.qwen3_06b.transformer.model."},
    }
    other_prefixes: ClassVar[Mapping[str, str]] = {**LoraNames.other_prefixes, "transformer.": "denoiser"}
    trees: ClassVar[tuple[str, ...]] = ("blocks.", "llm_adapter.")
    # Wan's blocks have the same tree, and other families share diffusers' paths, such as FLUX.1's MLP.
    marks: ClassVar[str] = (
        r"^llm_adapter\.|^blocks\.\d+\.((self|cross)_attn\.(q|k|v|output)_proj|mlp\.layer[12]|adaln_)"
        r"|^transformer_blocks\.\d+\.(attn[12]\.|norm\d\.linear_\d)"
    )
    encoder_names: ClassVar[tuple[str, ...]] = ("lora_te_layers_", "text_encoders.qwen3_06b.")
    version_word: ClassVar[str] = "anima"
    words: ClassVar[tuple[str, ...]] = (
        "llm_adapter",
        "cross_attn",
        "output_proj",
        "o_proj",
        "adaln_modulation_self_attn",
        "adaln_modulation_cross_attn",
        "adaln_modulation_mlp",
        "adaln_modulation",
        "x_embedder",
        "t_embedder",
    )
    shared: ClassVar[SharedForm] = SharedForm(has_alphas=False)  # diffusers would load alphas as weights
    mergeable: ClassVar[tuple[str, ...]] = (ANIMA_TRANSFORMER,)

    def canonical(self, path: str) -> tuple[str, int, int]:
        return canonical_anima_path(path), 0, 1

    def layers(self, shapes: Shapes, convolutions: bool) -> Iterator[tuple[str, str]]:
        """Yield attention and MLP of all blocks, without modulation, embedders and text adapter."""
        for path in matrices(shapes, denoiser_prefix(shapes)):
            if path.startswith("blocks.") and any(part in path for part in BLOCK_LAYERS):
                yield "denoiser", path


LORA_NAMES = AnimaLoraNames()
