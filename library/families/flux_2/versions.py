"""The models of FLUX.2 that `model_version` selects, and their differences. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from library.families.facts import Variant

BASE_DEFAULTS = {"negative_prompt": " ", "width": 1024, "height": 1024, "sample_steps": 50, "scale": 4.0}
DISTILLED_DEFAULTS = BASE_DEFAULTS | {"sample_steps": 4, "scale": 1.0}
DEV_DEFAULTS = BASE_DEFAULTS | {"negative_prompt": "", "scale": 1.0, "guidance_scale": 4.0}


@dataclass(frozen=True, kw_only=True)
class Flux2Version(Variant):
    """A published model. Distilled kleins share their header with their base models."""

    short: str  # musubi-tuner's short name, in names of caches
    hidden: int  # width of the published transformer
    distilled: bool = False
    guided: bool = False  # whether it has an embedding of the guidance
    sample_defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType(BASE_DEFAULTS))


KLEIN_4B: dict[str, Any] = {
    "short": "f2k4b",
    "hidden": 3072,
    "base_model_version": "flux_2_klein_4b",
    "architecture": "Flux.2-klein-4b",
}
KLEIN_9B: dict[str, Any] = {
    "short": "f2k9b",
    "hidden": 4096,
    "base_model_version": "flux_2_klein_9b",
    "architecture": "Flux.2-klein-9b",
}
DISTILLED_FACTS: dict[str, Any] = {"distilled": True, "sample_defaults": MappingProxyType(DISTILLED_DEFAULTS)}
VERSIONS = {
    "klein-base-4b": Flux2Version(title="FLUX.2 klein base 4B", **KLEIN_4B),
    "klein-base-9b": Flux2Version(title="FLUX.2 klein base 9B", **KLEIN_9B),
    "klein-4b": Flux2Version(title="FLUX.2 klein 4B", **KLEIN_4B, **DISTILLED_FACTS),
    "klein-9b": Flux2Version(title="FLUX.2 klein 9B", **KLEIN_9B, **DISTILLED_FACTS),
    "dev": Flux2Version(
        title="FLUX.2 dev",
        short="f2d",
        base_model_version="flux_2_dev",
        architecture="Flux.2-dev",
        hidden=6144,
        guided=True,
        sample_defaults=MappingProxyType(DEV_DEFAULTS),
    ),
}


def model_in_header(hidden: int, guided: bool) -> str:
    """Return the model that a header belongs to; for a distilled klein, which has the same header, its base model."""
    if guided:
        return "dev"
    return "klein-base-9b" if hidden >= VERSIONS["klein-base-9b"].hidden else "klein-base-4b"


def may_be_version(version: str, hidden: int, guided: bool) -> bool:
    """Return whether a header may belong to a version. Unpublished widths match any."""
    published = {model.hidden for model in VERSIONS.values()}
    return VERSIONS[version].guided == guided and (VERSIONS[version].hidden == hidden or hidden not in published)
