"""A LoRA that is part of a model only while sample images are generated."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from library.families.base import Family, ModelComponents
from library.methods.applied import AppliedLoras
from library.methods.lora_files import file_of


class SampleLora:
    """The files of `sample_lora`, read once and kept in host memory."""

    def __init__(self, strengths: Mapping[Path, float], family: Family) -> None:
        """Raises ConfigError for a file that is missing or no adapter of this family."""
        self._strengths, self._family = dict(strengths), family
        self._tensors = {path: file_of(path, family.config.family) for path in strengths}

    def __bool__(self) -> bool:
        return bool(self._tensors)

    @contextlib.contextmanager
    def applied(self, components: ModelComponents) -> Iterator[None]:
        """Apply the files to the networks that are loaded now, within this context.

        Weights, trained adapters and modules stay as they are: layers add to their outputs, and stop at the
        end. Raises ConfigError for files that do not fit the model.
        """
        if not self._tensors:
            yield
            return
        loras = AppliedLoras(components, self._family)
        try:
            for path, tensors in self._tensors.items():
                loras.add(path, tensors)
            loras.set(self._strengths)
            yield
        finally:
            loras.remove()
