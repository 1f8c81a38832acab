"""Qwen3-VL-8B as Qwen-Image-2.1's text encoder: the chat, its tokens, and reference images inside of it.

The denoiser reads the output of the last layer before its norm. Where the chat shows an image, the denoiser reads the
image's latents instead of these outputs, which are therefore left out.
"""

import importlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from library.families.shared import language_model, qwen3_vl, random_networks, weights
from library.families.shared.chat_images import (
    FRAMES,
    MERGED,
    ImagePatches,
    SeeingModel,
    chat_positions,
    cut_pixels,
)
from library.families.shared.expected_tensors import BOTH, expanded, list_length
from library.families.shared.part_files import complete
from library.families.shared.weights import assign

MAX_CHAT_TOKENS = 1024  # of the chat after its system part, without reference images
LENGTH_MULTIPLE = 64  # lengths of batches of captions are multiples of this many tokens
SYSTEM_PART = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"  # dropped
USER, BEHIND = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
BEGIN, PICTURE, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
PATCH = 16  # pixels of a patch's side
TOKEN = PATCH * MERGED  # pixels of a token's side
MIN_SEEN_PIXELS, MAX_SEEN_PIXELS = 256**2, 4096**2  # of an image in the text encoder
EYES, VISION_HEAD = "visual.", 72  # prefix of the vision encoder's tensors, and the width of its heads
ROPE_SECTIONS = [24, 20, 20]  # channel pairs of a head rotated by frame, row and column
TAPS = {27: (8, 16, 24)}  # layers of a vision encoder of so many whose outputs the first layers add


def size_in_encoder(size: tuple[int, int]) -> tuple[int, int]:
    """Return an image's width and height in the text encoder: whole tokens, neither too few nor too many pixels."""
    width, height = (max(TOKEN, round(side / TOKEN) * TOKEN) for side in size)
    if MIN_SEEN_PIXELS <= width * height <= MAX_SEEN_PIXELS:
        return width, height
    is_large = width * height > MAX_SEEN_PIXELS
    factor = math.sqrt((MAX_SEEN_PIXELS if is_large else MIN_SEEN_PIXELS) / math.prod(size))
    whole = math.floor if is_large else math.ceil
    return max(TOKEN, whole(size[0] * factor / TOKEN) * TOKEN), max(TOKEN, whole(size[1] * factor / TOKEN) * TOKEN)


def shown(image: Image.Image) -> ImagePatches:
    """Cut an image into patches, scaled if it does not have whole tokens."""
    scaled = image.convert("RGB")
    if (size := size_in_encoder(image.size)) != image.size:
        scaled = scaled.resize(size, Image.Resampling.BICUBIC)
    colours = torch.from_numpy(np.asarray(scaled).astype("float32") / 127.5 - 1)
    return cut_pixels(colours, PATCH)


def words_before(number: int) -> str:
    """Return what the chat has before the picture tokens of a reference image, since the one before."""
    return f"{USER if number == 1 else f'{END} '}<image{number}>{BEGIN}"


def lead_lengths(tokenizer: Any, number: int) -> tuple[int, ...]:
    """Return the numbers of tokens before each of so many reference images, each from the one before."""
    return tuple(len(tokenizer(words_before(n)).input_ids) for n in range(1, number + 1))


