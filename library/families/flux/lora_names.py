"""Names of the layers that a LoRA of FLUX.1 changes."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from library.families.flux import keys
from library.families.flux.variants import CHROMA, FILL, IN_DIFFUSERS_LAYOUT, TRANSFORMER
from library.families.shared.double_stream_keys import DoubleStreamKeys
from library.families.shared.double_stream_lora import DoubleStreamLoraNames
from library.families.shared.lora_names import Shapes, SharedForm


class FluxLoraNames(DoubleStreamLoraNames):
    """A layer of BFL's tree is made of one or several of diffusers'."""

    prefixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "kohya": {"denoiser": "lora_unet_", "clip_l": "lora_te1_", "t5xxl": "lora_te3_"},
        "diffusers": {"denoiser": "transformer.", "clip_l": "text_encoder.", "t5xxl": "text_encoder_2."},
        "comfy": {
            "denoiser": "diffusion_model.",
            "clip_l": "text_encoders.clip_l.transformer.",
            "t5xxl": "text_encoders.t5xxl.transformer.",
        },
    }
    other_prefixes: ClassVar[Mapping[str, str]] = {
        "lora_te_": "clip_l",
        "lora_te2_": "t5xxl",
        "lora_transformer_": "denoiser",
        "lycoris_": "denoiser",
        "base_model.model.": "denoiser",
    }
    title: ClassVar[str] = "FLUX.1"
    # Of diffusers' tree, which FLUX.2 and Qwen-Image share. What attention has in double blocks may be of any.
    marks: ClassVar[str] = (
        r"\.ff_context\.net\.|\.norm1(_context)?\.linear$"
        r"|^single_transformer_blocks\.\d+\.(attn\.to_[qkv]$|proj_|norm\.linear$)"
    )
    ratios: ClassVar[Mapping[str, int]] = {"linear1": 7, "img_mlp.0": 4, "txt_mlp.0": 4}
    encoder_names: ClassVar[tuple[str, ...]] = ("lora_te3_",)
    version_word: ClassVar[str] = "flux"
    # diffusers reads no lora_A under its own names of fused layers, and ComfyUI reads those of diffusers.
    shared: ClassVar[SharedForm] = SharedForm("diffusers", has_alphas=False)
    mergeable: ClassVar[tuple[str, ...]] = tuple(
        found + layout for found in (TRANSFORMER, FILL, CHROMA) for layout in ("", IN_DIFFUSERS_LAYOUT)
    )
    layouts: ClassVar[DoubleStreamKeys] = keys.TREES
    sources: ClassVar[Callable[[Shapes], Mapping[str, tuple[str, ...]]]] = staticmethod(keys.flux_sources)

    def shared_prefix(self, part: str) -> str:
        """T5 has a name in ComfyUI alone."""
        return self.prefixes["comfy" if part == "t5xxl" else "diffusers"][part]


NAMES = FluxLoraNames()
