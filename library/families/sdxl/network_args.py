"""`--network_args` of SDXL's LoRA (`networks.lora`, `networks.lora_fa`)."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.config.schema import opt
from library.families.shared.network_args import (
    LARGEST_RANK,
    NO_ADAPTER,
    PLACE,
    SHAPES,
    LayerPreset,
    NetworkArgs,
    NetworkLayer,
    block_factors,
    wrong_argument,
)

# Blocks of the SDXL U-Net as the file format counts them: 0 time and label embedding, 1-9 input, 10-12 middle,
# 13-21 output, 22 out.
DOWN, MID, UP = 9, 3, 9
NUM_BLOCKS = 1 + DOWN + MID + UP + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SdxlArgs(NetworkArgs):
    """`networks.lora`: SDXL."""

    convolutions: ClassVar[bool] = True
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
    block_arguments: ClassVar[tuple[str, ...]] = ("down_lr_weight", "mid_lr_weight", "up_lr_weight")
    block_language: ClassVar[str] = "factors"

    block_dims: tuple[int, ...] = opt(
        (),
        f"rank of each of the {NUM_BLOCKS} blocks; 0 leaves a block out",
        label="Ranks of the blocks",
        min=0,
        ceiling=LARGEST_RANK,
        advanced=True,
    )
    block_alphas: tuple[float, ...] = opt(
        (), f"alpha of each of the {NUM_BLOCKS} blocks", label="Alphas of the blocks", min=0.0, advanced=True
    )
    conv_block_dims: tuple[int, ...] = opt(
        (),
        "rank of each block's 3x3 convolutions",
        label="Convolution ranks of the blocks",
        min=0,
        ceiling=LARGEST_RANK,
        advanced=True,
    )
    conv_block_alphas: tuple[float, ...] = opt(
        (), "alpha of each block's 3x3 convolutions", label="Convolution alphas of the blocks", min=0.0, advanced=True
    )
    down_lr_weight: str = opt("", f"factors of the learning rate of the {DOWN} input blocks, or {', '.join(SHAPES)}")
    mid_lr_weight: str = opt("", f"factors of the learning rate of the {MID} middle blocks")
    up_lr_weight: str = opt("", f"factors of the learning rate of the {UP} output blocks, or a shape's name")
    block_lr_zero_threshold: float = opt(
        0.0, "factors up to this count as 0", label="Zero threshold", min=0.0, advanced=True
    )

    def check(self, _run: RunConfig | None = None) -> Iterator[Problem]:
        """Check the lists that need one value per block."""
        for name in ("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas"):
            if (count := len(getattr(self, name))) not in (0, NUM_BLOCKS):
                yield wrong_argument(
                    name,
                    "needs {num_blocks} values separated by commas, got {given}",
                    num_blocks=NUM_BLOCKS,
                    given=count,
                )
        for name, length in (("down_lr_weight", DOWN), ("mid_lr_weight", MID), ("up_lr_weight", UP)):
            try:
                block_factors(getattr(self, name), length)
            except ConfigError as e:
                yield from (problem.replaced(option=name, place=PLACE, topic="training") for problem in e.problems)
        if self.conv_block_alphas and not (self.conv_block_dims or self.conv_dim):
            yield wrong_argument("conv_block_alphas", "needs conv_block_dims or conv_dim")

    def notes(self, _run: RunConfig | None = None) -> Iterator[Problem]:
        """Return arguments without effect, and why."""
        yield from NetworkArgs.notes(self)
        if self.block_lr_zero_threshold and not self.block_weights:
            yield Problem(
                "network_args",
                "block_lr_zero_threshold has no effect without down_lr_weight, mid_lr_weight or up_lr_weight",
            )

    @property
    def block_weights(self) -> tuple[float, ...]:
        """The factor of each block's learning rate, or () if none was given."""
        if not (self.down_lr_weight or self.mid_lr_weight or self.up_lr_weight):
            return ()
        lists = zip((self.down_lr_weight, self.mid_lr_weight, self.up_lr_weight), (DOWN, MID, UP), strict=True)
        factors = [f for text, length in lists for f in block_factors(text, length)]
        return (1.0, *(f if f > self.block_lr_zero_threshold else 0.0 for f in factors), 1.0)

    def chosen_blocks(self, counts: Sequence[int]) -> list[list[float]]:
        """Return the factors by block; rank or factor 0 means no adapters. The first and last blocks have no group."""
        factors = self.block_weights or (1.0,) * NUM_BLOCKS
        learns = self.block_dims or (1,) * NUM_BLOCKS
        trained = iter([factor if rank else 0.0 for factor, rank in zip(factors, learns, strict=True)][1:-1])
        return [[next(trained) for _ in range(count)] for count in counts]

    def classes(self, targets: tuple[str, ...]) -> tuple[str, ...]:
        adapts_convolutions = self.conv_dim is not None or self.conv_block_dims
        return NetworkArgs.classes(self, targets) if adapts_convolutions else targets

    def rank_of(self, layer: NetworkLayer, rank: int, alpha: float) -> tuple[int, float]:
        """Return a layer's rank; U-Net blocks may have their own, and convolutions another."""
        if not layer.inside:
            return NO_ADAPTER
        ranks, alphas = self.block_dims, self.block_alphas
        if layer.is_large_conv:
            ranks, alphas, rank = self.conv_block_dims, self.conv_block_alphas, self.conv_dim or 0
            alpha = 1 if self.conv_alpha is None else self.conv_alpha
        if layer.part != "denoiser":
            return rank, alpha
        block = self.block_of(layer.name)
        if self.block_weights and not self.block_weights[block]:
            return NO_ADAPTER  # an untrained block is left out of the file
        return ranks[block] if ranks else rank, alphas[block] if alphas else alpha

    def block_of(self, name: str) -> int:
        return block_number(name)


def block_number(name: str) -> int:
    """Return the number of the block that an adapter's name is in; 0 for the embeddings, 22 for out."""
    match = re.match(r"lora_unet_(input_blocks|middle_block|output_blocks|out)_(\d+)_?", name)
    if not match:
        return 0
    first = {"input_blocks": 1, "middle_block": 1 + DOWN, "output_blocks": 1 + DOWN + MID}
    return first[match[1]] + int(match[2]) if match[1] in first else NUM_BLOCKS - 1
