"""LoRA layer names of Z-Image.

Files are written under `diffusion_model.` with diffusers' paths. ComfyUI (which fuses query, key and value) and
diffusers both load all of them; with kohya's names for these paths ComfyUI loads only the MLP.
"""

import re
from collections.abc import Iterator
from typing import ClassVar

from library.families.shared.lora_names import LoraNames, Shapes, SharedForm, WeightSlice, matrices
from library.families.shared.tensor_names import prefix_of
from library.families.zimage import keys
from library.families.zimage.facts import TRANSFORMER


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
    mergeable: ClassVar[tuple[str, ...]] = (TRANSFORMER,)
    shared: ClassVar[SharedForm] = SharedForm(is_peft=False, has_lokr=True)
    saved: ClassVar[str] = "comfy"
    elsewhere: ClassVar[str] = r"^lora_unet_(layers|noise_refiner|context_refiner)_\d+_attention_(qkv|out)\."

    def canonical(self, path: str) -> tuple[str, int, int]:
        """A path of the original tree or ours -> ours, but for the fused matrix."""
        return keys.canonical(path), 0, 1

    def apart(self, path: str) -> tuple[str, ...]:
        return keys.apart(path)

    def slice_of(self, part: str, path: str, shapes: Shapes) -> WeightSlice | None:
        """The file is the transformer alone, in either layout."""
        if part != "denoiser":
            return None
        prefix = prefix_of(shapes)
        plain = (name.removeprefix(prefix) for name in shapes if name.startswith(prefix))
        name, piece, pieces = keys.sources(plain).get(f"{path}.weight", (f"{path}.weight", 0, 1))
        return WeightSlice(f"{prefix}{name}", piece, pieces)

    def layers(self, shapes: Shapes, convolutions: bool) -> Iterator[tuple[str, str]]:
        """Return attention and MLP of the blocks that see text and image, without refiners and modulation."""
        for path in matrices(shapes, prefix_of(shapes)):
            for own in keys.apart(keys.canonical(path)):
                if re.match(r"layers\.\d+\.(attention|feed_forward)\.", own):
                    yield "denoiser", own


NAMES = ZImageLoraNames()
