"""Names of the U-Net of Stable Diffusion: one table from diffusers' module paths to the single file's, used in both
directions.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

BLOCK_PREFIXES = ("input_blocks.", "middle_block.", "output_blocks.")
DIFFUSERS_BLOCKS = ("down_blocks.", "mid_block.", "up_blocks.")
DIFFUSERS = (*DIFFUSERS_BLOCKS, "conv_in", "conv_out", "time_embedding.", "add_embedding.")
TRANSFORMER_NAME = re.compile(r"(input_blocks\.\d+|middle_block|output_blocks\.\d+)\.1\.(proj_|transformer_blocks\.)")
LARGE_CONVOLUTION = re.compile(r"\.(in_layers\.2|out_layers\.3|op|conv)$|^input_blocks\.0\.0$|^out\.2$")
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


def count_unet_blocks(names: Iterable[str]) -> dict[str, int]:
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
