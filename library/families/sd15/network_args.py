"""`--network_args` of SD 1.5's LoRA (`networks.lora`, `networks.lora_fa`)."""

from dataclasses import dataclass
from typing import ClassVar

from library.families.facts import block_of_adapter
from library.families.sd15.facts import FACTS
from library.families.shared.network_args import LayerPreset
from library.families.shared.unet_network_args import (
    UnetArgs,
    block_alphas,
    block_dims,
    down_factors,
    middle_factors,
    up_factors,
)

# Blocks of the U-Net as sd-scripts counts them: 0-11 input, 12 middle, 13-24 output.
DOWN, MID, UP = (group.count for group in FACTS.blocks)
NUM_BLOCKS = DOWN + MID + UP


@dataclass(frozen=True, kw_only=True, slots=True)
class Sd15Args(UnetArgs):
    """`networks.lora`: SD 1.5."""

    group_sizes: ClassVar[tuple[int, int, int]] = (DOWN, MID, UP)
    presets: ClassVar[tuple[LayerPreset, ...]] = (
        LayerPreset("All blocks", "Every attention block of the U-Net learns.", {}),
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
        """Return the number of the block that an adapter's name is in; 0 outside of blocks."""
        group, number = block_of_adapter(name, FACTS.blocks) or (0, 0)
        return (0, DOWN, DOWN + MID)[group] + number
