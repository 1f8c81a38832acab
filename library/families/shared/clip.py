"""CLIP text encoders: tensor names, sizes from shapes, token chunks. SDXL has two of them, FLUX one.

Names here are those in files (`text_model.encoder...`), independent of the installed version of transformers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from library.families.shared import empty_weights
from library.families.shared.weights import assign

CLIP_MARKER = "embeddings.token_embedding.weight"
CLIP_LAYER_CLASSES = ("CLIPAttention", "CLIPSdpaAttention", "CLIPMLP")  # classes whose linear layers carry adapters
HEAD_CHANNELS = 64  # every CLIP text encoder in use has heads of 64 channels
LENGTH = 77  # tokens of one chunk: BOS, 75 of the caption, EOS


def canonical_clip_path(name: str) -> str:
    """A module or tensor path of any transformers version -> the path in files (`text_model.encoder.layers.0...`)."""
    if name.startswith(("text_model.", "text_projection")) or name == "logit_scale":
        return name
    return f"text_model.{name}"


def plain_clip_names(names: Iterable[str]) -> dict[str, str]:
    """Keys of a CLIP-L's file, with any prefix -> {canonical key (`text_model.*`): key in the file}."""
    names = list(names)
    prefix = next((name.removesuffix(CLIP_MARKER) for name in names if name.endswith(CLIP_MARKER)), "")
    prefix = prefix.removesuffix("text_model.")
    plain_names = {canonical_clip_path(name.removeprefix(prefix)): name for name in names if name.startswith(prefix)}
    plain_names.pop("text_model.embeddings.position_ids", None)
    return plain_names


def build_encoder(tensors: Mapping[str, Tensor], act: str = "quick_gelu", projected: bool = False) -> nn.Module:
    """Build a text encoder from tensors, which are not copied; they determine its sizes.

    `tensors` has file names (`text_model.*`, and `text_projection.weight` if `projected`); others are ignored. `act` is
    quick_gelu for CLIP-L and gelu for CLIP-G. The pooled vector is that of the first end token, the last one of the
    vocabulary. Raises KeyError or RuntimeError if tensors are missing.
    """
    from transformers.models.clip import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    vocabulary, width = tensors["text_model.embeddings.token_embedding.weight"].shape
    layers = {name.split(".")[3] for name in tensors if name.startswith("text_model.encoder.layers.")}
    end = vocabulary - 1
    sizes = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=tensors["text_model.encoder.layers.0.mlp.fc1.weight"].shape[0],
        projection_dim=tensors["text_projection.weight"].shape[0] if "text_projection.weight" in tensors else width,
        num_hidden_layers=len(layers),
        num_attention_heads=max(1, width // HEAD_CHANNELS),
        max_position_embeddings=tensors["text_model.embeddings.position_embedding.weight"].shape[0],
        hidden_act=act,
        bos_token_id=end - 1,
        eos_token_id=end,
        pad_token_id=end,
    )
    with empty_weights.empty_weights():
        model = (CLIPTextModelWithProjection if projected else CLIPTextModel)(sizes)
    expected = {
        name: tensors[canonical_clip_path(name)] for name in model.state_dict() if not name.endswith("position_ids")
    }
    return assign(model, expected)


def clip_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {canonical_clip_path(n): t for n, t in model.state_dict().items() if not n.endswith("position_ids")}


def clip_tokens(tokenizer: Any, texts: Sequence[str], chunks: int = 1, pad: int | None = None) -> Tensor:
    """Return token ids [B, chunks, 77]: each chunk is BOS, 75 tokens of the caption and the sequence's last token.

    `pad` fills a short caption after its EOS, by default with EOS itself. With another `pad` (CLIP-G: 0) a full chunk
    ends with EOS, and one that starts with padding starts with EOS, as in sd-scripts.
    """
    ids = tokenizer(list(texts), add_special_tokens=False, truncation=False).input_ids if texts else []
    return split_into_chunks([row[: chunks * (LENGTH - 2)] for row in ids], tokenizer, chunks, pad)


def split_into_chunks(rows: Sequence[Sequence[int]], tokenizer: Any, chunks: int, pad: int | None) -> Tensor:
    """Rows of at most 75 * chunks ids without BOS and EOS -> [B, chunks, 77]."""
    begin, end, inner = tokenizer.bos_token_id, tokenizer.eos_token_id, LENGTH - 2
    pad = end if pad is None else pad
    out = []
    for row in rows:
        full = [*row, end, *[pad] * (chunks * inner - len(row))]  # BOS is added below
        pieces = [[begin, *full[i * inner : (i + 1) * inner], full[-1]] for i in range(chunks)]
        if pad != end and chunks > 1:
            for piece in pieces:
                piece[-1] = piece[-1] if piece[-2] in (end, pad) else end
                piece[1] = end if piece[1] == pad else piece[1]
        out.append(pieces)
    return torch.tensor(out, dtype=torch.int64).view(len(out), chunks, LENGTH)


def merge_chunks(hidden: Tensor, chunks: int) -> Tensor:
    """Hidden states [B * chunks, 77, C] -> [B, 75 * chunks + 2, C]: one BOS, every chunk's 75, one last token."""
    if chunks == 1:
        return hidden
    parts = hidden.view(-1, chunks, *hidden.shape[1:])
    middle = parts[:, :, 1:-1].flatten(1, 2)
    return torch.cat([parts[:, 0, :1], middle, parts[:, -1, -1:]], dim=1)


def count_chunks(max_token_length: int | None) -> int:
    return math.ceil((max_token_length or 75) / 75)
