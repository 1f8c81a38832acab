"""Relatives of FLUX.1 that `model_type` names: what each one is, and where it differs. No torch in here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

DEV = {"sample_steps": 20, "scale": 1.0, "guidance_scale": 3.5}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One relative. Those that share a header with another can only be told by the option or the file's name."""

    title: str  # what people call it
    found: str  # what `recognise` calls its transformer
    file: str  # a file that people have
    encoders: tuple[str, ...] = ("clip_l", "t5xxl")
    inputs: int = 1  # channels that the transformer reads, as a multiple of those that it answers with
    base_model_version: str = "flux1"  # ss_base_model_version
    architecture: str = ""  # modelspec.architecture; "": dev or schnell, as the header says
    sample_defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType(DEV))

    @property
    def transformer(self) -> str:
        """Its transformer in words that fit into a sentence."""
        return f"{self.found} ({self.file}, or a diffusers folder)"


TRANSFORMER, CHROMA = "a FLUX.1 transformer", "a Chroma transformer"
VARIANTS = {
    "flux": Variant(title="FLUX.1", found=TRANSFORMER, file="flux1-dev.safetensors"),
    "krea": Variant(
        title="FLUX.1 Krea",
        found=TRANSFORMER,
        file="flux1-krea-dev.safetensors",
        sample_defaults=DEV | {"sample_steps": 28, "guidance_scale": 4.5},
    ),
    "chroma": Variant(
        title="Chroma",
        found=CHROMA,
        file="Chroma1-HD.safetensors",
        encoders=("t5xxl",),
        base_model_version="chroma",
        architecture="chroma",
        sample_defaults={"sample_steps": 25, "scale": 4.0, "guidance_scale": 0.0},
    ),
}


def chosen(model_type: str, model: str | Path | None, title: str = "") -> Variant:
    """The variant of a run. Krea is dev with other weights, so that its name is enough, in the path or the file's own
    `title`; nothing that is computed in training depends on it."""
    if model_type == "flux" and "krea" in f"{model} {title}".lower():
        return VARIANTS["krea"]
    return VARIANTS[model_type]
