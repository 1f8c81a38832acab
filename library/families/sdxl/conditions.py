"""The outputs of SDXL's two text encoders: hidden states for cross-attention, and a pooled vector."""

from collections.abc import Sequence

from torch import Tensor

from library.families.base import ModelComponents
from library.families.shared import tokenizers
from library.families.shared.clip_conditions import encode_chunks, merge_chunks

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
        encoded, factors = encode_chunks(encoder, tokenizer, captions, chunks, PADS[name], weighted)
        out[HIDDEN[name]] = merge_chunks(encoded.hidden_states[-2], chunks, factors)
        if name == "clip_g":
            out["pool2"] = encoded.text_embeds.view(-1, chunks, encoded.text_embeds.shape[-1])[:, 0]
    return out
