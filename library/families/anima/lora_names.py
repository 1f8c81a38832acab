"""LoRA layer names of Anima.

Files are written under kohya's names, which ComfyUI loads. diffusers loads none of these, but ComfyUI's own paths with
PEFT's suffixes, which are used here for diffusers.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from library.families.anima import keys
from library.families.anima.facts import TRANSFORMER
from library.families.shared.lora_names import LoraNames, Shapes, SharedForm, matrices
from library.families.shared.tensor_names import prefix_of

ENCODER = "text_encoder"
LAYERS = (".self_attn.", ".cross_attn.", ".mlp.")


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
    mergeable: ClassVar[tuple[str, ...]] = (TRANSFORMER,)

    def canonical(self, path: str) -> tuple[str, int, int]:
        return keys.canonical(path), 0, 1

    def layers(self, shapes: Shapes, convolutions: bool) -> Iterator[tuple[str, str]]:
        """Return attention and MLP of all blocks, without modulation, embedders and text adapter."""
        for path in matrices(shapes, prefix_of(shapes)):
            if path.startswith("blocks.") and any(part in path for part in LAYERS):
                yield "denoiser", path


NAMES = AnimaLoraNames()
