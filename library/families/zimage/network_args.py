"""`--network_args` of Z-Image's LoRA (`networks.lora_zimage`)."""

import re
from dataclasses import dataclass
from typing import ClassVar

from library.config.schema import opt
from library.families.shared.network_args import NO_ADAPTER, BlockArgs, LayerPreset, NetworkLayer, regexes


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageArgs(BlockArgs):
    """`networks.lora_zimage`."""

    presets: ClassVar[tuple[LayerPreset, ...]] = (
        LayerPreset("Attention and MLP", "Attention and MLP of every block learn; the usual choice.", {}),
        LayerPreset("Attention only", "Attention of every block: a smaller file.", {"network_reg_dims": "_feed_=0"}),
    )
    train_refiners: bool = opt(
        False,
        "adapters on the blocks that see the image or the text alone, before they meet",
        label="Refiners learn as well",
    )
    train_modulation: bool = opt(
        False,
        "adapters on the layers that modulate each block by the timestep",
        label="Timestep modulation learns as well",
    )

    def rank_of(self, layer: NetworkLayer, rank: int, alpha: float) -> tuple[int, float]:
        """Patterns of names come first; then blocks are chosen, and refiners and modulation by their switches."""
        own = self.rank_in_block(layer, re.match(r"layers\.(\d+)\.", layer.path))
        if own is None:
            usual = self.train_modulation or "_modulation." not in layer.path
            usual = usual and (self.train_refiners or "_refiner." not in layer.path)
            included = any(re.fullmatch(one, layer.path) for one in regexes(self.include_patterns))
            own = rank if usual or included else 0
        return (own, alpha) if own else NO_ADAPTER
