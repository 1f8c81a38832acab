"""Qwen3 as the text encoder of the kleins: its template, its tokens, and the layers that the denoiser reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library.families.shared import language_model, weights
from library.families.shared.part_files import complete

LENGTH = 512  # tokens that every caption is cut or padded to; the denoiser sees the padding
TAPS = 3  # layers that are read: at one, two and three quarters of the model's depth
PAD = "<|endoftext|>"
BEFORE = "<|im_start|>user\n"
BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def skipped(layers: int) -> int:
    """Of so many layers, how many at the end the denoiser does not read: of 36 it reads 9, 18 and 27."""
    return layers - TAPS * (layers // (TAPS + 1))


def load(path: Path, dtype: Any, mmap: bool = True) -> nn.Module:
    """Read Qwen3 without the layers that are not needed."""
    with complete(path, language_model.QWEN3):
        stored = weights.read(path, mmap).shapes()
        shapes = {plain: stored[name] for plain, name in language_model.plain_names(stored).items()}
        layers = language_model.qwen3_settings(shapes)["num_hidden_layers"]
    return language_model.load_qwen3(path, dtype, skipped(layers), mmap)


def encode(model: Any, tokenizer: Any, captions: Sequence[str]) -> tuple[Tensor]:
    """Captions -> what three layers say of each token, side by side [B, 512, 3 C], that of the padding as well."""
    ids = torch.full((len(captions), LENGTH), tokenizer.convert_tokens_to_ids(PAD))
    mask = torch.zeros_like(ids)
    for row, caption in enumerate(captions):
        own = tokenizer(f"{BEFORE}{caption}{BEHIND}", max_length=LENGTH, truncation=True).input_ids
        ids[row, : len(own)] = torch.tensor(own)
        mask[row, : len(own)] = 1
    device = next(model.parameters()).device
    ids, mask = ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)
    states = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
    step = len(model.layers) // TAPS
    return (torch.cat([states[step * tap] for tap in range(1, TAPS + 1)], dim=-1),)
