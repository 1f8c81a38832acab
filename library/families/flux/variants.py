"""Variants of FLUX.1 that `model_type` selects, and how they differ. Needs no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from library.config.run_config import ControlUse
from library.families.facts import Variant

DEV = {"sample_steps": 20, "scale": 1.0, "guidance_scale": 3.5}


@dataclass(frozen=True, kw_only=True)
class FluxVariant(Variant):
    """One variant. Variants with the same header are distinguished by the option or the file's name."""

    description: str  # by `recognise`
    transformer: str  # its description with the usual file name
    files: tuple[str, ...]  # patterns of its file name, for folders with several models
    tokenizer: str = "tokenizer_2"  # the folder of T5's tokenizer in a diffusers model
    text_encoder: str = "text_encoder_2"  # the folder of T5
    encoders: tuple[str, ...] = ("clip_l", "t5xxl")
    inputs: int = 1  # input channels as a multiple of output channels
    musubi: tuple[str, str] | None = None  # short and full name in musubi-tuner's caches, whose format it then uses
    guided: bool = True  # whether guidance_scale can have an effect
    padding_seen: int = 0  # padding tokens that stay visible when T5's mask is applied
    used: tuple[float, float] = (0.333, 0.8)  # share of a double and a single block's weights applied to each token
    base_model_version: str = "flux1"
    architecture: str = ""  # dev or schnell, as the header says
    sample_defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType(DEV))


UNDISTILLED = r"openflux|libre|de-?distill"  # made from schnell, with its header
FLEX = r"flex[._-]?1"  # recognised by name, as its header equals dev's
FILL, DEPTH = "a FLUX.1 Fill transformer", "a FLUX.1 Depth or Canny transformer"
# Variants share blocks, files, caches and LoRA names; a folder for each would repeat all of it.
# Why: docs/decisions/2026-11-22-variants-share-a-folder.md
TRANSFORMER, CHROMA, RADIANCE = "a FLUX.1 transformer", "a Chroma transformer", "a Chroma Radiance transformer"
IN_DIFFUSERS_LAYOUT = " in the diffusers layout"
IN_FOLDER = (  # written out, as they are entries of the translations
    "a FLUX.1 transformer in the diffusers layout",
    "a FLUX.1 Fill transformer in the diffusers layout",
    "a Chroma transformer in the diffusers layout",
)
FLUX_VARIANTS = {
    "flux": FluxVariant(
        title="FLUX.1",
        description=TRANSFORMER,
        transformer="a FLUX.1 transformer (flux1-dev.safetensors, or a diffusers folder)",
        files=("flux1*.safetensors",),
    ),
    "krea": FluxVariant(
        title="FLUX.1 Krea",
        description=TRANSFORMER,
        transformer="a FLUX.1 transformer (flux1-krea-dev.safetensors, or a diffusers folder)",
        files=("flux1*.safetensors",),
        sample_defaults=DEV | {"sample_steps": 28, "guidance_scale": 4.5},
    ),
    "kontext": FluxVariant(
        title="FLUX.1 Kontext",
        description=TRANSFORMER,
        transformer="a FLUX.1 Kontext transformer (flux1-kontext-dev.safetensors, or a diffusers folder)",
        files=("flux1*.safetensors",),
        control_images=ControlUse(least=1, most=8),
        musubi=("fk", "flux_kontext"),
        base_model_version="flux_kontext",
        sample_defaults=DEV | {"sample_steps": 28, "guidance_scale": 2.5},
    ),
    "fill": FluxVariant(
        title="FLUX.1 Fill",
        description=FILL,
        transformer="a FLUX.1 Fill transformer (flux1-fill-dev.safetensors, or a diffusers folder)",
        files=("flux1*.safetensors",),
        inputs=6,  # noise, the image outside the mask, and 4 times as many channels of the mask
        control_images=ControlUse(inpaints=True),
        base_model_version="flux_fill",
        sample_defaults=DEV | {"sample_steps": 50, "guidance_scale": 30.0},
    ),
    "chroma": FluxVariant(
        title="Chroma",
        description=CHROMA,
        transformer="a Chroma transformer (Chroma1-HD.safetensors, or a diffusers folder)",
        files=("[Cc]hroma*.safetensors",),
        tokenizer="tokenizer",
        text_encoder="text_encoder",
        encoders=("t5xxl",),
        guided=False,
        padding_seen=1,
        used=(0.5, 1.0),
        base_model_version="chroma",
        architecture="chroma",
        sample_defaults={"sample_steps": 25, "scale": 4.0, "guidance_scale": 0.0},
    ),
}


def options_naming(test: Callable[[FluxVariant], bool]) -> dict[str, tuple[str, ...]]:
    return {"model_type": tuple(name for name, variant in FLUX_VARIANTS.items() if test(variant))}


def choose_variant(model_type: str, model: str | Path | None, title: str = "") -> FluxVariant:
    """Return the variant of a run."""
    # Krea is dev with other weights, so its name in the path or in the file's title is enough: only defaults depend on
    # it.
    if model_type == "flux" and "krea" in f"{model} {title}".lower():
        return FLUX_VARIANTS["krea"]
    return FLUX_VARIANTS[model_type]
