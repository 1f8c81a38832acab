"""Trained files of any kind applied to a model for sampling: LoRAs, embeddings and LLLite."""

from collections.abc import Mapping
from pathlib import Path

from library import families
from library.families.base import Family, ModelComponents
from library.methods.applied import AppliedLoras
from library.methods.applied_controls import AppliedControls, is_control
from library.methods.applied_words import AppliedWords, is_embedding
from library.methods.small_files import tensor_names_of


class AppliedFiles:
    """Files at strengths that may change between images. The text encoders must be loaded already."""

    def __init__(self, components: ModelComponents, family: Family, word: str = "") -> None:
        """`word` is the prompt word of embeddings whose files name none."""
        self._parts = components
        self._loras = AppliedLoras(components, family)
        keys = families.facts_of(family.name).embedding_keys
        self.words, self.controls = AppliedWords(components, keys, word), AppliedControls(components, family)
        self.tagged: set[Path] = set()  # LoRAs, which other programs name in prompts
        self._has_words = False
        self.number_of_changes = 0  # of strengths: recordings of passes do not outlast one
        self._strengths: dict[Path, float] = {}

    @property
    def changes_text(self) -> bool:
        return self._has_words or self._loras.changes_text

    def add(self, path: Path) -> None:
        """Read a file; it starts switched off. Raises ConfigError if it is of no known kind, or for another model."""
        names = tensor_names_of(path)
        if is_embedding(names, self._parts):
            self.words.add(path)
            self._has_words = True
        elif is_control(names):
            self.controls.add(path)
        else:
            self._loras.add(path)
            self.tagged.add(path)

    def set(self, strengths: Mapping[Path, float]) -> None:
        """Set the strengths of these files; switch all others off."""
        self.number_of_changes += strengths != self._strengths
        self._strengths = dict(strengths)
        for files in (self._loras, self.words, self.controls):
            files.set(strengths)
