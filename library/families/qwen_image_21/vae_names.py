"""Tensor names of Qwen-Image-2.1's VAE: diffusers', which are ours, and those of ComfyUI's file."""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from library.families.facts import Shapes
from library.families.shared.expected_tensors import (
    BOTH,
    OUTSIDE_OF_LEVELS,
    VIDEO_RESNET,
    changes_width,
    expanded,
    list_length,
)
from library.families.shared.qwen_vae_names import (
    DIFFUSERS_MARK,
    OUTSIDE,
    QWEN_VAE_PREFIXES,
    RESIDUAL,
    SINGLE_MARK,
    SINGLE_PARTS,
)
from library.families.shared.tensor_names import after_prefix, inverse, replace_prefix

if TYPE_CHECKING:
    from torch import Tensor

LISTS = {"downsamples": ("down_blocks", "downsampler"), "upsamples": ("up_blocks", "upsampler")}
IN_LEVEL = re.compile(r"(encoder|decoder)\.(downsamples|upsamples)\.(\d+)\.\2\.(\d+)\.(.+)")


def plain_qwen_21_vae_names(names: Iterable[str]) -> dict[str, str]:
    """Keys of a VAE's file in either layout, with any prefix -> {diffusers' key: key in the file}. Skips other keys."""
    unprefixed = after_prefix(names, (DIFFUSERS_MARK, SINGLE_MARK))
    if SINGLE_MARK not in unprefixed:
        return {name: key for name, key in unprefixed.items() if name.startswith(QWEN_VAE_PREFIXES)}
    return {_diffusers_name(name): key for name, key in unprefixed.items() if name.startswith(SINGLE_PARTS)}


def _diffusers_name(name: str) -> str:
    if match := IN_LEVEL.fullmatch(name):
        side, kind, level, number, rest = match.groups()
        blocks, sampler = LISTS[kind]
        inside = sampler if rest.startswith(("resample.", "time_conv.")) else f"resnets.{number}"
        name = f"{side}.{blocks}.{level}.{inside}.{rest}"
    name = replace_prefix(name, OUTSIDE)
    for old, new in RESIDUAL.items():
        name = name.replace(f".{old}.", f".{new}.")
    return name


def plain_qwen_21_vae_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return our shape of a tensor: ComfyUI's convolutions have a dimension for a single frame."""
    return (*shape[:2], *shape[3:]) if len(shape) == 5 and shape[2] == 1 else shape


def qwen_21_vae_to_single(tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """Convert a VAE's tensors from diffusers' names and shapes to those of ComfyUI's file."""
    back, out = inverse(OUTSIDE), {}
    for name, tensor in tensors.items():
        is_flat = ".resample." in name or ".attentions." in name
        is_framed = tensor.ndim == 4 and name.endswith("weight") and not is_flat
        side, kind, level, *rest = (*name.split("."), "")
        if kind in ("down_blocks", "up_blocks"):
            old = "downsamples" if kind == "down_blocks" else "upsamples"
            number, inside = rest[1], rest[2:-1]
            if rest[0] != "resnets":  # the sampler follows the resnets
                number, inside = str(list_length(tensors, f"{side}.{kind}.{level}.resnets.")), rest[1:-1]
            name = ".".join((side, old, level, old, number, *inside))
        name = replace_prefix(name, back)
        if kind in ("down_blocks", "up_blocks", "mid_block"):
            for old, new in RESIDUAL.items():
                name = name.replace(f".{new}.", f".{old}.")
        out[name] = tensor[:, :, None] if is_framed else tensor
    return out


def qwen_21_vae_tensors(shapes: Shapes) -> list[str]:
    """Return the tensors of the VAE that an image needs, by diffusers' name."""
    levels = max(list_length(shapes, "encoder.down_blocks."), list_length(shapes, "decoder.up_blocks."))
    starts = ("encoder.down_blocks.0.resnets.", "decoder.up_blocks.0.resnets.")
    down, up = (list_length(shapes, start) for start in starts)
    down = max(down, up - 1)
    paths = [f"encoder.down_blocks.{n}.resnets.{i}" for n in range(levels) for i in range(down)]
    paths += [f"decoder.up_blocks.{n}.resnets.{i}" for n in range(levels) for i in range(down + 1)]
    return expanded(
        *OUTSIDE_OF_LEVELS,
        *(f"{path}.{pattern}" for path in paths for pattern in VIDEO_RESNET),
        *(f"{path}.conv_shortcut.{BOTH}" for path in paths if changes_width(shapes, f"{path}.conv1.weight")),
        *(f"encoder.down_blocks.{n}.downsampler.resample.1.{BOTH}" for n in range(levels - 1)),
        *(f"decoder.up_blocks.{n}.upsampler.resample.1.{BOTH}" for n in range(levels - 1)),
        # These stand between frames and are not run, but the network has them.
        *(f"encoder.down_blocks.{n}.downsampler.time_conv.{BOTH}" for n in range(1, levels - 1)),
        *(f"decoder.up_blocks.{n}.upsampler.time_conv.{BOTH}" for n in range(levels - 2)),
    )
