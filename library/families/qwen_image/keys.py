"""LoRA layer names of Qwen-Image; its files use diffusers' own."""

from typing import ClassVar

from library.families.qwen_image.variants import EDIT_2511, TRANSFORMER
from library.families.shared.lora_names import LoraNames


class QwenLoraNames(LoraNames):
    """One tree of names in every layout, with or without a prefix."""

    trees: ClassVar[tuple[str, ...]] = ("transformer_blocks.",)
    # FLUX.1 and others in diffusers share the tree and the names in attention; they have at most 32 blocks there.
    marks: ClassVar[str] = r"\.(?:img|txt)_(?:mlp\.net|mod\.1)|^transformer_blocks\.(?:3[2-9]|[4-9]\d)\."
    version_word: ClassVar[str] = "qwen_image"
    adapted: ClassVar[str] = r"transformer_blocks\.(?!.*_mod\.)"  # the modulation's input is only the timestep
    mergeable: ClassVar[tuple[str, ...]] = (TRANSFORMER, EDIT_2511)


LORA_NAMES = QwenLoraNames()
