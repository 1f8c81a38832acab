"""Textual inversion: trains embeddings of new words of the text encoders; the model stays frozen."""

import itertools
import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from library import families
from library.config.problems import ConfigError, Problem, counted
from library.config.sections import EmbeddingRun
from library.families.base import Family, ModelComponents
from library.families.shared import added_words
from library.methods.base import FrozenBaseMethod, trained_dtype
from library.methods.small_files import read_tensors

log = logging.getLogger(__name__)

STATE = "embedding."  # prefix of text encoder names in a saved state
NO_VECTORS = ": {path} has no vectors for the text encoder {name}: choose an embedding that was made for this model"
OTHER_WIDTH = (
    ": the vectors of {path} have {theirs} numbers for {name}, and this model's have {ours}: choose an embedding that "
    "was made for this model"
)
NOTHING_TRAINED = "nothing is trained: learning_rate is 0; 5e-4 is usual"


class WordVectors(nn.Module):
    """The embedding layer of a text encoder, with trained vectors for tokens from `first` on."""

    def __init__(self, frozen: nn.Embedding, first: int, vectors: Tensor) -> None:
        super().__init__()
        self.known, self.first = frozen, first
        self.vectors = nn.Parameter(vectors)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, L] -> vectors [B, L, C] in the dtype of the frozen ones."""
        # Look up both kinds for all tokens, clamped to valid indices, and select: the host need not know the tokens.
        frozen = self.known(tokens.clamp(max=self.first - 1))
        trained = functional.embedding((tokens - self.first).clamp(min=0), self.vectors).to(frozen.dtype)
        return torch.where((tokens >= self.first)[..., None], trained, frozen)


class LearnedWords(FrozenBaseMethod):
    """The vectors of new words, by text encoder."""

    def __init__(self, layers: Mapping[str, WordVectors], config: EmbeddingRun) -> None:
        super().__init__(config, "embedding", tuple(layers), NOTHING_TRAINED)
        self.layers, self._keys = dict(layers), families.facts_of(config.family).embedding_keys

    def named(self) -> dict[str, nn.Parameter]:
        return {f"{STATE}{name}": layer.vectors for name, layer in self.layers.items()}

    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the content of a file, on the CPU: the vectors [words, channels] by text encoder."""
        encoders = {name.removeprefix(STATE): vectors for name, vectors in super().state_dict(dtype).items()}
        return {self._keys.get(name, name): vectors for name, vectors in encoders.items()}


def attach_words(components: ModelComponents, family: Family, config: EmbeddingRun) -> LearnedWords:
    """Add the new words to the tokenizers and their vectors to the text encoders. The model must be frozen already."""
    file_vectors = (
        read_tensors(config.embedding.weights, "an embedding file", "weights") if config.embedding.weights else None
    )
    layers = {}
    for name, encoder in components.encoders.items():
        input_embedding, tokenizer = encoder.get_input_embeddings(), components.tokenizers[name]  # type: ignore[operator]
        init_tokens = added_words.word_tokens(tokenizer, config.embedding.init_word or "")
        vectors = _initial_vectors(input_embedding.weight.detach(), init_tokens, len(config.embedding.words))
        if file_vectors is not None:
            vectors = _vectors_of_file(name, file_vectors, vectors, config)
        first = added_words.add_words(tokenizer, config.embedding.words)
        layers[name] = WordVectors(input_embedding, first, vectors.to(trained_dtype(config)))
        encoder.set_input_embeddings(layers[name])  # type: ignore[operator]
        if len(init_tokens) > 1 and len(init_tokens) != len(vectors):
            log.warning(
                "init_word has %d tokens in %s for %d vectors: they are %s",
                len(init_tokens),
                name,
                len(vectors),
                "repeated" if len(init_tokens) < len(vectors) else "cut",
            )
    return LearnedWords(layers, config)


def _initial_vectors(vectors: Tensor, init_tokens: list[int], number: int) -> Tensor:
    """Return vectors [number, C], float32: those of `init_tokens`, repeated or cut; without tokens, random ones of the
    usual mean and deviation.
    """
    vectors = vectors.float()
    if init_tokens:
        return vectors[list(itertools.islice(itertools.cycle(init_tokens), number))].clone()
    return vectors.mean(0) + vectors.std(0) * torch.randn(number, vectors.shape[1], device=vectors.device)


def _vectors_of_file(name: str, file_vectors: Mapping[str, Tensor], initial: Tensor, config: EmbeddingRun) -> Tensor:
    """Return the vectors of a file for one text encoder. Raises ConfigError if they do not fit."""
    path, keys = config.embedding.weights, families.facts_of(config.family).embedding_keys
    vectors = file_vectors.get(keys.get(name, name))
    if vectors is None:
        raise ConfigError(Problem("weights", NO_VECTORS, path=path, name=name))
    vectors = vectors.unsqueeze(0) if vectors.dim() == 1 else vectors
    if vectors.shape[1:] != initial.shape[1:]:
        theirs, ours = vectors.shape[-1], initial.shape[-1]
        raise ConfigError(Problem("weights", OTHER_WIDTH, path=path, theirs=theirs, name=name, ours=ours))
    if len(vectors) != len(initial):
        raise ConfigError(
            Problem(
                "weights",
                ": {path} has {vectors}, and num_vectors_per_token is {ours}: set it to {theirs}",
                path=path,
                vectors=counted(len(vectors), "vector"),
                theirs=len(vectors),
                ours=len(initial),
                also="num_vectors_per_token",
                fix={"num_vectors_per_token": len(vectors)},
            )
        )
    return vectors.float()
