"""The token limit of a family's text encoder, to warn of captions that are truncated."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


def count_caption_tokens(tokenizer: Any, caption: str) -> int:
    return len(tokenizer(caption, add_special_tokens=False, truncation=False).input_ids)


@dataclass(frozen=True)
class CaptionLimit:
    """The limit of the text encoder with the largest one."""

    encoder: str  # short name of encoder and tokenizer
    tokens: int  # of the caption alone
    more: str = ""  # an option and value that raise the limit, "" if there is none
    count: Callable[[Any, str], int] = count_caption_tokens  # by tokenizer and caption


@runtime_checkable
class LimitsCaptions(Protocol):
    """A family that truncates long captions."""

    @property
    def caption_limit(self) -> CaptionLimit:
        """The limit with the options of this run."""

    def tokenizers_of_captions(self) -> Mapping[str, Any]:
        """Return the tokenizers by encoder, without loading encoders. Raises ConfigError if one is unavailable."""
