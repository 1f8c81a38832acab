"""Names of an SDXL checkpoint, of its two text encoders, and of its LoRA files.

The U-Net's paths in the single file are also the adapter names (`lora_unet_input_blocks_4_1_proj_in`).
"""

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from library.families.sdxl.facts import SDXL_CHECKPOINT, UNET_ALONE
from library.families.shared.clip import canonical_clip_path
from library.families.shared.expected_tensors import list_length
from library.families.shared.lora_names import CLIP_LAYERS, LoraNames, Shapes, SharedForm, WeightSlice, matrices
from library.families.shared.single_file import SingleFile
from library.families.shared.tensor_names import count_list_blocks, inverse, replace_prefix
from library.families.shared.unet_names import (
    BLOCK_PREFIXES,
    DIFFUSERS,
    DIFFUSERS_BLOCKS,
    LARGE_CONVOLUTION,
    TRANSFORMER_NAME,
    Layout,
    unet_table,
)

SINGLE_FILE_PREFIXES = {
    "denoiser": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "clip_l": "conditioner.embedders.0.transformer.",
    "clip_g": "conditioner.embedders.1.model.",
}
LOGIT_SCALE = "conditioner.embedders.1.model.logit_scale"
FULL_LOGIT_SCALE = math.log(100.0)  # the clamp of CLIP's training; diffusers folders do not store the value


def clip_g_table(layers: int) -> dict[str, str]:
    """transformers module path -> open_clip module path; q, k, v and the two bare matrices are handled separately."""
    names = {
        "text_model.embeddings.token_embedding": "token_embedding",
        "text_model.embeddings.position_embedding.weight": "positional_embedding",
        "text_model.final_layer_norm": "ln_final",
    }
    for i in range(layers):
        ours, theirs = f"text_model.encoder.layers.{i}", f"transformer.resblocks.{i}"
        names |= {
            f"{ours}.layer_norm1": f"{theirs}.ln_1",
            f"{ours}.layer_norm2": f"{theirs}.ln_2",
            f"{ours}.mlp.fc1": f"{theirs}.mlp.c_fc",
            f"{ours}.mlp.fc2": f"{theirs}.mlp.c_proj",
            f"{ours}.self_attn.out_proj": f"{theirs}.attn.out_proj",
        }
    return names


def _open_clip_to_transformers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert CLIP-G: split three stacked matrices, and store the projection P (used as h P) as a Linear's weight."""
    table = inverse(clip_g_table(list_length(tensors, "transformer.resblocks.")))
    out = {}
    for name, tensor in tensors.items():
        if name == "text_projection":
            out["text_projection.weight"] = tensor.T.contiguous()
        elif ".attn.in_proj_" in name:
            prefix, kind = name.split(".attn.in_proj_")
            layer = prefix.replace("transformer.resblocks.", "text_model.encoder.layers.")
            for letter, piece in zip("qkv", tensor.chunk(3), strict=True):
                # Clone, as a view would keep the other rows in memory.
                out[f"{layer}.self_attn.{letter}_proj.{kind}"] = piece.clone()
        else:
            out[replace_prefix(name, table)] = tensor
    return out


