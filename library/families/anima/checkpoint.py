"""Anima's files: locate, validate and read each of the parts, and encode captions by Qwen3."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.families.anima import adapter, keys
from library.families.anima.facts import ADAPTER_MARK, ANIMA_ADAPTER, ANIMA_TRANSFORMER, BARE, FACTS
from library.families.anima.model import DENOISER_BLOCK, Anima, AnimaShape
from library.families.anima.options import OTHER_FILES
from library.families.facts import Shapes
from library.families.shared import hub, language_model, qwen_vae, qwen_vae_names, tokenizers, weights
from library.families.shared.denoiser_file import DenoiserFile, Extra
from library.families.shared.one_encoder import Checkpoint
from library.families.shared.part_files import Part, PartFiles, plain_shapes_of, read_entries
from library.families.shared.tensor_names import count_list_blocks

ANIMA_PARTS = {
    "denoiser": Part(
        "pretrained_model_name_or_path",
        "an Anima transformer (anima-*.safetensors, or a diffusers folder)",
        ("transformer", "anima*.safetensors"),
        ("blocks.0.mlp.layer1.weight",),
    ),
    "text_encoder": language_model.qwen3_part(OTHER_FILES["qwen3"], "qwen_3_06b*.safetensors", "qwen3"),
    "vae": qwen_vae.part(OTHER_FILES["vae"], "qwen_image_vae.safetensors"),
}
OPTIONAL_PARTS = {
    "llm_adapter": Part("llm_adapter_path", "the text adapter of Anima", ("text_conditioner",), (ADAPTER_MARK,))
}
ANIMA_WORDS = {
    "denoiser": (ANIMA_TRANSFORMER, BARE),
    "text_encoder": (language_model.QWEN3,),
    "vae": ("a Qwen-Image VAE",),
    "llm_adapter": (ANIMA_ADAPTER, ANIMA_TRANSFORMER),
}
PART_FILES = {
    with_adapter: PartFiles(ANIMA_PARTS | (OPTIONAL_PARTS if with_adapter else {}), FACTS, ANIMA_WORDS, "Anima")
    for with_adapter in (False, True)
}
ANIMA_DENOISER = DenoiserFile(
    ANIMA_TRANSFORMER,
    "Anima",
    lambda shapes: Anima(AnimaShape.of(shapes)),
    lambda name: "blocks." in name,
    keys.anima_sources,
)
anima_shapes = plain_shapes_of(
    ANIMA_DENOISER.plain_shapes,
    vae=qwen_vae_names.plain_qwen_vae_names,
    text_encoder=language_model.plain_language_names,
    llm_adapter=keys.adapter,
)
MAX_TOKENS = 512  # of a caption, for either tokenizer


def anima_part_files(config: Any) -> PartFiles:
    named = PART_FILES[True].named(config, "llm_adapter")
    return PART_FILES[bool(config.model.llm_adapter_path or (named and not hub.is_hub_id(named)))]


def anima_checkpoint(config: Any) -> Checkpoint:
    """Return the Checkpoint of a run, which loads its files."""
    files, lengths = anima_part_files(config), (config.model.qwen3_max_token_length, config.model.t5_max_token_length)
    return Checkpoint(
        files,
        functools.partial(find_anima_problems, files),
        functools.partial(anima_widths, files, config),
        anima_shapes,
        functools.partial(open_denoiser, files, config),
        {"vae": qwen_vae.load_qwen_vae, "text_encoder": language_model.load_qwen3},
        tokenizers.QWEN3_SMALL,
        functools.partial(encode_anima_captions, length=lengths[0]),
        lambda _tokenizer, _captions: max(lengths),
    )


def find_anima_problems(files: PartFiles, config: RunConfig, path: Path, shapes: Shapes) -> Iterator[Problem]:
    """Yield the problem of a missing adapter, and of blocks to compile that the model lacks."""
    if "llm_adapter" not in files.parts and f"{adapter.ADAPTER_NAMES_PREFIX}{keys.EMBEDDING}" not in shapes:
        yield Problem(
            "llm_adapter_path",
            "is not set, and {path} has no text adapter: give the file of one, or a model that has it",
            path=path,
            also="pretrained_model_name_or_path",
        )
    yield from config.compile.beyond(
        {
            DENOISER_BLOCK: count_list_blocks(shapes, "blocks"),
            adapter.ADAPTER_BLOCK: adapter.count_adapter_blocks({**shapes, **_adapter_shapes(files, config)}),
        }
    )


def anima_widths(files: PartFiles, config: RunConfig, shapes: Shapes) -> dict[str, tuple[str, int]]:
    """Return the widths that the denoiser expects of the VAE and, by its adapter, of the text encoder."""
    channels = shapes.get("final_layer.linear.weight", (0,))[0] // 4
    with_adapter = {**shapes, **_adapter_shapes(files, config)}
    source = with_adapter.get(f"{adapter.ADAPTER_NAMES_PREFIX}blocks.0.cross_attn.k_proj.weight")
    text = {"text_encoder": (language_model.EMBEDDING, source[1])} if source else {}
    return {"vae": (qwen_vae_names.DIFFUSERS_MARK, channels)} | text


def _adapter_shapes(files: PartFiles, config: RunConfig) -> Shapes:
    """Return the shapes of a separate, valid adapter file on this machine; `fitting` reports an invalid one."""
    with contextlib.suppress(ConfigError):
        if "llm_adapter" in files.parts and (path := files.present(config, "llm_adapter")):
            return anima_shapes(read_entries(path), "llm_adapter")
    return {}


def open_denoiser(
    files: PartFiles, config: RunConfig, path: Path, dtype: torch.dtype, keep_8_bits: bool, mmap: bool = True
) -> Any:
    """Open the denoiser like DenoiserFile.open, with the adapter from a separate file, if there is one."""
    beside: Extra = {}
    if "llm_adapter" in files.parts:
        file = weights.open_weights(files.located(config, "llm_adapter"), mmap)
        shapes = file.shapes()
        beside = {plain: (shapes[name], file.source(name)) for plain, name in keys.adapter(file).items()}
    return ANIMA_DENOISER.open(path, dtype, keep_8_bits, mmap, beside)


def encode_anima_captions(model: Any, tokenizer: Any, captions: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
    """Captions, without any template -> the last states of Qwen3-0.6B [B, length, C], zero after each caption, and a
    mask [B, length] of its own tokens.
    """
    ids = tokenizer(list(captions), max_length=length, truncation=True).input_ids if captions else []
    return language_model.encode_ids(model, ids, length)
