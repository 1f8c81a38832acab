"""What `--network_args` may say to Qwen-Image's LoRA (`networks.lora_qwen_image`)."""

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
    PatternArgs,
    indices,
    patterns,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenArgs(PatternArgs):
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
    block_arguments: ClassVar[tuple[str, ...]] = ("train_block_indices",)

    train_modulation: bool = opt(
        False,
        "adapters on the modulation as well, as files of musubi-tuner have them",
        label="Modulation learns as well",
    )
    train_block_indices: str = opt("all", 'blocks that carry adapters: "all", "none" or "0-3,5"')
    verbose: bool = opt(False, "log every adapter", advanced=True)

    def check(self, _run: RunConfig | None = None) -> Iterator[Problem]:
        """The texts that are small languages of their own."""
        yield from self.unreadable(train_block_indices=indices)

    def notes(self, _run: RunConfig | None = None) -> Iterator[Problem]:
        """What has no effect, and why."""
        for name in ("conv_dim", "conv_alpha"):
            if getattr(self, name) is not None:
                yield Problem("network_args", "{name} has no effect: its blocks have no convolutions", name=name)

    def classes(self, targets: tuple[str, ...]) -> tuple[str, ...]:
        """Its blocks; there are no convolutions."""
        return targets

    def rank_of(self, layer: NetworkLayer, rank: int, alpha: float) -> tuple[int, float]:
        """Patterns of names come first; then blocks are chosen, and the modulation by its switch."""
        if not layer.inside or self.is_excluded(layer):
            return NO_ADAPTER
        for pattern, own in patterns(self.network_reg_dims, int):
            if re.search(pattern, layer.name):
                return own, alpha
        block = re.search(r"_blocks_(\d+)_", layer.name)
        chosen = indices(self.train_block_indices)
        if block and chosen is not None and int(block[1]) not in chosen:
            return NO_ADAPTER
        if "_mod_" in layer.name and not self.train_modulation:
            return NO_ADAPTER
        return rank, alpha
