"""Variants of a family's model that an option selects. Needs no torch."""

from dataclasses import dataclass
from typing import Self

from library.config.run_config import ControlUse


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What every family states of a relative; its own class says where it differs besides."""

    title: str  # what people call it
    control_images: ControlUse = ControlUse()  # what pictures it is shown besides noise and words
    base_model_version: str  # ss_base_model_version
    architecture: str  # modelspec.architecture; "" where the header tells

    def __deepcopy__(self, known: object) -> Self:
        """Itself, as copies of a family that measure with it need no other."""
        return self
