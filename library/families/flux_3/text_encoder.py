"""The captions of FLUX 3: the chat that Qwen3-VL reads, and the outputs of several of its layers.

A caption fills a window of whole steps of 80 tokens, whose padding the denoiser reads as well; so of each batch only
what exceeds an image's own window is masked.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

BEFORE, BEHIND = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
TEMPLATE_TOKENS = 8  # of both
PAD = "<|endoftext|>"
PAD_POSITION = 1  # of all padding, as in the training of the model
WINDOW = 80
MAX_CHAT_TOKENS = 8192  # tokens of a caption with its chat; longer ones are cut at the end
TAPS = 8  # layers to read, equally distant: 4, 8, ..., 32 of 36


def unread_layers(layers: int) -> int:
    """Return how many of the last layers are not read."""
    return layers - TAPS * (layers // (TAPS + 1))


def taps(layers: int) -> tuple[int, ...]:
    """Return the layers to read, of a model without those that are not read."""
    step = layers // TAPS
    return tuple(range(step, layers + 1, step))


def chat_tokens(tokenizer: Any, captions: Collection[str]) -> list[list[int]]:
    """Return the token ids of each caption in its chat."""
    if not captions:
        return []
    texts = [f"{BEFORE}{caption}{BEHIND}" for caption in captions]
    return tokenizer(texts, add_special_tokens=False, max_length=MAX_CHAT_TOKENS, truncation=True).input_ids


def window(tokens: int) -> int:
    return min(-(-tokens // WINDOW) * WINDOW, MAX_CHAT_TOKENS)


def longest_window(tokenizer: Any, captions: Collection[str]) -> int:
    """Return the length of a batch of these captions."""
    return max((window(len(ids)) for ids in chat_tokens(tokenizer, captions)), default=WINDOW)


def encode_flux_3_captions(model: Any, tokenizer: Any, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Captions -> the outputs of the layers side by side [B, L, T * C], zero behind each window, and a mask [B, L] of
    the windows.
    """
    ids = chat_tokens(tokenizer, captions)
    lengths = [window(len(tokens)) for tokens in ids]
    size = len(ids), max(lengths)
    padded = torch.full(size, tokenizer.convert_tokens_to_ids(PAD))
    is_text, mask = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
    positions = torch.full(size, PAD_POSITION)
    for row, (tokens, length) in enumerate(zip(ids, lengths, strict=True)):
        text = slice(len(tokens))
        padded[row, text], positions[row, text] = torch.tensor(tokens), torch.arange(len(tokens))
        is_text[row, text] = 1
        mask[row, :length] = 1
    device = next(model.parameters()).device
    inputs = {"input_ids": padded, "attention_mask": is_text, "position_ids": positions}
    on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
    states = model(output_hidden_states=True, **on_device).hidden_states
    mask = mask.to(device, non_blocking=True)
    # hidden_states[0] are the embeddings, so that index n is the output of n layers.
    joined = torch.cat([states[number] for number in taps(len(model.layers))], dim=-1)
    return joined * mask[..., None].to(joined.dtype), mask
