"""Anima's text: states of Qwen3-0.6B, and ids of T5's tokenizer, which its adapter brings together."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from library.families.shared import language_model, t5

MAX_TOKENS = 512  # tokens of a caption, for either tokenizer
EMPTY = 1  # the id that an empty caption is for T5: its end


def encode_anima_captions(
    model: Any, tokenizer: Any, captions: Sequence[str], length: int = MAX_TOKENS
) -> tuple[Tensor, Tensor]:
    """Captions, without any template -> the last states [B, length, C], zero behind each caption, and a mask
    [B, length] of its own tokens."""
    ids = tokenizer(list(captions), max_length=length, truncation=True).input_ids if captions else []
    return language_model.encode_ids(model, ids, length)


def target_ids(tokenizer: Any, captions: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
    """Ids of T5 [B, length], zero behind each caption, and their mask."""
    ids, mask = t5.t5_tokens(tokenizer, captions, length)
    return ids.to(torch.int32), mask.to(torch.int32)


def without_caption(arrays: dict[str, Any]) -> dict[str, Any]:
    """What the arrays of a cached caption (numpy) are for an empty one."""
    empty = {name: array * 0 for name, array in arrays.items()}
    for name in ("t5_input_ids", "t5_attn_mask"):
        empty[name][0] = EMPTY
    return empty
