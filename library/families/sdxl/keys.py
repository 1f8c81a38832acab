"""Names of an SDXL checkpoint: one table per part from diffusers' module paths to the single file's, used in both
directions.

The U-Net's paths in the single file are also the adapter names (`lora_unet_input_blocks_4_1_proj_in`).
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from library.families.sdxl.facts import SDXL_CHECKPOINT, UNET_ALONE
from library.families.shared import autoencoder
from library.families.shared.clip import canonical_clip_path
from library.families.shared.expected_tensors import list_length
from library.families.shared.lora_names import CLIP_LAYERS, LoraNames, Shapes, SharedForm, WeightSlice, matrices
from library.families.shared.tensor_names import inverse, replace_prefix, shared_prefix

SINGLE_FILE_PREFIXES = {
    "denoiser": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "clip_l": "conditioner.embedders.0.transformer.",
    "clip_g": "conditioner.embedders.1.model.",
}
DROPPED = ("model_ema.",)  # a second copy of the weights, in files saved for research
LOGIT_SCALE = "conditioner.embedders.1.model.logit_scale"
FULL_LOGIT_SCALE = math.log(100.0)  # the clamp of CLIP's training; diffusers folders do not store the value

RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
OUTSIDE_OF_BLOCKS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}


@dataclass(frozen=True)
class Layout:
    """The shape of a U-Net's tree: residual blocks per level, and which levels have transformers."""

    layers: int = 2
    attention: tuple[bool, ...] = (False, True, True)

    @classmethod
    def of(cls, names: Iterable[str]) -> "Layout":
        """Derive the layout from plain tensor names in diffusers' or the single file's tree."""
        names = set(names)
        if any(name.startswith("down_blocks.") for name in names):
            down = {tuple(name.split(".")[1:4]) for name in names if name.startswith("down_blocks.")}
            levels = len({level for level, _, _ in down})
            layers = len({j for level, kind, j in down if level == "0" and kind == "resnets"})
            with_attention = {level for level, kind, _ in down if kind == "attentions"}
            return cls(layers, tuple(str(i) in with_attention for i in range(levels)))
        halvings = sorted({int(name.split(".")[1]) for name in names if ".0.op." in name})
        layers, levels = (halvings[0] - 1 if halvings else 0), len(halvings) + 1
        firsts = [f"input_blocks.{1 + i * (layers + 1)}.1." for i in range(levels)]
        return cls(layers, tuple(any(name.startswith(first) for name in names) for first in firsts))


def count_sdxl_blocks(names: Iterable[str]) -> dict[str, int]:
    """Return the number of blocks of each class in a U-Net, from plain tensor names in either tree."""
    names = list(names)
    transformers = {match[0] for name in names if (match := re.match(r".+\.transformer_blocks\.\d+\.", name))}
    residual = sum(name.endswith((".in_layers.2.weight", ".conv1.weight")) for name in names)
    return {"BasicTransformerBlock": len(transformers), "ResnetBlock2D": residual}


@functools.cache
def unet_table(layout: Layout) -> dict[str, str]:
    """diffusers module path -> single-file module path, for every block of a U-Net."""
    modules, per_level, levels = {}, layout.layers + 1, len(layout.attention)
    for i, has_attention in enumerate(layout.attention):
        for j in range(layout.layers):
            modules[f"down_blocks.{i}.resnets.{j}"] = f"input_blocks.{1 + i * per_level + j}.0"
            if has_attention:
                modules[f"down_blocks.{i}.attentions.{j}"] = f"input_blocks.{1 + i * per_level + j}.1"
        if i + 1 < levels:
            modules[f"down_blocks.{i}.downsamplers.0.conv"] = f"input_blocks.{(i + 1) * per_level}.0.op"
    for i, has_attention in enumerate(reversed(layout.attention)):
        for j in range(per_level):
            modules[f"up_blocks.{i}.resnets.{j}"] = f"output_blocks.{i * per_level + j}.0"
            if has_attention:
                modules[f"up_blocks.{i}.attentions.{j}"] = f"output_blocks.{i * per_level + j}.1"
        if i + 1 < levels:
            last = f"output_blocks.{i * per_level + layout.layers}"
            modules[f"up_blocks.{i}.upsamplers.0.conv"] = f"{last}.{2 if has_attention else 1}.conv"
    modules |= {"mid_block.resnets.0": "middle_block.0", "mid_block.resnets.1": "middle_block.2"}
    modules["mid_block.attentions.0"] = "middle_block.1"
    resnet_layers = {f"{a}.{b}": f"{modules[a]}.{c}" for a in modules if ".resnets." in a for b, c in RESNET.items()}
    return OUTSIDE_OF_BLOCKS | modules | resnet_layers


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


