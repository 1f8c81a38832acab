"""The text encoders, Qwen3 for the kleins and Mistral for dev: templates, and the layers that the denoiser reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library.families.shared import language_model

LENGTH = 512  # every caption is cut or padded to this many tokens; the denoiser sees the padding
TAPS = 3  # layers to read: at one, two and three quarters of the model's depth


@dataclass(frozen=True)
class Template:
    """The text around a caption, and the side of the padding."""

    before: str
    behind: str
    pad: str
    left: bool = False
    removed: str = ""  # removed from captions: a token with another meaning
    tokens: int = 0  # of the template


QWEN3 = Template(
    "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|endoftext|>", tokens=12
)
# As published with the model, including the line break.
SYSTEM = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)
MISTRAL_TEMPLATE = Template(
    f"<s>[SYSTEM_PROMPT]{SYSTEM}[/SYSTEM_PROMPT][INST]", "[/INST]", "<pad>", left=True, removed="[IMG]", tokens=33
)


def skipped(layers: int) -> int:
    """Return how many of the last layers the denoiser does not read: it reads 9, 18 and 27 of 36, and 10, 20 and 30 of
    40.
    """
    return layers - TAPS * (layers // (TAPS + 1))


def load_short_mistral(path: Path, dtype: Any, mmap: bool = True) -> nn.Module:
    return language_model.load_mistral(path, dtype, mmap, skipped)


def encode_flux_2_captions(
    model: Any, tokenizer: Any, captions: Sequence[str], template: Template = QWEN3
) -> tuple[Tensor]:
    """Captions -> the outputs of three layers for each token, side by side [B, 512, 3 C], including padding."""
    ids = torch.full((len(captions), LENGTH), tokenizer.convert_tokens_to_ids(template.pad))
    mask = torch.zeros_like(ids)
    for row, caption in enumerate(captions):
        text = caption.replace(template.removed, "") if template.removed else caption
        text = f"{template.before}{text}{template.behind}"
        tokens = tokenizer(text, add_special_tokens=False, max_length=LENGTH, truncation=True).input_ids
        place = slice(LENGTH - len(tokens), None) if template.left else slice(len(tokens))
        ids[row, place] = torch.tensor(tokens)
        mask[row, place] = 1
    device = next(model.parameters()).device
    ids, mask = ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)
    states = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
    # hidden_states[0] are the embeddings, so that index n is the output of n layers. The last layers are left out, and
    # the deepest one that is read is the last one here.
    step = len(model.layers) // TAPS
    return (torch.cat([states[step * tap] for tap in range(1, TAPS + 1)], dim=-1),)
