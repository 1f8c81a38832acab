"""Textual inversion: trains embeddings of new words of the text encoders; the model stays frozen."""

import itertools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from library.config.hub_names import about_absent
from library.config.problems import ConfigError, Problem, counted
from library.config.sections import EmbeddingRun
from library.families.base import Family, ModelComponents
from library.families.shared import added_words
from library.methods.base import dtype_of
from library.methods.frozen_base import FrozenBaseMethod
from library.methods.small_files import tensors_of

log = logging.getLogger(__name__)

STATE = "embedding."  # before the names of text encoders in a saved state
NOTHING = "nothing is trained: learning_rate is 0; 5e-4 is usual"


class WordVectors(nn.Module):
    """The embedding layer of a text encoder, with trained vectors for tokens from `first` on."""

    def __init__(self, known: nn.Embedding, first: int, vectors: Tensor) -> None:
        super().__init__()
        self.known, self.first = known, first
        self.vectors = nn.Parameter(vectors)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, L] -> vectors [B, L, C] in the dtype of the frozen ones."""
        known = self.known(tokens.clamp(max=self.first - 1))
        own = functional.embedding((tokens - self.first).clamp(min=0), self.vectors).to(known.dtype)
        return torch.where((tokens >= self.first)[..., None], own, known)


class LearnedWords(FrozenBaseMethod):
    """The vectors of new words, by text encoder."""

    def __init__(self, layers: Mapping[str, WordVectors], config: EmbeddingRun) -> None:
        super().__init__(config, "embedding", tuple(layers), NOTHING)
        self.layers = dict(layers)

    def named(self) -> dict[str, nn.Parameter]:
        """All trained parameters."""
        return {f"{STATE}{name}": layer.vectors for name, layer in self.layers.items()}

    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """What the file holds, on the CPU: the vectors [words, channels] by the name of their text encoder."""
        return {name.removeprefix(STATE): vectors for name, vectors in super().state_dict(dtype).items()}


def attach(components: ModelComponents, family: Family, config: EmbeddingRun) -> LearnedWords:
    """Teach the tokenizers the new words and the text encoders their vectors. The model must be frozen already."""
    given = tensors_of(config.embedding.weights, "an embedding file") if config.embedding.weights else None
    layers = {}
    for name, encoder in components.encoders.items():
        known, tokenizer = _embedding(encoder), components.tokenizers[name]
        begins = added_words.tokens(tokenizer, config.embedding.init_word or "")
        vectors = _beginning(known.weight.detach(), begins, len(config.embedding.words))
        if given is not None:
            vectors = _taken(name, given, vectors, config)
        first = added_words.add(tokenizer, config.embedding.words)
        layers[name] = WordVectors(known, first, vectors.to(dtype_of(config)))
        encoder.set_input_embeddings(layers[name])  # type: ignore[operator]
        if len(begins) > 1 and len(begins) != len(vectors):
            log.warning(
                "init_word has %d tokens in %s for %d vectors: they are %s",
                len(begins),
                name,
                len(vectors),
                "repeated" if len(begins) < len(vectors) else "cut",
            )
    return LearnedWords(layers, config)


def problems(config: EmbeddingRun) -> Iterator[Problem]:
    """Problems of options that only files show."""
    if (path := config.embedding.weights) and not Path(path).is_file():
        yield about_absent("weights", path)


def _embedding(encoder: nn.Module) -> nn.Embedding:
    return encoder.get_input_embeddings()  # type: ignore[operator]


def _beginning(known: Tensor, begins: list[int], number: int) -> Tensor:
    """Vectors [number, C] float32 like those of some tokens, which are repeated; without any, like a random word's."""
    known = known.float()
    if begins:
        return known[list(itertools.islice(itertools.cycle(begins), number))].clone()
    return known.mean(0) + known.std(0) * torch.randn(number, known.shape[1], device=known.device)


def _taken(name: str, given: Mapping[str, Tensor], here: Tensor, config: EmbeddingRun) -> Tensor:
    """The vectors of a file for one text encoder. ConfigError where they do not fit."""
    path, found = config.embedding.weights, given.get(name)
    if found is None:
        raise ConfigError(
            Problem(
                "weights",
                ": {path} has no vectors for the text encoder {name}: choose an embedding that was made for this model",
                path=path,
                name=name,
            )
        )
    found = found.unsqueeze(0) if found.dim() == 1 else found
    if found.shape[1:] != here.shape[1:]:
        raise ConfigError(
            Problem(
                "weights",
                ": the vectors of {path} have {theirs} numbers for {name}, and this model's have {ours}: choose an "
                "embedding that was made for this model",
                path=path,
                theirs=found.shape[-1],
                name=name,
                ours=here.shape[-1],
            )
        )
    if len(found) != len(here):
        raise ConfigError(
            Problem(
                "weights",
                ": {path} has {vectors}, and num_vectors_per_token is {ours}: set it to {theirs}",
                path=path,
                vectors=counted(len(found), "vector"),
                theirs=len(found),
                ours=len(here),
                also="num_vectors_per_token",
                fix={"num_vectors_per_token": len(found)},
            )
        )
    return found.float()
