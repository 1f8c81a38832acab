"""Names of the layers that a LoRA of FLUX.1 changes."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from library.config.schema import ConfigError
from library.families.flux import keys
from library.families.flux.variants import CHROMA, FILL, FOLDER, TRANSFORMER
from library.families.shared import weights
from library.families.shared.lora_names import LoraNames, Shapes, WeightSlice, matrices

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS = ("double_blocks.", "single_blocks.")
DIFFUSERS = ("transformer_blocks.", "single_transformer_blocks.")


class FluxLoraNames(LoraNames):
    """A layer of BFL's tree is made of one or several of diffusers'."""

    prefixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "kohya": {"denoiser": "lora_unet_", "clip_l": "lora_te1_", "t5xxl": "lora_te3_"},
        "diffusers": {"denoiser": "transformer.", "clip_l": "text_encoder.", "t5xxl": "text_encoder_2."},
        "comfy": {
            "denoiser": "diffusion_model.",
            "clip_l": "text_encoders.clip_l.transformer.",
            "t5xxl": "text_encoders.t5xxl.transformer.",
        },
    }
    other_prefixes: ClassVar[Mapping[str, str]] = {
        "lora_te_": "clip_l",
        "lora_te2_": "t5xxl",
        "lora_transformer_": "denoiser",
        "base_model.model.": "denoiser",
    }
    trees: ClassVar[tuple[str, ...]] = (*BLOCKS, *DIFFUSERS)
    encoder_names: ClassVar[tuple[str, ...]] = ("lora_te3_",)
    version_word: ClassVar[str] = "flux"
    mergeable: ClassVar[tuple[str, ...]] = tuple(
        found + layout for found in (TRANSFORMER, FILL, CHROMA) for layout in ("", FOLDER)
    )

    def canonical(self, path: str) -> tuple[str, int, int]:
        """A diffusers path -> (BFL path, which of its pieces, of how many). A BFL path is the one piece of itself."""
        for bfl, made_of in keys.OUTSIDE.items():
            if path in made_of:
                return bfl, 0, 1
        if not path.startswith(DIFFUSERS):
            return path, 0, 1
        kind, number, inner = path.split(".", 2)
        double = kind == "transformer_blocks"
        table, blocks = (keys.DOUBLE, "double_blocks") if double else (keys.SINGLE, "single_blocks")
        for bfl, made_of in table.items():
            if inner in made_of:
                return f"{blocks}.{number}.{bfl}", made_of.index(inner), len(made_of)
        raise ConfigError("{path} is no layer of FLUX.1 that can carry a LoRA", path=path)

    def pieces(self, path: str) -> tuple[str, ...]:
        """A BFL path -> the diffusers modules that it is made of, in the order of its rows."""
        if path in keys.OUTSIDE:
            return keys.OUTSIDE[path]
        kind, number, inner = path.split(".", 2)
        table, blocks = {
            "double_blocks": (keys.DOUBLE, "transformer_blocks"),
            "single_blocks": (keys.SINGLE, "single_transformer_blocks"),
        }.get(kind, ({}, ""))
        return tuple(f"{blocks}.{number}.{name}" for name in table.get(inner, ()))

    def has_swapped_halves(self, path: str) -> bool:
        """The last modulation has."""
        return path == keys.SWAPPED

    def tensors_of(self, path: str, shapes: Shapes) -> dict[str, tuple[str, ...]]:
        """A file in the diffusers layout has the rows of fused layers apart."""
        if not keys.is_diffusers(shapes):
            return LoraNames.tensors_of(self, path, shapes)
        try:
            return keys.sources(shapes)
        except KeyError as e:
            raise ConfigError(
                "{path} is not a complete FLUX.1 transformer, {missing} is missing", path=path, missing=e.args[0]
            ) from e

    def joined(self, name: str, rows: "list[Tensor]") -> "Tensor":
        """The diffusers tensors of one BFL name -> its tensor."""
        return keys.joined(name, rows)

    def slice_of(self, part: str, path: str, shapes: Shapes) -> WeightSlice | None:
        """The file is the transformer alone."""
        return WeightSlice(f"{weights.prefix_of(shapes)}{path}.weight") if part == "denoiser" else None

    def layers(self, shapes: Shapes, convolutions: bool) -> Iterator[tuple[str, str]]:
        """Attention, MLP and modulation of all blocks."""
        for path in matrices(shapes, weights.prefix_of(shapes)):
            if path.startswith(BLOCKS):
                yield "denoiser", path


NAMES = FluxLoraNames()