def split_parts(names: Iterable[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return the names of a single file by part, {part: {plain name: name}}, and {plain name: name} of the rest. Other
    programs add a common prefix.
    """
    # The rest (`logit_scale`, `position_ids`, marks such as `v_pred`) is kept, so that a saved file has everything that
    # the loaded one had.
    names = list(names)
    wrapped = not any(name.startswith((*SINGLE_FILE_PREFIXES.values(),)) for name in names)
    wrapper = shared_prefix(names) if wrapped else ""
    parts: dict[str, dict[str, str]] = {part: {} for part in SINGLE_FILE_PREFIXES}
    unassigned = {}
    for name in names:
        plain = name.removeprefix(wrapper)
        part = next((part for part, prefix in SINGLE_FILE_PREFIXES.items() if plain.startswith(prefix)), None)
        if part is not None and plain != LOGIT_SCALE and not plain.endswith(".position_ids"):
            parts[part][plain.removeprefix(SINGLE_FILE_PREFIXES[part])] = name
        elif not plain.startswith(DROPPED):
            unassigned[plain] = name
    return parts, unassigned


def sdxl_part_to_diffusers(part: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Convert plain single-file names of one part to diffusers names; U-Net values may be anything."""
    if part == "denoiser":
        table = inverse(unet_table(Layout.of(tensors)))
        return {replace_prefix(name, table): tensor for name, tensor in tensors.items()}
    if part == "vae":
        return autoencoder.vae_to_diffusers(tensors)
    return _open_clip_to_transformers(tensors) if part == "clip_g" else dict(tensors)


def sdxl_part_to_single(part: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Convert diffusers names of one part to single-file names, prefix included."""
    if part == "denoiser":
        table = unet_table(Layout.of(tensors))
        named = {replace_prefix(name, table): tensor for name, tensor in tensors.items()}
    elif part == "vae":
        named = autoencoder.vae_to_single(tensors)
    else:
        named = _transformers_to_open_clip(tensors) if part == "clip_g" else dict(tensors)
    return {SINGLE_FILE_PREFIXES[part] + name: tensor for name, tensor in named.items()}


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


def adapter_name(part: str, path: str, layout: Layout) -> str:
    """Return the name of an adapter in a LoRA file, from a part and a module path in it."""
    if part == "denoiser":
        return "lora_unet_" + replace_prefix(path, unet_table(layout)).replace(".", "_")
    return {"clip_l": "lora_te1_", "clip_g": "lora_te2_"}[part] + canonical_clip_path(path).replace(".", "_")


STACKED = {"q_proj": 0, "k_proj": 1, "v_proj": 2}  # in CLIP-G's in_proj_weight
TRANSFORMER_NAME = re.compile(r"(input_blocks\.\d+|middle_block|output_blocks\.\d+)\.1\.(proj_|transformer_blocks\.)")
BLOCK_PREFIXES = ("input_blocks.", "middle_block.", "output_blocks.")
DIFFUSERS_BLOCKS = ("down_blocks.", "mid_block.", "up_blocks.")
DIFFUSERS = (*DIFFUSERS_BLOCKS, "conv_in", "conv_out", "time_embedding.", "add_embedding.")
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
        return re.search(r"\.(in_layers\.2|out_layers\.3|op|conv)$|^input_blocks\.0\.0$|^out\.2$", path) is not None

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
    start = SINGLE_FILE_PREFIXES[part] + ENCODER_BLOCKS[part]
    return len({name.removeprefix(start).split(".")[0] for name in shapes if name.startswith(start)})


LORA_NAMES = SdxlLoraNames()
