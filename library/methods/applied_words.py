"""Textual inversion embeddings applied to the text encoders of a model: each replaces a word in prompts."""

import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from library.config.problems import ConfigError, counted
from library.families.base import ModelComponents
from library.families.shared import added_words
from library.methods.embedding import WordVectors
from library.methods.small_files import read_tensors

TRIGGER = "modelspec.trigger_phrase"


def is_embedding(names: set[str], components: ModelComponents) -> bool:
    return bool(names) and names <= {*components.encoders, "emb_params"}


class AppliedWords:
    """Embeddings by their files. Each gets new tokens, so that its word may be one that the tokenizers know."""

    def __init__(self, components: ModelComponents, keys: Mapping[str, str], word: str = "") -> None:
        """`keys` are those of text encoders in files, if not their names. `word` is the prompt word of files without
        one; without it, the file's name is used.
        """
        self._parts, self._word, self._keys = components, word, keys
        self._known: dict[Path, tuple[re.Pattern[str], str]] = {}  # the word in prompts, the tokens that replace it
        self._used: list[Path] = []

    def add(self, path: Path) -> None:
        """Read a file; it starts switched off. Raises ConfigError if it is for another model."""
        encoders = {key: name for name, key in self._keys.items()}
        vectors_by_encoder = {
            encoders.get(key, key): vectors.reshape(-1, vectors.shape[-1]) for key, vectors in _vectors(path).items()
        }
        number = max(map(len, vectors_by_encoder.values()))
        for name, encoder in self._parts.encoders.items():
            input_embeddings = encoder.get_input_embeddings()  # type: ignore[operator]
            width = (
                input_embeddings.known if isinstance(input_embeddings, WordVectors) else input_embeddings
            ).weight.shape[1]
            if name not in vectors_by_encoder or vectors_by_encoder[name].shape != (number, width):
                template = "{path} is an embedding for another model: it lacks {vectors} of {width} numbers for {name}"
                vectors = counted(number, "vector")
                raise ConfigError(template, path=path, vectors=vectors, width=width, name=name)
        words = [f"embedding{len(self._known)}vector{at}" for at in range(number)]
        for name, encoder in self._parts.encoders.items():
            first = added_words.add_words(self._parts.tokenizers[name], words)
            input_embeddings = encoder.get_input_embeddings()  # type: ignore[operator]
            layer = WordVectors(input_embeddings, first, vectors_by_encoder[name].float()).requires_grad_(False)
            encoder.set_input_embeddings(layer)  # type: ignore[operator]
        # The whole word only: "cat" must not match in "catalogue". \b would fail for words like "<cat>".
        pattern = re.compile(rf"(?<!\w){re.escape(_word_of(path) or self._word or path.stem)}(?!\w)", re.IGNORECASE)
        self._known[path] = pattern, " ".join(words)

    def set(self, strengths: Mapping[Path, float]) -> None:
        self._used = [path for path in self._known if strengths.get(path)]

    def with_tokens(self, text: str) -> str:
        """Replace the words of embeddings in a prompt by their tokens."""
        for path in self._used:
            pattern, words = self._known[path]
            text = pattern.sub(words, text)
        return text


def _vectors(path: Path) -> dict[str, Tensor]:
    tensors = read_tensors(path, "an embedding file")
    if not tensors or any(
        not isinstance(vectors, Tensor) or vectors.dim() not in (1, 2) for vectors in tensors.values()
    ):
        raise ConfigError("{path} is not an embedding file", path=path)
    return tensors


def _word_of(path: Path) -> str:
    """Return the prompt word in a file's metadata, "" if there is none."""
    if path.suffix != ".safetensors":
        return ""
    with safe_open(path, "pt") as file:
        return ((file.metadata() or {}).get(TRIGGER) or "").strip()
