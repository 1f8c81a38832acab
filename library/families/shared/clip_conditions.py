"""Captions of any length, with emphasis, as hidden states of CLIP text encoders."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from library.families.shared import clip, emphasis


def encode_chunks(
    encoder: nn.Module, tokenizer: Any, captions: Sequence[str], chunks: int, pad: int | None, weighted: bool
) -> tuple[Any, Tensor | None]:
    """Encode captions, cut or padded to `chunks` of 75 tokens: transformers' output for [B * chunks, 77] tokens, and
    the weights of emphasis [B, 75 * chunks + 2], None without it.
    """
    device, factors = next(encoder.parameters()).device, None
    if weighted:
        ids, factors = emphasis.weighted_tokens(tokenizer, captions, chunks, pad)
    else:
        ids = clip.clip_tokens(tokenizer, captions, chunks, pad)
    return encoder(ids.flatten(0, 1).to(device, non_blocking=True), output_hidden_states=True), factors


def merge_chunks(hidden: Tensor, chunks: int, factors: Tensor | None) -> Tensor:
    """Hidden states of chunks [B * chunks, 77, C] -> of captions [B, 75 * chunks + 2, C], times their weights."""
    hidden = clip.merge_chunks(hidden, chunks)
    if factors is not None:
        hidden = hidden * factors.to(hidden.device, hidden.dtype, non_blocking=True)[:, :, None]
    return hidden


def count_chunks(tokenizer: Any, prompts: Sequence[str], longest: int) -> int:
    """Return the chunks of 75 tokens that the longest of these prompts needs, at most `longest`."""
    tokens = max(emphasis.count_weighted_tokens(tokenizer, prompt) for prompt in prompts)
    return min(max(clip.count_chunks(tokens), 1), longest)
