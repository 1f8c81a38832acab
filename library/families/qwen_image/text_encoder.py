"""The language model of Qwen2.5-VL as a text encoder: its template, its tokens, and what the denoiser reads of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from library.families.qwen_image.pictures import VISION
from library.families.shared import language_model
from library.families.shared.chat_images import ImagePatches, chat_positions
from library.families.shared.qwen_chat import BEFORE, BEHIND
from library.families.shared.weights import assign

MAX_TOKENS = 1024  # maximum tokens of a caption with the template's end
LENGTH_MULTIPLE = 64  # lengths of batches of captions are multiples of this many tokens
EDIT = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), "
    "then explain how the user's text instruction should alter or modify the image. "
    "Generate a new image that meets the user's requirements while maintaining consistency with the original input "
    "where appropriate."
)
BEFORE_EDIT = f"<|im_start|>system\n{EDIT}<|im_end|>\n<|im_start|>user\n"
BEGIN, PICTURE, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


def build_text_encoder(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return the model with the sizes of its tensors (names without prefix), which are not copied."""
    settings = language_model.settings_of({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return assign(empty_qwen_encoder(settings), tensors)


def empty_qwen_encoder(settings: Mapping[str, Any]) -> nn.Module:
    # For text alone Qwen2.5-VL equals Qwen2, as all three position axes count alike.
    return language_model.empty_language_model("Qwen2", max_position_embeddings=128000, **settings)


def plain_qwen_names(names: Iterable[str], seeing: bool = False) -> dict[str, str]:
    """Keys of a file -> {key of the language model: key in the file}; with the vision encoder if `seeing`."""
    names = list(names)
    plain_names = language_model.plain_language_names(names)
    if seeing:
        eyes = (name for name in names if VISION in name)
        plain_names |= {name[name.index(VISION) :]: name for name in eyes}
    return plain_names


def qwen_token_ids(tokenizer: Any, captions: Sequence[str], before: str = BEFORE) -> tuple[list[list[int]], int]:
    """Return token ids of each caption in its template, truncated to MAX_TOKENS, and the number of tokens before a
    caption.
    """
    dropped = len(tokenizer(before).input_ids)
    texts = [f"{before}{caption}{BEHIND}" for caption in captions]
    return tokenizer(texts, max_length=MAX_TOKENS + dropped, truncation=True).input_ids, dropped


def longest_qwen_caption(tokenizer: Any, captions: Iterable[str], before: str = BEFORE) -> int:
    ids, dropped = qwen_token_ids(tokenizer, list(captions), before)
    return language_model.padded_length(ids, LENGTH_MULTIPLE, dropped)


def encode_qwen_captions(model: Any, tokenizer: Any, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Captions -> the last hidden states after the template's head [B, L, C], zero after each caption, and a mask [B,
    L] of the caption's own tokens. L is a multiple of LENGTH_MULTIPLE.
    """
    ids, dropped = qwen_token_ids(tokenizer, captions)
    return language_model.encode_ids(model, ids, LENGTH_MULTIPLE, dropped)


# ---- with reference images


def picture_words(number: int, tokens: int, numbered: bool) -> str:
    return f"{f'Picture {number}: ' if numbered else ''}{BEGIN}{PICTURE * tokens}{END}"


def picture_tokens(tokenizer: Any, token_counts: Sequence[int], numbered: bool) -> int:
    """Return by how many tokens images with these numbers of tokens lengthen the denoiser's text, as a multiple of
    LENGTH_MULTIPLE.
    """
    words = "".join(picture_words(number, 1, numbered) for number, _ in enumerate(token_counts, start=1))
    count = len(tokenizer(words).input_ids) - len(token_counts) + sum(token_counts)
    # One more, as a line break at the beginning of a caption may be a token of its own after an image.
    return -(-(count + 1) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE if token_counts else 0


def encode_with_pictures(
    model: Any,
    tokenizer: Any,
    captions: Sequence[str],
    images_by_caption: Sequence[Sequence[ImagePatches]],
    numbered: bool,
) -> tuple[Tensor, Tensor]:
    """Encode captions like `encode_qwen_captions`, but in the template of the Edit models, each after its images."""
    picture, dropped = tokenizer.convert_tokens_to_ids(PICTURE), len(tokenizer(BEFORE_EDIT).input_ids)
    rows = []
    for caption, images in zip(captions, images_by_caption, strict=True):
        words = "".join(picture_words(n, image.tokens, numbered) for n, image in enumerate(images, start=1))
        max_length = MAX_TOKENS + len(tokenizer(f"{BEFORE_EDIT}{words}").input_ids)
        text = f"{BEFORE_EDIT}{words}{caption.replace(PICTURE, '')}{BEHIND}"
        rows.append(tokenizer(text, max_length=max_length, truncation=True).input_ids)
    device = next(model.parameters()).device
    length = dropped + language_model.padded_length(rows, LENGTH_MULTIPLE, dropped)
    padded, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    places = torch.zeros(3, len(rows), length, dtype=torch.long)
    for row, (ids, images) in enumerate(zip(rows, images_by_caption, strict=True)):
        padded[row, : len(ids)], mask[row, dropped : len(ids)] = torch.tensor(ids), 1
        places[:, row, : len(ids)] = chat_positions(ids, picture, images)
    flat = [image for images in images_by_caption for image in images]
    mask = mask[:, dropped:].to(device)
    states = model(padded.to(device), places.to(device), picture, flat)[:, dropped:]
    return states * mask[..., None].to(states.dtype), mask
