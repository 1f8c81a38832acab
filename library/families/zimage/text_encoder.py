"""Qwen3-4B as Z-Image's text encoder: its template, its tokens, and the layer that the denoiser reads."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from library.families.shared import language_model

SKIPPED = 1  # layers at the end, which the denoiser does not read
MAX_TOKENS = 512  # tokens of a caption with what stands around it
LENGTH_MULTIPLE = 64  # a batch of captions is as long as a multiple of so many tokens
BEFORE = "<|im_start|>user\n"
BEHIND = "<|im_end|>\n<|im_start|>assistant\n"


def zimage_token_ids(tokenizer: Any, captions: Collection[str]) -> list[list[int]]:
    """Token ids of each caption in its template, cut to the longest length."""
    texts = [f"{BEFORE}{caption}{BEHIND}" for caption in captions]
    return tokenizer(texts, max_length=MAX_TOKENS, truncation=True).input_ids if texts else []


def longest_zimage_caption(tokenizer: Any, captions: Collection[str]) -> int:
    """The most tokens that the denoiser reads of one of these captions, as a multiple of STEP."""
    return language_model.padded_length(zimage_token_ids(tokenizer, captions), LENGTH_MULTIPLE)


def encode_zimage_captions(model: Any, tokenizer: Any, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Captions -> the states before the last layer, template included [B, L, C], zero behind each, and a mask [B, L] of
    the tokens that are a caption's own. L is a multiple of STEP."""
    return language_model.encode_ids(model, zimage_token_ids(tokenizer, captions), LENGTH_MULTIPLE)
