"""Tokenizers that only count tokens. They need no transformers, which takes longer to import than many networks."""

import contextlib
import hashlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from library.config.outside_files import TOKENIZER, check_file_size
from library.config.problems import ConfigError
from library.files import cache_folder, write_atomic

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PACKAGES = ("tokenizers", "transformers")  # what is made of a tokenizer's files depends on their versions


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a tokenizer returns for a text."""

    input_ids: list[int]


class CountingTokenizer:
    """A tokenizer as transformers builds it, without what adds special tokens, cuts or fills up texts."""

    def __init__(self, pipeline: "Tokenizer") -> None:
        pipeline.no_truncation()
        pipeline.no_padding()
        self._pipeline = pipeline

    def __call__(self, text: str, add_special_tokens: bool = False, truncation: bool = False) -> Tokens:
        assert not add_special_tokens and not truncation
        return Tokens(self._pipeline.encode(text, add_special_tokens=False).ids)


def counting_tokenizer(folder: Path, files: tuple[str, ...], name: str, load: Callable[[], Any]) -> Any:
    """Return a tokenizer that counts tokens, from the cache of an earlier one with the same files.

    `load` loads the tokenizer if none is stored, which is then stored. One that cannot be stored is returned as it is.
    """
    from tokenizers import Tokenizer  # comes with transformers

    try:
        path = _stored_at(folder, files, name)
    except OSError:
        return load()  # says what cannot be read
    # The package raises plain exceptions for files that it cannot read.
    with contextlib.suppress(Exception):
        sum_of_text, _, text = path.read_text(encoding="utf-8").partition("\n")
        # Most damaged tokenizers can be read, and count otherwise.
        if sum_of_text == _sum(text):
            return CountingTokenizer(Tokenizer.from_str(text))
    loaded = load()
    pipeline = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(pipeline, Tokenizer) or getattr(loaded, "split_special_tokens", False):
        return loaded
    text = pipeline.to_str()
    with contextlib.suppress(ConfigError, OSError):  # without a cache the next start takes longer
        write_atomic(path, f"{_sum(text)}\n{text}")
    return CountingTokenizer(Tokenizer.from_str(text))


def _sum(text: str) -> str:
    return hashlib.blake2b(text.encode()).hexdigest()


def _stored_at(folder: Path, files: tuple[str, ...], name: str) -> Path:
    """Return the path in the cache for a tokenizer: another one for other content of its files, or other packages."""
    digest = hashlib.blake2b(repr([importlib.metadata.version(package) for package in PACKAGES]).encode())
    for file in (folder / name for name in files):
        if file.exists():
            check_file_size(file, TOKENIZER)
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)} ".encode() + content)
    return cache_folder() / "tokenizers" / f"{name.replace('/', '_')}-{digest.hexdigest()[:32]}.txt"