def reference_words(tokenizer: Any, number: int) -> int:
    """Return by how many tokens reference images lengthen the text, as a multiple of LENGTH_MULTIPLE."""
    count = sum(lead_lengths(tokenizer, number)) + len(tokenizer(END).input_ids) if number else 0
    return -(-count // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def chat_ids(tokenizer: Any, caption: str, images: Sequence[ImagePatches] = ()) -> list[int]:
    """Return the token ids of a caption in its chat behind its images. A long caption is cut, the chat's end is not."""
    pictures = [f"{words_before(n)}{PICTURE * image.tokens}" for n, image in enumerate(images, start=1)]
    head = f"{SYSTEM_PART}{''.join(pictures)}{END}" if images else f"{SYSTEM_PART}{USER}"
    behind = tokenizer(BEHIND).input_ids
    limit = MAX_CHAT_TOKENS - len(tokenizer(USER).input_ids) - len(behind)
    limit += len(tokenizer(head).input_ids)
    words = caption.replace(PICTURE, "") or " "  # as the pipeline reads an empty one
    return [*tokenizer(f"{head}{words}", max_length=limit, truncation=True).input_ids, *behind]


def longest_qwen_21_caption(tokenizer: Any, captions: Collection[str]) -> int:
    """Return the length of a batch of these captions, without reference images."""
    ids = [chat_ids(tokenizer, caption) for caption in captions]
    return language_model.padded_length(ids, LENGTH_MULTIPLE, len(tokenizer(SYSTEM_PART).input_ids))


def encode_qwen_21_captions(model: Any, tokenizer: Any, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    return encode_with_references(model, tokenizer, captions, [()] * len(captions))


def encode_with_references(
    model: Any, tokenizer: Any, captions: Sequence[str], images_by_caption: Sequence[Sequence[ImagePatches]]
) -> tuple[Tensor, Tensor]:
    """Captions behind their images -> states of the words alone [B, L, C], zero after each caption, and a mask [B, L].

    L is a multiple of LENGTH_MULTIPLE.
    """
    picture, dropped = tokenizer.convert_tokens_to_ids(PICTURE), len(tokenizer(SYSTEM_PART).input_ids)
    rows = [chat_ids(tokenizer, *pair) for pair in zip(captions, images_by_caption, strict=True)]
    device, longest = next(model.parameters()).device, max(map(len, rows))
    padded = torch.zeros(len(rows), longest, dtype=torch.long)
    places = torch.zeros(3, len(rows), longest, dtype=torch.long)
    for row, (ids, images) in enumerate(zip(rows, images_by_caption, strict=True)):
        padded[row, : len(ids)] = torch.tensor(ids)
        places[:, row, : len(ids)] = chat_positions(ids, picture, images)
    flat = [image for images in images_by_caption for image in images]
    states = model(padded.to(device), places.to(device), picture, flat)
    read = [[i for i, token in enumerate(ids) if i >= dropped and token != picture] for ids in rows]
    length = language_model.padded_length(read, LENGTH_MULTIPLE) or LENGTH_MULTIPLE
    words = states.new_zeros(len(rows), length, states.shape[-1])
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for row, indices in enumerate(read):
        words[row, : len(indices)] = states[row, torch.tensor(indices, device=device)]
        mask[row, : len(indices)] = 1
    return words, mask.to(device)


# ---- files


def plain_qwen_21_encoder_names(names: Iterable[str]) -> dict[str, str]:
    """Keys of a file -> {key of the language model, or of the vision encoder behind EYES: key in the file}."""
    names = list(names)
    eyes = {name[name.index(EYES) :]: name for name in names if EYES in name}
    return language_model.plain_language_names([name for name in names if EYES not in name]) | eyes


def qwen_21_encoder_tensors(names: Collection[str]) -> list[str]:
    """Return the tensors of a complete encoder, by plain name."""
    blocks = range(list_length(names, f"{EYES}blocks."))
    taps = range(max(list_length(names, f"{EYES}deepstack_merger_list."), 1))
    layers = "{norm,linear_fc1,linear_fc2}"
    return [
        *(name for name in qwen3_vl.qwen3_vl_tensors([n for n in names if not n.startswith(EYES)])),
        *expanded(
            f"{EYES}patch_embed.proj.{BOTH}",
            f"{EYES}pos_embed.weight",
            f"{EYES}merger.{layers}.{BOTH}",
            *(f"{EYES}deepstack_merger_list.{n}.{layers}.{BOTH}" for n in taps),
            *(f"{EYES}blocks.{n}.{{norm1,norm2,attn.qkv,attn.proj}}.{BOTH}" for n in blocks),
            *(f"{EYES}blocks.{n}.mlp.{{linear_fc1,linear_fc2}}.{BOTH}" for n in blocks),
        ),
    ]


def load_qwen_21_encoder(path: Path, dtype: torch.dtype, mmap: bool = True) -> SeeingModel:
    """Read the encoder, from a file or a folder. Raises ConfigError."""
    file = weights.open_weights(path, mmap)
    with complete(path, qwen3_vl.QWEN3_VL):
        named, stored = plain_qwen_21_encoder_names(file), file.shapes()
        model = empty_qwen_21_encoder(*encoder_sizes({plain: stored[name] for plain, name in named.items()}))
        for prefix, network in (("", model.language), (EYES, model.visual)):
            wanted = {name: named[f"{prefix}{name}"] for name in network.state_dict()}
            assign(network, {name: weights.cast_floating(file[key], dtype) for name, key in wanted.items()})
    return model.eval()


def encoder_sizes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the settings of the language model and of the vision encoder, from shapes by plain name. Raises KeyError
    naming a missing one.
    """
    language = {name: shape for name, shape in shapes.items() if not name.startswith(EYES)}
    return language_model.settings_of(language), {
        "depth": list_length(shapes, f"{EYES}blocks."),
        "hidden_size": shapes[f"{EYES}patch_embed.proj.weight"][0],
        "intermediate_size": shapes[f"{EYES}blocks.0.mlp.linear_fc1.weight"][0],
        "num_position_embeddings": shapes[f"{EYES}pos_embed.weight"][0],
        "taps": list_length(shapes, f"{EYES}deepstack_merger_list."),
    }


def empty_qwen_21_encoder(language: Mapping[str, int], vision: Mapping[str, int]) -> SeeingModel:
    """Build a model on the meta device."""
    modeling: Any = importlib.import_module("transformers.models.qwen3_vl.modeling_qwen3_vl")
    rope = {"rope_type": "default", "rope_theta": qwen3_vl.QWEN3_VL_THETA}
    text = modeling.Qwen3VLTextConfig(
        **language,
        head_dim=language_model.HEAD_WIDTH,
        max_position_embeddings=262144,
        rms_norm_eps=1e-6,
        rope_parameters=rope | {"mrope_section": ROPE_SECTIONS, "mrope_interleaved": True},
        use_cache=False,
    )
    settings = dict(vision)
    taps = settings.pop("taps")
    eyes = modeling.Qwen3VLVisionConfig(
        **settings,
        out_hidden_size=language["hidden_size"],
        num_heads=max(settings["hidden_size"] // VISION_HEAD, 1),
        deepstack_visual_indexes=list(TAPS.get(settings["depth"], range(taps))),
        patch_size=PATCH,
        spatial_merge_size=MERGED,
        temporal_patch_size=FRAMES,
    )

    def make() -> nn.Module:
        model = modeling.Qwen3VLTextModel(text)
        model.norm = nn.Identity()
        return SeeingModel(model, modeling.Qwen3VLVisionModel(eyes))

    module = random_networks.build_on_meta(make)
    assert isinstance(module, SeeingModel)
    return module
