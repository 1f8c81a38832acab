"""`--network_args` of SDXL's LoRA (`networks.lora`, `networks.lora_fa`)."""

import re
from dataclasses import dataclass
from typing import ClassVar

from library.families.shared.network_args import LayerPreset
from library.families.shared.unet_network_args import (
    UnetArgs,
    block_alphas,
    block_dims,
    down_factors,
    middle_factors,
    up_factors,
)

# Blocks of the SDXL U-Net as the file format counts them: 0 time and label embedding, 1-9 input, 10-12 middle,
# 13-21 output, 22 out.
DOWN, MID, UP = 9, 3, 9
NUM_BLOCKS = 1 + DOWN + MID + UP + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SdxlArgs(UnetArgs):
    """`networks.lora`: SDXL."""

    group_sizes: ClassVar[tuple[int, int, int]] = (DOWN, MID, UP)
    outer_blocks: ClassVar[tuple[int, int]] = (1, 1)
    presets: ClassVar[tuple[LayerPreset, ...]] = (
        LayerPreset("All blocks", "Every attention block of the U-Net learns.", {}),
        LayerPreset(
            "Content and style",
            "Only the two output blocks that decide over content and style (B-LoRA); a small file for one subject.",
            {"down_lr_weight": "zeros", "mid_lr_weight": "0,0,0", "up_lr_weight": "1,1,0,0,0,0,0,0,0"},
        ),
        LayerPreset(
            "Style only",
            "Only the output block that decides over style; the subject of the images is hardly learned.",
            {"down_lr_weight": "zeros", "mid_lr_weight": "0,0,0", "up_lr_weight": "0,1,0,0,0,0,0,0,0"},
        ),
        LayerPreset(
            "Middle and output blocks",
            "The input blocks stay as they are: composition changes less.",
            {"down_lr_weight": "zeros"},
        ),
    )

    block_dims: tuple[int, ...] = block_dims(NUM_BLOCKS)
    block_alphas: tuple[float, ...] = block_alphas(NUM_BLOCKS)
    down_lr_weight: str = down_factors(DOWN)
    mid_lr_weight: str = middle_factors(MID)
    up_lr_weight: str = up_factors(UP)

    def block_of(self, name: str) -> int:
        return block_number(name)


def block_number(name: str) -> int:
    """Return the number of the block that an adapter's name is in; 0 for the embeddings, 22 for out."""
    match = re.match(r"lora_unet_(input_blocks|middle_block|output_blocks|out)_(\d+)_?", name)
    if not match:
        return 0
    first = {"input_blocks": 1, "middle_block": 1 + DOWN, "output_blocks": 1 + DOWN + MID}
    return first[match[1]] + int(match[2]) if match[1] in first else NUM_BLOCKS - 1
