"""Z-Image's files: locate, validate and read each of the three parts, and encode captions."""

import functools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from library.config.outside_files import table_of
from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.families.facts import Shapes
from library.families.shared import autoencoder, expected_tensors, language_model, tokenizers, turbo
from library.families.shared.denoiser_file import DenoiserFile
from library.families.shared.one_encoder import Checkpoint, part_widths
from library.families.shared.part_files import Part, PartFiles, plain_shapes_of, whole_model
from library.families.zimage import keys
from library.families.zimage.facts import FACTS, ZIMAGE_TRANSFORMER
from library.families.zimage.model import ZImage, ZImageShape, count_zimage_blocks
from library.families.zimage.options import OTHER_ZIMAGE_FILES

ZIMAGE_PARTS = {
    "denoiser": Part(
        "pretrained_model_name_or_path",
        "a Z-Image transformer (z_image_bf16.safetensors, or a diffusers folder)",
        ("transformer", "z_image_*.safetensors"),
        ("layers.0.attention.to_q.weight",),
    ),
    "text_encoder": language_model.qwen3_part(OTHER_ZIMAGE_FILES["text_encoder"], "qwen_3_4b*.safetensors"),
    "vae": Part(
        "vae",
        OTHER_ZIMAGE_FILES["vae"],
        ("vae", "ae.safetensors"),
        (autoencoder.VAE_MARKER,),
        expected_tensors.autoencoder_tensors,
    ),
}
ZIMAGE_WORDS = {"denoiser": ZIMAGE_TRANSFORMER, "text_encoder": language_model.QWEN3, "vae": "a VAE"}
PART_FILES = PartFiles(ZIMAGE_PARTS, FACTS, ZIMAGE_WORDS, "Z-Image or Z-Image Turbo")
ZIMAGE_DENOISER = DenoiserFile(
    ZIMAGE_TRANSFORMER,
    "Z-Image",
    lambda shapes: ZImage(ZImageShape.of(shapes)),
    lambda name: "layers." in name or "_refiner." in name,
    keys.zimage_sources,
)
zimage_shapes = plain_shapes_of(
    ZIMAGE_DENOISER.plain_shapes,
    text_encoder=language_model.plain_language_names,
    vae=autoencoder.plain_vae_names,
)
# The text encoder is Qwen3-4B.
SKIPPED_LAYERS = 1  # at its end, which the denoiser does not read
MAX_TOKENS = 512  # of a caption in its template
LENGTH_MULTIPLE = 64  # a batch of captions is padded to a multiple of this many tokens
TEMPLATE = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"  # before and after a caption
TURBO_SHIFT = 3.0  # of the scheduler in Turbo's folder; the base model's differs


def find_zimage_problems(config: RunConfig, path: Path, shapes: Shapes) -> Iterator[Problem]:
    yield from turbo.find_unnamed_turbo(path, config, "base", calls_itself_turbo(path))
    yield from config.compile.beyond(count_zimage_blocks(shapes))


def calls_itself_turbo(path: Path) -> bool:
    """Return whether a model's name or the scheduler in its folder is Turbo's. De-Turbo is trained like base."""
    whole = whole_model(path)
    name = (whole or path).name.lower().replace("_", "-")
    if "turbo" in name:
        return "de-turbo" not in name and "deturbo" not in name
    return whole is not None and table_of(whole / "scheduler" / "scheduler_config.json").get("shift") == TURBO_SHIFT


def zimage_token_ids(tokenizer: Any, captions: Collection[str]) -> list[list[int]]:
    texts = [f"{TEMPLATE[0]}{caption}{TEMPLATE[1]}" for caption in captions]
    return tokenizer(texts, max_length=MAX_TOKENS, truncation=True).input_ids if texts else []


def longest_zimage_caption(tokenizer: Any, captions: Collection[str]) -> int:
    return language_model.padded_length(zimage_token_ids(tokenizer, captions), LENGTH_MULTIPLE)


def encode_zimage_captions(model: Any, tokenizer: Any, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Captions -> the states before the last layer, template included [B, L, C], zero after each, and a mask [B, L] of
    its tokens. L is a multiple of LENGTH_MULTIPLE.
    """
    return language_model.encode_ids(model, zimage_token_ids(tokenizer, captions), LENGTH_MULTIPLE)


ZIMAGE_CHECKPOINT = Checkpoint(
    PART_FILES,
    find_zimage_problems,
    part_widths("cap_embedder.1.weight", "all_x_embedder.2-1.weight", autoencoder.VAE_MARKER),
    zimage_shapes,
    ZIMAGE_DENOISER.open,
    {
        "vae": lambda path, dtype, mmap: autoencoder.load_autoencoder(path, dtype, autoencoder.FLUX, mmap),
        "text_encoder": functools.partial(language_model.load_qwen3, skipped=lambda _layers: SKIPPED_LAYERS),
    },
    tokenizers.QWEN3,
    encode_zimage_captions,
    longest_zimage_caption,
    max_tokens=MAX_TOKENS,
    template_tokens=8,  # of TEMPLATE
)
