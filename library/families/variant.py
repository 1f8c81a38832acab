"""Variants of a family's model that an option selects. Needs no torch."""

from dataclasses import dataclass
from typing import Self

from library.config.run_config import ControlUse


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Common properties of a variant; subclasses of families add others."""

    title: str  # what people call it
    control_images: ControlUse = ControlUse()  # control or reference images that it reads
    base_model_version: str  # ss_base_model_version
    architecture: str  # modelspec.architecture; "" where it is in the header

    def __deepcopy__(self, memo: object) -> Self:
        # Immutable, so copies of a family can share it.
        return self
