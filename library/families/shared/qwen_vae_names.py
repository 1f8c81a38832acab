"""Tensor names of Qwen-Image's VAE, which other families share, in the layouts of its files."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from library.families.shared.tensor_names import after_prefix, inverse, replace_prefix

if TYPE_CHECKING:
    from torch import Tensor

DIFFUSERS_MARK, SINGLE_MARK = "decoder.conv_in.weight", "decoder.conv1.weight"  # in each layout
QWEN_VAE_PREFIXES = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")  # prefixes of its tensor names
SINGLE_PARTS = ("encoder.", "decoder.", "conv1.", "conv2.")

# Single file (Wan 2.1) -> diffusers, inside a residual block and inside an attention of the VAE.
RESIDUAL = {
    "residual.0": "norm1",
    "residual.2": "conv1",
    "residual.3": "norm2",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}
ENDS = {"conv1": "conv_in", "head.0": "norm_out", "head.2": "conv_out"}
MIDDLE = ("mid_block.resnets.0", "mid_block.attentions.0", "mid_block.resnets.1")
# Single file -> diffusers, outside of the levels.
OUTSIDE = {
    "conv1": "quant_conv",
    "conv2": "post_quant_conv",
    **{f"{side}.{old}": f"{side}.{new}" for side in ("encoder", "decoder") for old, new in ENDS.items()},
    **{f"{side}.middle.{n}": f"{side}.{new}" for side in ("encoder", "decoder") for n, new in enumerate(MIDDLE)},
}


def plain_qwen_vae_names(names: Iterable[str]) -> dict[str, str]:
    """Keys of a VAE's file in either layout, with any prefix -> {diffusers' key: key in the file}. Skips other keys."""
    names = list(names)
    unprefixed = after_prefix(names, (DIFFUSERS_MARK, SINGLE_MARK))
    if not any(name.endswith(SINGLE_MARK) for name in names):
        return {name: key for name, key in unprefixed.items() if name.startswith(QWEN_VAE_PREFIXES)}
    return {new: unprefixed[name] for new, name in _from_single(unprefixed).items()}


def _from_single(names: Iterable[str]) -> dict[str, str]:
    """Keys of a single file without prefix -> {diffusers' key: key}."""
    names = [name for name in names if name.startswith(SINGLE_PARTS)]
    renames = dict(OUTSIDE)
    # Resnets of a level, and the resizing layer after them; the encoder has one resnet fewer.
    samplers = sorted(
        {int(name.split(".")[2]) for name in names if name.startswith("decoder.upsamples.") and ".resample." in name}
    )
    per_level = samplers[0] + 1 if samplers else 4
    for name in names:
        side, kind, number, *_ = (*name.split("."), "", "", "")
        if kind == "downsamples":
            renames[f"{side}.{kind}.{number}"] = f"{side}.down_blocks.{number}"
        elif kind == "upsamples":
            level, place = divmod(int(number), per_level)
            module = "upsamplers.0" if int(number) in samplers else f"resnets.{place}"
            renames[f"{side}.{kind}.{number}"] = f"{side}.up_blocks.{level}.{module}"
    file_names = {}
    for name in names:
        new = replace_prefix(name, renames)
        for old, plain in RESIDUAL.items():
            new = new.replace(f".{old}.", f".{plain}.")
        file_names[new] = name
    return file_names


def qwen_vae_to_single(tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """Convert a VAE's tensors from diffusers' names to those of the single file."""
    resnets = {int(name.split(".")[4]) for name in tensors if ".up_blocks.0.resnets." in name}
    per_level, back, out = len(resnets) + 1, inverse(OUTSIDE), {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[1] == "down_blocks":
            name = ".".join([parts[0], "downsamples", *parts[2:]])
        elif parts[1] == "up_blocks":
            place = int(parts[4]) if parts[3] == "resnets" else per_level - 1
            name = ".".join([parts[0], "upsamples", str(per_level * int(parts[2]) + place), *parts[5:]])
        for old, new in RESIDUAL.items():
            name = name.replace(f".{new}.", f".{old}.")
        out[replace_prefix(name, back)] = tensor
    return out
