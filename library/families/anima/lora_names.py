"""Names of the layers that a LoRA of Anima changes.

Files are written under kohya's names, which ComfyUI loads; diffusers loads none of these, but ComfyUI's own paths with
the endings of PEFT, so that these are what stands here for diffusers.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from library.families.anima import keys
from library.families.anima.facts import ANIMA_TRANSFORMER
from library.families.shared.lora_names import LoraNames, Shapes, SharedForm, matrices
from library.families.shared.tensor_names import denoiser_prefix

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
    # Wan's blocks have the same tree, and diffusers' paths that of several others: FLUX.1 has its MLP's names, too.
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
    shared: ClassVar[SharedForm] = SharedForm(has_alphas=False)  # which diffusers would take for weights
    mergeable: ClassVar[tuple[str, ...]] = (ANIMA_TRANSFORMER,)

    def canonical(self, path: str) -> tuple[str, int, int]:
        """A path of either tree -> ours."""
        return keys.canonical_anima_path(path), 0, 1

    def layers(self, shapes: Shapes, convolutions: bool) -> Iterator[tuple[str, str]]:
        """Attention and MLP of all blocks; modulation, embedders and the text adapter are left as they are."""
        for path in matrices(shapes, denoiser_prefix(shapes)):
            if path.startswith("blocks.") and any(part in path for part in BLOCK_LAYERS):
                yield "denoiser", path


NAMES = AnimaLoraNames()
