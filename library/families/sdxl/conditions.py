"""The outputs of SDXL's two text encoders: hidden states for cross-attention, and a pooled vector."""

from collections.abc import Sequence

import torch
from torch import Tensor

from library.families.base import ModelComponents
from library.families.sdxl import emphasis
from library.families.shared import clip, tokenizers

TOKENIZERS = {"clip_l": (tokenizers.CLIP_L, "tokenizer"), "clip_g": (tokenizers.CLIP_G, "tokenizer_2")}
PADS = {"clip_l": None, "clip_g": 0}  # token after the EOS of a short caption; None repeats EOS
HIDDEN = {"clip_l": "hidden_state1", "clip_g": "hidden_state2"}


def encode_with_clips(
    components: ModelComponents, captions: Sequence[str], encoders: tuple[str, ...] | None, chunks: int, weighted: bool
) -> dict[str, Tensor]:
    """Encode captions, cut or padded to `chunks` of 75 tokens, -> hidden_state1, hidden_state2 [B, L, C] and pool2 [B,
    C].

    Hidden states come from before the last layer, without the final norm; the pooled vector is the last layer's at the
    first EOS of the first chunk, times the projection. Weights of `(emphasis:1.2)` only multiply hidden states.
    """
    out = {}
    for name in encoders or tuple(TOKENIZERS):
        encoder, tokenizer = components.encoders[name], components.tokenizers[name]
        device, factors = next(encoder.parameters()).device, None
        if weighted:
            ids, factors = emphasis.weighted_tokens(tokenizer, captions, chunks, PADS[name])
        else:
            ids = clip.clip_tokens(tokenizer, captions, chunks, PADS[name])
        encoded = encoder(ids.flatten(0, 1).to(device, non_blocking=True), output_hidden_states=True)
        hidden = clip.merged(encoded.hidden_states[-2], chunks)
        if factors is not None:
            hidden = hidden * factors.to(device, hidden.dtype, non_blocking=True)[:, :, None]
        out[HIDDEN[name]] = hidden
        if name == "clip_g":
            out["pool2"] = encoded.text_embeds.view(-1, chunks, encoded.text_embeds.shape[-1])[:, 0]
    return out


def for_prompts(components: ModelComponents, prompts: Sequence[str], longest: int) -> dict[str, Tensor]:
    """Encode a preview's prompts with emphasis, all padded to the chunks of the longest, at most `longest`."""
    with torch.no_grad():
        return encode_with_clips(components, prompts, None, count_chunks(components, prompts, longest), weighted=True)


def count_chunks(components: ModelComponents, prompts: Sequence[str], longest: int) -> int:
    """Return the chunks of 75 tokens that the longest of these prompts needs, at most `longest`."""
    tokenizer = next(iter(components.tokenizers.values()))
    tokens = max(emphasis.count_weighted_tokens(tokenizer, prompt) for prompt in prompts)
    return min(max(clip.chunks_of(tokens), 1), longest)
