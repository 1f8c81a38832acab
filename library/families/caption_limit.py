"""How much of a caption a family's text encoder reads, to warn of captions that are cut."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


def tokens_of(tokenizer: Any, caption: str) -> int:
    """How many tokens a caption has, without those that begin and end it."""
    return len(tokenizer(caption, add_special_tokens=False, truncation=False).input_ids)


@dataclass(frozen=True)
class CaptionLimit:
    """The limit of the text encoder that reads most of a caption."""

    encoder: str  # short name, as of its tokenizer
    tokens: int  # of the caption alone
    more: str = ""  # the option with a value that takes more, "" where none does
    count: Callable[[Any, str], int] = tokens_of  # by tokenizer and caption


@runtime_checkable
class LimitsCaptions(Protocol):
    """A family that cuts longer captions."""

    @property
    def caption_limit(self) -> CaptionLimit:
        """With the options of this run."""
        ...

    def tokenizers_of_captions(self) -> Mapping[str, Any]:
        """The tokenizers by encoder, without a network. Raises ConfigError where one cannot be had."""
        ...