def _transformers_to_open_clip(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert CLIP-G back; rows stacked by other tools are restacked in the same order."""
    table = clip_g_table(len({n.split(".")[3] for n in tensors if n.startswith("text_model.encoder.layers.")}))
    out = {}
    for name, tensor in tensors.items():
        if name == "text_projection.weight":
            out["text_projection"] = tensor.T.contiguous()
        elif ".self_attn.q_proj." in name:
            three = [tensors[name.replace(".q_proj.", f".{letter}_proj.")] for letter in "qkv"]
            prefix, kind = name.split(".self_attn.q_proj.")
            layer = prefix.replace("text_model.encoder.layers.", "transformer.resblocks.")
            out[f"{layer}.attn.in_proj_{kind}"] = torch.cat(list(three))
        elif ".self_attn.k_proj." not in name and ".self_attn.v_proj." not in name:
            out[replace_prefix(name, table)] = tensor
    return out


SDXL_FILE = SingleFile(
    SINGLE_FILE_PREFIXES,
    {"clip_g": (_open_clip_to_transformers, _transformers_to_open_clip)},
    (LOGIT_SCALE,),
)


def adapter_name(part: str, path: str, layout: Layout) -> str:
    """Return the name of an adapter in a LoRA file, from a part and a module path in it."""
    if part == "denoiser":
        return "lora_unet_" + replace_prefix(path, unet_table(layout)).replace(".", "_")
    return {"clip_l": "lora_te1_", "clip_g": "lora_te2_"}[part] + canonical_clip_path(path).replace(".", "_")


STACKED = {"q_proj": 0, "k_proj": 1, "v_proj": 2}  # in CLIP-G's in_proj_weight
# Prefixes of blocks in the single file.
ENCODER_BLOCKS = {"clip_l": "text_model.encoder.layers.", "clip_g": "transformer.resblocks."}


class SdxlLoraNames(LoraNames):
    """The U-Net has different names in diffusers, and the second text encoder in transformers."""

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
    marks: ClassVar[str] = r"^(input|output|down|up|mid|middle)_block.*\.transformer_blocks\.[1-9]"
    cross_attention: ClassVar[int] = 2048
    encoder_names: ClassVar[tuple[str, ...]] = ("lora_te2_text_model", "text_encoder_2.text_model")
    version_word: ClassVar[str] = "xl"
    shared: ClassVar[SharedForm] = SharedForm("kohya", is_peft=False)
    mergeable: ClassVar[tuple[str, ...]] = (SDXL_CHECKPOINT, UNET_ALONE)

    def canonical(self, path: str) -> tuple[str, int, int]:
        """Return the single file's path of a U-Net path."""
        if path.startswith(DIFFUSERS):
            path = replace_prefix(path, unet_table(Layout()))
        return path, 0, 1

    def pieces(self, path: str) -> tuple[str, ...]:
        return (replace_prefix(path, inverse(unet_table(Layout()))),)

    def is_large_conv(self, path: str) -> bool:
        return LARGE_CONVOLUTION.search(path) is not None

    def slice_of(self, part: str, path: str, shapes: Shapes) -> WeightSlice | None:
        """Locate a weight in the single file, where query, key and value of CLIP-G are one matrix."""
        if part not in ("denoiser", *ENCODER_BLOCKS):
            return None
        prefix = SINGLE_FILE_PREFIXES[part]
        if part == "clip_g":
            layer, _, last = path.rpartition(".self_attn.")
            if layer and last in STACKED:
                layer = layer.replace("text_model.encoder.layers.", "transformer.resblocks.")
                return WeightSlice(f"{prefix}{layer}.attn.in_proj_weight", STACKED[last], 3)
            path = replace_prefix(path, clip_g_table(_count_unet_blocks(part, shapes)))
        return WeightSlice(f"{prefix}{path}.weight")

    def layers(self, shapes: Shapes, convolutions: bool) -> Iterator[tuple[str, str]]:
        """Return attention and MLP layers; with `convolutions` also the U-Net's residual blocks."""
        for path in matrices(shapes, SINGLE_FILE_PREFIXES["denoiser"]):
            extra = convolutions and path.startswith(BLOCK_PREFIXES) and path != "input_blocks.0.0"
            if TRANSFORMER_NAME.match(path) or extra:
                yield "denoiser", path
        for part in ENCODER_BLOCKS:
            for i in range(_count_unet_blocks(part, shapes)):
                yield from ((part, f"text_model.encoder.layers.{i}.{layer}") for layer in CLIP_LAYERS)


def _count_unet_blocks(part: str, shapes: Shapes) -> int:
    return count_list_blocks(shapes, SINGLE_FILE_PREFIXES[part] + ENCODER_BLOCKS[part].removesuffix("."))


LORA_NAMES = SdxlLoraNames()
