"""Names of an SD 1.5 checkpoint and of its LoRA files, whose U-Net has the names of diffusers
(`lora_unet_down_blocks_0_attentions_0_proj_in`).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from library.families.sd15.facts import SD15_CHECKPOINT, UNET_ALONE
from library.families.shared.clip import canonical_clip_path
from library.families.shared.expected_tensors import list_length
from library.families.shared.lora_names import CLIP_LAYERS, LoraNames, Shapes, SharedForm, WeightSlice, matrices
from library.families.shared.single_file import SingleFile
from library.families.shared.tensor_names import inverse, replace_prefix
from library.families.shared.unet_names import BLOCK_PREFIXES, DIFFUSERS_BLOCKS, TRANSFORMER_NAME, Layout, unet_table

SINGLE_FILE_PREFIXES = {
    "denoiser": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "clip_l": "cond_stage_model.transformer.",
}
LAYOUT = Layout(attention=(True, True, True, False))
ENCODER_LAYERS = "text_model.encoder.layers."
LARGE_CONVOLUTION = re.compile(r"\.(conv|conv1|conv2)$|^conv_(in|out)$")


def _with_full_paths(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a text encoder's tensors under `text_model.`, which some programs leave out."""
    return {canonical_clip_path(name): tensor for name, tensor in tensors.items()}


SD15_FILE = SingleFile(SINGLE_FILE_PREFIXES, {"clip_l": (_with_full_paths, dict)})


def adapter_name(part: str, path: str) -> str:
    """Return the name of an adapter in a LoRA file, from a part and a module path in it."""
    prefix, path = ("lora_unet_", path) if part == "denoiser" else ("lora_te_", canonical_clip_path(path))
    return prefix + path.replace(".", "_")


class Sd15LoraNames(LoraNames):
    """The U-Net has the names of diffusers in all formats, but others in the single file."""

    prefixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "kohya": {"denoiser": "lora_unet_", "clip_l": "lora_te_"},
        "diffusers": {"denoiser": "unet.", "clip_l": "text_encoder."},
        "comfy": {"denoiser": "diffusion_model.", "clip_l": "text_encoders.clip_l.transformer."},
    }
    other_prefixes: ClassVar[Mapping[str, str]] = {"lycoris_": "denoiser", "base_model.model.": "denoiser"}
    trees: ClassVar[tuple[str, ...]] = (*BLOCK_PREFIXES, *DIFFUSERS_BLOCKS)
    # The first and the last level of SDXL have no attention.
    marks: ClassVar[str] = (
        r"^((input_blocks\.[12]|output_blocks\.(9|1[01]))\.1|(down_blocks\.0|up_blocks\.3)\.attentions)\."
    )
    needs_evidence: ClassVar[bool] = True
    cross_attention: ClassVar[int] = 768
    version_word: ClassVar[str] = "v1"
    other_version: ClassVar[str] = "xl"  # sdxl_base_v1-0
    shared: ClassVar[SharedForm] = SharedForm("kohya", is_peft=False)
    mergeable: ClassVar[tuple[str, ...]] = (SD15_CHECKPOINT, UNET_ALONE)

    def canonical(self, path: str) -> tuple[str, int, int]:
        """Return diffusers' path of a U-Net path."""
        return (replace_prefix(path, inverse(unet_table(LAYOUT))) if path.startswith(BLOCK_PREFIXES) else path), 0, 1

    def is_large_conv(self, path: str) -> bool:
        return LARGE_CONVOLUTION.search(path) is not None

    def slice_of(self, part: str, path: str, shapes: Shapes) -> WeightSlice | None:
        """Locate a weight in the single file."""
        if part not in SINGLE_FILE_PREFIXES:
            return None
        path = replace_prefix(path, unet_table(LAYOUT)) if part == "denoiser" else path
        return WeightSlice(f"{SINGLE_FILE_PREFIXES[part]}{path}.weight")

    def layers(self, shapes: Shapes, convolutions: bool) -> Iterator[tuple[str, str]]:
        """Return attention and MLP layers; with `convolutions` also the U-Net's residual blocks."""
        for path in matrices(shapes, SINGLE_FILE_PREFIXES["denoiser"]):
            extra = convolutions and path.startswith(BLOCK_PREFIXES) and path != "input_blocks.0.0"
            if TRANSFORMER_NAME.match(path) or extra:
                yield "denoiser", self.canonical(path)[0]
        for i in range(list_length(shapes, SINGLE_FILE_PREFIXES["clip_l"] + ENCODER_LAYERS)):
            yield from (("clip_l", f"{ENCODER_LAYERS}{i}.{layer}") for layer in CLIP_LAYERS)


LORA_NAMES = Sd15LoraNames()
