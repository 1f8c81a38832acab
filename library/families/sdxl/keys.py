"""Names of an SDXL checkpoint: one table per part, from diffusers' module paths to the single file's, read both ways.

The U-Net's paths in the single file are also the adapters' names (`lora_unet_input_blocks_4_1_proj_in`).
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from library.families.shared import autoencoder
from library.families.shared.clip import canonical_clip_path
from library.families.shared.expected_tensors import list_length
from library.families.shared.tensor_names import inverse, replace_prefix, shared_prefix

SINGLE_FILE_PREFIXES = {
    "denoiser": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "clip_l": "conditioner.embedders.0.transformer.",
    "clip_g": "conditioner.embedders.1.model.",
}
DROPPED = ("model_ema.",)  # a second copy of the weights, in files saved for research
LOGIT_SCALE = "conditioner.embedders.1.model.logit_scale"
FULL_LOGIT_SCALE = math.log(100.0)  # where CLIP's training clamps it; diffusers folders do not store it

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
        """The layout behind tensor names without prefix, in the diffusers or the single file's tree."""
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
    """How many blocks of each class a U-Net has, from tensor names without prefix in either tree."""
    names = list(names)
    transformers = {found[0] for name in names if (found := re.match(r".+\.transformer_blocks\.\d+\.", name))}
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
    inside = {f"{a}.{b}": f"{modules[a]}.{c}" for a in modules if ".resnets." in a for b, c in RESNET.items()}
    return OUTSIDE_OF_BLOCKS | modules | inside


def clip_g_table(layers: int) -> dict[str, str]:
    """transformers module path -> open_clip module path; q, k, v and the two bare matrices are handled apart."""
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
    """The names of a single file by part, {part: {name without prefix: name}}, and {plain name: name} of what belongs
    to no part. Other programs wrap all of them in a prefix of their own.

    The rest (`logit_scale`, `position_ids`, marks such as `v_pred`) is kept, so that a saved file has all that the
    loaded one had.
    """
    names = list(names)
    wrapped = not any(name.startswith((*SINGLE_FILE_PREFIXES.values(),)) for name in names)
    wrapper = shared_prefix(names) if wrapped else ""
    parts: dict[str, dict[str, str]] = {part: {} for part in SINGLE_FILE_PREFIXES}
    rest = {}
    for name in names:
        plain = name.removeprefix(wrapper)
        part = next((part for part, prefix in SINGLE_FILE_PREFIXES.items() if plain.startswith(prefix)), None)
        if part is not None and plain != LOGIT_SCALE and not plain.endswith(".position_ids"):
            parts[part][plain.removeprefix(SINGLE_FILE_PREFIXES[part])] = name
        elif not plain.startswith(DROPPED):
            rest[plain] = name
    return parts, rest


def sdxl_part_to_diffusers(part: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors (or, for the U-Net, anything) of one part by single-file name without prefix -> by diffusers name."""
    if part == "denoiser":
        table = inverse(unet_table(Layout.of(tensors)))
        return {replace_prefix(name, table): tensor for name, tensor in tensors.items()}
    if part == "vae":
        return autoencoder.vae_to_diffusers(tensors)
    return _open_clip_to_transformers(tensors) if part == "clip_g" else dict(tensors)


def sdxl_part_to_single(part: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of one part by diffusers name -> by the single file's name, prefix included."""
    if part == "denoiser":
        table = unet_table(Layout.of(tensors))
        named = {replace_prefix(name, table): tensor for name, tensor in tensors.items()}
    elif part == "vae":
        named = autoencoder.vae_to_single(tensors)
    else:
        named = _transformers_to_open_clip(tensors) if part == "clip_g" else dict(tensors)
    return {SINGLE_FILE_PREFIXES[part] + name: tensor for name, tensor in named.items()}


def _open_clip_to_transformers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """CLIP-G: three stacked matrices are taken apart, and the projection P (used as h P) becomes a Linear's weight."""
    table = inverse(clip_g_table(list_length(tensors, "transformer.resblocks.")))
    out = {}
    for name, tensor in tensors.items():
        if name == "text_projection":
            out["text_projection.weight"] = tensor.T.contiguous()
        elif ".attn.in_proj_" in name:
            where, kind = name.split(".attn.in_proj_")
            layer = where.replace("transformer.resblocks.", "text_model.encoder.layers.")
            for letter, piece in zip("qkv", tensor.chunk(3), strict=True):
                out[f"{layer}.self_attn.{letter}_proj.{kind}"] = piece.clone()  # each its own storage
        else:
            out[replace_prefix(name, table)] = tensor
    return out


def _transformers_to_open_clip(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """CLIP-G the other way; what another tool stacked in rows is stacked again in the same order."""
    table = clip_g_table(len({n.split(".")[3] for n in tensors if n.startswith("text_model.encoder.layers.")}))
    out = {}
    for name, tensor in tensors.items():
        if name == "text_projection.weight":
            out["text_projection"] = tensor.T.contiguous()
        elif ".self_attn.q_proj." in name:
            three = [tensors[name.replace(".q_proj.", f".{letter}_proj.")] for letter in "qkv"]
            where, kind = name.split(".self_attn.q_proj.")
            layer = where.replace("text_model.encoder.layers.", "transformer.resblocks.")
            out[f"{layer}.attn.in_proj_{kind}"] = torch.cat(list(three))
        elif ".self_attn.k_proj." not in name and ".self_attn.v_proj." not in name:
            out[replace_prefix(name, table)] = tensor
    return out


def adapter_name(part: str, path: str, layout: Layout) -> str:
    """The name of an adapter in a LoRA file, from a part and a module path in it."""
    if part == "denoiser":
        return "lora_unet_" + replace_prefix(path, unet_table(layout)).replace(".", "_")
    return {"clip_l": "lora_te1_", "clip_g": "lora_te2_"}[part] + canonical_clip_path(path).replace(".", "_")
