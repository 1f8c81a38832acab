"""New tokens of a tokenizer: words that are encoded as one token each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from library.config.problems import Problem


def find_word_problems(tokenizers: Mapping[str, Any], words: Sequence[str]) -> Iterator[Problem]:
    """Yield problems of words that are tokens already, as training would change their meaning in all prompts."""
    for word in words:
        if any(is_known(tokenizer, word) for tokenizer in tokenizers.values()):
            yield Problem(
                "token_string",
                ": the model knows {word} already; choose a word that it does not know, such as {word}-x",
                word=word,
            )
            return


def is_known(tokenizer: Any, word: str) -> bool:
    vocab = tokenizer.get_vocab()
    return any(f"{word.lower()}{end}" in vocab for end in ("", "</w>"))  # CLIP marks the end of a word by </w>


def add_words(tokenizer: Any, words: Sequence[str]) -> int:
    """Add words to a tokenizer in this order, as new tokens at its end; return the id of the first."""
    first = len(tokenizer)
    tokenizer.add_tokens(list(words))
    tokens_to_ids = tokenizer.convert_tokens_to_ids(list(words))
    if tokens_to_ids != list(range(first, first + len(words))):
        raise ValueError(f"the tokenizer gave {words} the tokens {tokens_to_ids}, and not those from {first} on")
    return first


def word_tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids
