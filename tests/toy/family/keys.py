"""Names of the layers that a LoRA of the toy changes."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from library.families.shared.lora_names import LoraNames, Shapes, WeightSlice, matrices


class ToyLoraNames(LoraNames):
    """One tree of names, behind prefixes in its file."""

    prefixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "kohya": {"denoiser": "lora_unet_", "clip_l": "lora_te1_"},
        "diffusers": {"denoiser": "transformer.", "clip_l": "text_encoder."},
        "comfy": {"denoiser": "diffusion_model.", "clip_l": "text_encoders.clip_l.transformer."},
    }
    trees: ClassVar[tuple[str, ...]] = ("blocks.",)
    version_word: ClassVar[str] = "toy"
    mergeable: ClassVar[tuple[str, ...]] = ("a toy checkpoint",)

    def slice_of(self, part: str, path: str, shapes: Shapes) -> WeightSlice | None:
        """Behind the part's prefix."""
        prefix = {"denoiser": "toy.", "clip_l": "clip_l."}[part]
        return WeightSlice(f"{prefix}{path}.weight")

    def layers(self, shapes: Shapes, convolutions: bool) -> Iterator[tuple[str, str]]:
        yield from (("denoiser", path) for path in matrices(shapes, "toy.") if path.startswith("blocks."))


LORA_NAMES = ToyLoraNames()
