"""LoRA layer names of Qwen-Image; its files use diffusers' own."""

from collections.abc import Iterator
from typing import ClassVar

from library.families.qwen_image.variants import EDIT_2511, TRANSFORMER
from library.families.shared.lora_names import LoraNames, Shapes, matrices
from library.families.shared.tensor_names import denoiser_prefix


class QwenLoraNames(LoraNames):
    """One tree of names in every layout, with or without a prefix."""

    trees: ClassVar[tuple[str, ...]] = ("transformer_blocks.",)
    # FLUX.1 and others in diffusers share the tree and the names in attention; they have at most 32 blocks there.
    marks: ClassVar[str] = r"\.(?:img|txt)_(?:mlp\.net|mod\.1)|^transformer_blocks\.(?:3[2-9]|[4-9]\d)\."
    version_word: ClassVar[str] = "qwen_image"
    mergeable: ClassVar[tuple[str, ...]] = (TRANSFORMER, EDIT_2511)

    def layers(self, shapes: Shapes, convolutions: bool) -> Iterator[tuple[str, str]]:
        """Yield attention and MLP of all blocks, but not the modulation, whose input is only the timestep."""
        for path in matrices(shapes, denoiser_prefix(shapes)):
            if path.startswith(self.trees) and "_mod." not in path:
                yield "denoiser", path


LORA_NAMES = QwenLoraNames()
