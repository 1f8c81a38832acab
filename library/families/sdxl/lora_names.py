"""Names of the layers that a LoRA of SDXL changes."""

import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

from library.families.sdxl import keys
from library.families.sdxl.facts import SDXL_CHECKPOINT, UNET_ALONE
from library.families.shared.lora_names import CLIP_LAYERS, LoraNames, Shapes, SharedForm, WeightSlice, matrices
from library.families.shared.tensor_names import inverse, replace_prefix

STACKED = {"q_proj": 0, "k_proj": 1, "v_proj": 2}  # in CLIP-G's in_proj_weight
TRANSFORMER_NAME = re.compile(r"(input_blocks\.\d+|middle_block|output_blocks\.\d+)\.1\.(proj_|transformer_blocks\.)")
BLOCK_PREFIXES = ("input_blocks.", "middle_block.", "output_blocks.")
DIFFUSERS_BLOCKS = ("down_blocks.", "mid_block.", "up_blocks.")
DIFFUSERS = (*DIFFUSERS_BLOCKS, "conv_in", "conv_out", "time_embedding.", "add_embedding.")
ENCODER_BLOCKS = {
    "clip_l": "text_model.encoder.layers.",
    "clip_g": "transformer.resblocks.",
}  # blocks in the single file


class SdxlLoraNames(LoraNames):
    """The U-Net has other names in diffusers, and the second text encoder others in transformers."""

    prefixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "kohya": {"denoiser": "lora_unet_", "clip_l": "lora_te1_", "clip_g": "lora_te2_"},
        "diffusers": {"denoiser": "unet.", "clip_l": "text_encoder.", "clip_g": "text_encoder_2."},
        "comfy": {
            "denoiser": "diffusion_model.",
            "clip_l": "text_encoders.clip_l.transformer.",
            "clip_g": "text_encoders.clip_g.transformer.",
        },
    }
    other_prefixes: ClassVar[Mapping[str, str]] = {
        "lora_te_": "clip_l",
        "lycoris_": "denoiser",
        "base_model.model.": "denoiser",
    }
    trees: ClassVar[tuple[str, ...]] = (*BLOCK_PREFIXES, *DIFFUSERS_BLOCKS)
    encoder_names: ClassVar[tuple[str, ...]] = ("lora_te2_text_model", "text_encoder_2.text_model")
    version_word: ClassVar[str] = "xl"
    shared: ClassVar[SharedForm] = SharedForm("kohya", is_peft=False)
    mergeable: ClassVar[tuple[str, ...]] = (SDXL_CHECKPOINT, UNET_ALONE)

    def canonical(self, path: str) -> tuple[str, int, int]:
        """The single file's path of one of the U-Net."""
        if path.startswith(DIFFUSERS):
            path = replace_prefix(path, keys.unet_table(keys.Layout()))
        return path, 0, 1

    def pieces(self, path: str) -> tuple[str, ...]:
        """The diffusers path of one of the U-Net."""
        return (replace_prefix(path, inverse(keys.unet_table(keys.Layout()))),)

    def is_large_conv(self, path: str) -> bool:
        """Those of 3x3: of residual blocks, between levels, and at both ends."""
        return re.search(r"\.(in_layers\.2|out_layers\.3|op|conv)$|^input_blocks\.0\.0$|^out\.2$", path) is not None

    def slice_of(self, part: str, path: str, shapes: Shapes) -> WeightSlice | None:
        """In the single file; query, key and value of CLIP-G are one matrix there."""
        if part not in ("denoiser", *ENCODER_BLOCKS):
            return None
        prefix = keys.SINGLE_FILE_PREFIXES[part]
        if part == "clip_g":
            layer, _, last = path.rpartition(".self_attn.")
            if layer and last in STACKED:
                layer = layer.replace("text_model.encoder.layers.", "transformer.resblocks.")
                return WeightSlice(f"{prefix}{layer}.attn.in_proj_weight", STACKED[last], 3)
            path = replace_prefix(path, keys.clip_g_table(_count_unet_blocks(part, shapes)))
        return WeightSlice(f"{prefix}{path}.weight")

    def layers(self, shapes: Shapes, convolutions: bool) -> Iterator[tuple[str, str]]:
        """Attention and MLP, and with `convolutions` the residual blocks of the U-Net as well."""
        for path in matrices(shapes, keys.SINGLE_FILE_PREFIXES["denoiser"]):
            extra = convolutions and path.startswith(BLOCK_PREFIXES) and path != "input_blocks.0.0"
            if TRANSFORMER_NAME.match(path) or extra:
                yield "denoiser", path
        for part in ENCODER_BLOCKS:
            for i in range(_count_unet_blocks(part, shapes)):
                yield from ((part, f"text_model.encoder.layers.{i}.{layer}") for layer in CLIP_LAYERS)


def _count_unet_blocks(part: str, shapes: Shapes) -> int:
    start = keys.SINGLE_FILE_PREFIXES[part] + ENCODER_BLOCKS[part]
    return len({name.removeprefix(start).split(".")[0] for name in shapes if name.startswith(start)})


NAMES = SdxlLoraNames()
