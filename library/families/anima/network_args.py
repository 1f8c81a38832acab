"""What `--network_args` may say to Anima's LoRA (`networks.lora_anima`)."""

import re
from dataclasses import dataclass
from typing import ClassVar

from library.config.schema import opt
from library.families.shared.network_args import NO_ADAPTER, BlockArgs, LayerPreset, NetworkLayer, regexes

EXCLUDED = re.compile(r".*(_modulation|_norm|_embedder|final_layer).*")  # unless a pattern includes them
ADAPTER_PREFIX = "llm_adapter."


@dataclass(frozen=True, kw_only=True, slots=True)
class AnimaArgs(BlockArgs):
    """`networks.lora_anima`."""

    presets: ClassVar[tuple[LayerPreset, ...]] = (
        LayerPreset("Attention and MLP", "Attention and MLP of every block learn; the usual choice.", {}),
        LayerPreset(
            "Attention only", "Attention of every block: a smaller file.", {"network_reg_dims": r".*\.mlp\..*=0"}
        ),
    )
    matches_paths: ClassVar[bool] = True
    train_llm_adapter: bool = opt(False, "adapters on the text adapter as well", label="Text adapter learns as well")

    def rank_of(self, layer: NetworkLayer, rank: int, alpha: float) -> tuple[int, float]:
        """Patterns come first, what a pattern includes before what is left out by default; then blocks are chosen, and
        the text adapter by its switch."""
        inside = layer.part == "denoiser"
        usual = not EXCLUDED.fullmatch(layer.path) and (
            self.train_llm_adapter or not layer.path.startswith(ADAPTER_PREFIX)
        )
        included = any(re.fullmatch(one, layer.path) for one in regexes(self.include_patterns))
        if inside and not usual and not included:
            return NO_ADAPTER
        own = self.rank_in_block(layer, re.match(r"blocks\.(\d+)\.", layer.path) if inside else None)
        own = rank if own is None else own
        return (own, alpha) if own else NO_ADAPTER
