"""`--network_args` of FLUX.2's LoRA (`networks.lora_flux_2`)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.config.schema import opt
from library.families.shared.network_args import (
    NO_ADAPTER,
    LayerPreset,
    NetworkLayer,
    TransformerArgs,
    indices,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Args(TransformerArgs):
    """`networks.lora_flux_2`."""

    presets: ClassVar[tuple[LayerPreset, ...]] = (
        LayerPreset("All layers", "Attention and MLP of every block learn; the usual choice.", {}),
        LayerPreset(
            "Attention only",
            "Attention of every block; in single blocks it shares its matrices with the MLP.",
            {"network_reg_dims": "_(img|txt)_mlp_=0"},
        ),
        LayerPreset(
            "Image stream only",
            "What double blocks do with the text stays as it is, so that prompts are understood as before.",
            {"network_reg_dims": "_txt_(attn|mlp)_=0"},
        ),
    )
    block_arguments: ClassVar[tuple[str, ...]] = ("train_double_block_indices", "train_single_block_indices")

    train_double_block_indices: str = opt("all", 'double blocks that carry adapters: "all", "none" or "0-3,5"')
    train_single_block_indices: str = opt("all", 'single blocks that carry adapters: "all", "none" or "0-3,5"')

    def check(self, _run: RunConfig | None = None) -> Iterator[Problem]:
        yield from self.unreadable(**dict.fromkeys(self.block_arguments, indices))

    def rank_of(self, layer: NetworkLayer, rank: int, alpha: float) -> tuple[int, float]:
        """Patterns of names come first; then blocks are chosen."""
        own = self.rank_by_name(layer)
        if own is None:
            block = re.search(r"(double|single)_blocks_(\d+)_", layer.name)
            chosen = indices(getattr(self, f"train_{block[1]}_block_indices")) if block else None
            own = 0 if block and chosen is not None and int(block[2]) not in chosen else rank
        return (own, alpha) if own else NO_ADAPTER
