"""The language model of Qwen2.5-VL as a text encoder: its template, its tokens, and what the denoiser reads of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from library.families.shared import language_model
from library.families.shared.language_model import HEAD
from library.families.shared.weights import assign

LONGEST = 1024  # tokens of a caption with what stands behind it
STEP = 64  # a batch of captions is as long as a multiple of so many tokens
SYSTEM = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:"
)
BEFORE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
BEHIND = "<|im_end|>\n<|im_start|>assistant\n"


def build(tensors: Mapping[str, Tensor]) -> nn.Module:
    """The model of the sizes of its tensors (names without prefix), which it takes over without a copy."""
    return assign(empty(**sizes({name: tuple(tensor.shape) for name, tensor in tensors.items()})), tensors)


def sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """What `empty` needs, from shapes by name. KeyError names the first that is missing."""
    words, hidden = shapes["embed_tokens.weight"]
    return {
        "words": words,
        "hidden": hidden,
        "mlp": shapes["layers.0.mlp.gate_proj.weight"][0],
        "layers": len({name.split(".")[1] for name in shapes if name.startswith("layers.")}),
        "groups": shapes["layers.0.self_attn.k_proj.weight"][0] // HEAD,
    }


def empty(words: int, hidden: int, mlp: int, layers: int, groups: int) -> nn.Module:
    """A model without memory for its weights. For text alone, Qwen2.5-VL is Qwen2: all three axes count alike."""
    return language_model.empty(
        "Qwen2", vocab_size=words, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD, num_key_value_heads=groups, max_position_embeddings=128000,
    )  # fmt: skip


def tokens(tokenizer: Any, captions: Sequence[str]) -> tuple[list[list[int]], int]:
    """Token ids of each caption in its template, cut to the longest length, and how many stand before a caption."""
    dropped = len(tokenizer(BEFORE).input_ids)
    texts = [f"{BEFORE}{caption}{BEHIND}" for caption in captions]
    return tokenizer(texts, max_length=LONGEST + dropped, truncation=True).input_ids, dropped


def longest(tokenizer: Any, captions: Iterable[str]) -> int:
    """The most tokens that the denoiser reads of one of these captions, as a multiple of STEP."""
    ids, dropped = tokens(tokenizer, list(captions))
    return language_model.rounded(ids, STEP, dropped)


def encode(model: Any, tokenizer: Any, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Captions -> the last hidden states behind the template's head [B, L, C], zero behind each caption, and a mask
    [B, L] of the tokens that are a caption's own. L is a multiple of STEP."""
    ids, dropped = tokens(tokenizer, captions)
    return language_model.encode(model, ids, STEP, dropped)
