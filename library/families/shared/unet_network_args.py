"""`--network_args` of a LoRA in the U-Net of Stable Diffusion: ranks and learning rates by blocks."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from library.config.problems import ConfigError, Problem
from library.config.reading import LARGEST_RANK
from library.config.run_config import RunConfig
from library.config.schema import opt
from library.families.shared.network_args import (
    NO_ADAPTER,
    PLACE,
    SHAPES,
    NetworkArgs,
    NetworkLayer,
    block_factors,
    wrong_argument,
)


def block_dims(count: int) -> Any:
    words = f"rank of each of the {count} blocks; 0 leaves a block out"
    return opt((), words, label="Ranks of the blocks", min=0, ceiling=LARGEST_RANK, advanced=True)


def block_alphas(count: int) -> Any:
    return opt((), f"alpha of each of the {count} blocks", label="Alphas of the blocks", min=0.0, advanced=True)


def down_factors(count: int) -> Any:
    return opt("", f"factors of the learning rate of the {count} input blocks, or {', '.join(SHAPES)}")


def middle_factors(count: int) -> Any:
    several = f"factors of the learning rate of the {count} middle blocks"
    return opt("", several if count > 1 else "factor of the learning rate of the middle block")


def up_factors(count: int) -> Any:
    return opt("", f"factors of the learning rate of the {count} output blocks, or a shape's name")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnetArgs(NetworkArgs):
    """Ranks and learning rates by blocks, as sd-scripts counts them."""

    convolutions: ClassVar[bool] = True
    block_arguments: ClassVar[tuple[str, ...]] = ("down_lr_weight", "mid_lr_weight", "up_lr_weight")
    block_language: ClassVar[str] = "factors"
    group_sizes: ClassVar[tuple[int, int, int]]  # input, middle and output blocks
    outer_blocks: ClassVar[tuple[int, int]] = (0, 0)  # blocks before the input blocks and after the output blocks

    # Each family declares these again, as their texts name the number of its blocks.
    block_dims: tuple[int, ...] = block_dims(1)
    block_alphas: tuple[float, ...] = block_alphas(1)
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
    down_lr_weight: str = down_factors(1)
    mid_lr_weight: str = middle_factors(1)
    up_lr_weight: str = up_factors(1)
    block_lr_zero_threshold: float = opt(
        0.0, "factors up to this count as 0", label="Zero threshold", min=0.0, advanced=True
    )

    @property
    def num_blocks(self) -> int:
        return sum(self.group_sizes) + sum(self.outer_blocks)

    @property
    def _factor_lists(self) -> list[tuple[str, int]]:
        """The lists of factors by group, as texts, each with the number of blocks."""
        return list(zip((getattr(self, name) for name in self.block_arguments), self.group_sizes, strict=True))

    def check(self, _run: RunConfig | None = None) -> Iterator[Problem]:
        """Check the lists that need one value per block."""
        for name in ("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas"):
            if (count := len(getattr(self, name))) not in (0, self.num_blocks):
                yield wrong_argument(
                    name,
                    "needs {num_blocks} values separated by commas, got {given}",
                    num_blocks=self.num_blocks,
                    given=count,
                )
        for name, (text, length) in zip(self.block_arguments, self._factor_lists, strict=True):
            try:
                block_factors(text, length)
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
        if not any(text for text, _ in self._factor_lists):
            return ()
        factors = [f for text, length in self._factor_lists for f in block_factors(text, length)]
        kept = (f if f > self.block_lr_zero_threshold else 0.0 for f in factors)
        first, last = self.outer_blocks
        return (*(1.0,) * first, *kept, *(1.0,) * last)

    def chosen_blocks(self, counts: Sequence[int]) -> list[list[float]]:
        """Return the factors by block; rank or factor 0 means no adapters. Outer blocks have no group."""
        factors = self.block_weights or (1.0,) * self.num_blocks
        learns = self.block_dims or (1,) * self.num_blocks
        trained = [factor if rank else 0.0 for factor, rank in zip(factors, learns, strict=True)]
        starts = itertools.accumulate(self.group_sizes, initial=self.outer_blocks[0])
        return [trained[start : start + count] for start, count in zip(starts, counts, strict=False)]

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
            alpha = 1.0 if self.conv_alpha is None else self.conv_alpha  # float32 in files, as in sd-scripts'
        if layer.part != "denoiser":
            return rank, alpha
        block = self.block_of(layer.name)
        if self.block_weights and not self.block_weights[block]:
            return NO_ADAPTER  # an untrained block is left out of the file
        return ranks[block] if ranks else rank, alphas[block] if alphas else alpha
