"""`--network_args` of Qwen-Image's LoRA (`networks.lora_qwen_image`)."""

import re
from dataclasses import dataclass
from typing import ClassVar

from library.config.schema import opt
from library.families.shared.network_args import NO_ADAPTER, BlockArgs, LayerPreset, NetworkLayer


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenArgs(BlockArgs):
    """`networks.lora_qwen_image`."""

    presets: ClassVar[tuple[LayerPreset, ...]] = (
        LayerPreset("Attention and MLP", "Attention and MLP of every block learn; the usual choice.", {}),
        LayerPreset("Attention only", "Attention of every block: a smaller file.", {"network_reg_dims": "_mlp_=0"}),
        LayerPreset(
            "Image stream only",
            "What the blocks do with the text stays as it is, so that prompts are understood as before.",
            {"network_reg_dims": "_(txt_mlp|add_[kqv]_proj|to_add_out)=0"},
        ),
    )
    train_modulation: bool = opt(
        False,
        "adapters on the modulation as well, as files of musubi-tuner have them",
        label="Modulation learns as well",
    )

    def rank_of(self, layer: NetworkLayer, rank: int, alpha: float) -> tuple[int, float]:
        """Patterns of names come first; then blocks are chosen, and the modulation by its switch."""
        own = self.rank_in_block(layer, re.search(r"_blocks_(\d+)_", layer.name))
        if own is None:
            own = 0 if "_mod_" in layer.name and not self.train_modulation else rank
        return (own, alpha) if own else NO_ADAPTER
