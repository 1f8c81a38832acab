"""Qwen3-4B as Z-Image's text encoder: its template, its tokens, and the layer that the denoiser reads."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from library.families.shared import language_model

SKIPPED = 1  # layers at the end that the denoiser does not read
LONGEST = 512  # maximum tokens of a caption with its template
STEP = 64  # lengths of batches of captions are multiples of this many tokens
BEFORE = "<|im_start|>user\n"
BEHIND = "<|im_end|>\n<|im_start|>assistant\n"


def tokens(tokenizer: Any, captions: Collection[str]) -> list[list[int]]:
    texts = [f"{BEFORE}{caption}{BEHIND}" for caption in captions]
    return tokenizer(texts, max_length=LONGEST, truncation=True).input_ids if texts else []


def longest(tokenizer: Any, captions: Collection[str]) -> int:
    """The most tokens that the denoiser reads of one of these captions, as a multiple of STEP."""
    return language_model.rounded(tokens(tokenizer, captions), STEP)


def encode(model: Any, tokenizer: Any, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Captions -> the states before the last layer, template included [B, L, C], zero after each, and a mask [B, L] of
    the caption's own tokens. L is a multiple of STEP.
    """
    return language_model.encode(model, tokens(tokenizer, captions), STEP)
