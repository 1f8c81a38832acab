"""Names of the layers that a LoRA of Z-Image changes.

Files are written under `diffusion_model.` with diffusers' paths: ComfyUI, whose own matrix of query, key and value is
one, and diffusers both load all of them. Of kohya's names for these paths ComfyUI loads the MLP alone.
"""

import re
from collections.abc import Iterator
from typing import ClassVar

from library.families.shared.lora_names import LoraNames, Shapes, SharedForm, WeightSlice, matrices
from library.families.shared.tensor_names import denoiser_prefix
from library.families.zimage import keys
from library.families.zimage.facts import ZIMAGE_TRANSFORMER


class ZImageLoraNames(LoraNames):
    """diffusers' tree; files of the original tree are read, too."""

    trees: ClassVar[tuple[str, ...]] = ("layers.", "noise_refiner.", "context_refiner.")
    version_word: ClassVar[str] = "z_image"
    words: ClassVar[tuple[str, ...]] = (
        "all_x_embedder",
        "all_final_layer",
        "noise_refiner",
        "context_refiner",
        "cap_embedder",
        "t_embedder",
        "feed_forward",
    )
    mergeable: ClassVar[tuple[str, ...]] = (ZIMAGE_TRANSFORMER,)
    shared: ClassVar[SharedForm] = SharedForm(is_peft=False, has_lokr=True)
    saved: ClassVar[str] = "comfy"
    elsewhere: ClassVar[str] = r"^lora_unet_(layers|noise_refiner|context_refiner)_\d+_attention_(qkv|out)\."

    def canonical(self, path: str) -> tuple[str, int, int]:
        """A path of the original tree or ours -> ours, but for the fused matrix."""
        return keys.canonical_zimage_path(path), 0, 1

    def apart(self, path: str) -> tuple[str, ...]:
        """Query, key and value of the fused matrix."""
        return keys.split_path(path)

    def slice_of(self, part: str, path: str, shapes: Shapes) -> WeightSlice | None:
        """The file is the transformer alone, in either layout."""
        if part != "denoiser":
            return None
        prefix = denoiser_prefix(shapes)
        plain = (name.removeprefix(prefix) for name in shapes if name.startswith(prefix))
        name, piece, pieces = keys.zimage_sources(plain).get(f"{path}.weight", (f"{path}.weight", 0, 1))
        return WeightSlice(f"{prefix}{name}", piece, pieces)

    def layers(self, shapes: Shapes, convolutions: bool) -> Iterator[tuple[str, str]]:
        """Attention and MLP of the blocks that see text and image; refiners and modulation are left as they are."""
        for path in matrices(shapes, denoiser_prefix(shapes)):
            for own in keys.split_path(keys.canonical_zimage_path(path)):
                if re.match(r"layers\.\d+\.(attention|feed_forward)\.", own):
                    yield "denoiser", own


NAMES = ZImageLoraNames()
