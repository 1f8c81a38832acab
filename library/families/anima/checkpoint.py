"""Anima's files: locate, validate and read each of the parts, and encode captions by Qwen3."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.families.anima import adapter, keys
from library.families.anima.facts import ADAPTER, BARE, FACTS, MARK, TRANSFORMER
from library.families.anima.model import BLOCK, Anima, AnimaShape, count
from library.families.anima.options import OTHERS
from library.families.facts import Shapes
from library.families.shared import expected_tensors, hub, language_model, qwen_vae, qwen_vae_names, tokenizers, weights
from library.families.shared.denoiser_file import DenoiserFile, Extra
from library.families.shared.one_encoder import Checkpoint
from library.families.shared.part_files import Entries, Part, PartFiles, read_entries

PARTS = {
    "denoiser": Part(
        "pretrained_model_name_or_path",
        "an Anima transformer (anima-*.safetensors, or a diffusers folder)",
        ("transformer", "anima*.safetensors"),
        ("blocks.0.mlp.layer1.weight",),
    ),
    "text_encoder": Part(
        "qwen3",
        OTHERS["qwen3"],
        ("text_encoder", "qwen_3_06b*.safetensors"),
        (language_model.QWEN3_MARK,),
        expected_tensors.language_model,
    ),
    "vae": qwen_vae.part(OTHERS["vae"], "qwen_image_vae.safetensors"),
}
BESIDE = {"llm_adapter": Part("llm_adapter_path", "the text adapter of Anima", ("text_conditioner",), (MARK,))}
WORDS = {
    "denoiser": (TRANSFORMER, BARE),
    "text_encoder": (language_model.QWEN3,),
    "vae": ("a Qwen-Image VAE",),
    "llm_adapter": (ADAPTER, TRANSFORMER),
}
FILES = {
    with_adapter: PartFiles(PARTS | (BESIDE if with_adapter else {}), FACTS, WORDS, "Anima")
    for with_adapter in (False, True)
}
DENOISER = DenoiserFile(
    TRANSFORMER, "Anima", lambda shapes: Anima(AnimaShape.of(shapes)), lambda name: "blocks." in name, keys.sources
)
MAX_TOKENS = 512  # of a caption, for either tokenizer


def files_of(config: Any) -> PartFiles:
    named = FILES[True].named(config, "llm_adapter")
    return FILES[bool(config.model.llm_adapter_path or (named and not hub.is_id(named)))]


def checkpoint_of(config: Any) -> Checkpoint:
    """Return how this run's files are loaded."""
    files, lengths = files_of(config), (config.model.qwen3_max_token_length, config.model.t5_max_token_length)
    return dataclasses.replace(
        CHECKPOINT,
        files=files,
        problems=functools.partial(problems, files),
        open_denoiser=functools.partial(open_denoiser, files, config),
        encode=functools.partial(encode_anima_captions, length=lengths[0]),
        longest=lambda _tokenizer, _captions: max(lengths),
    )


def problems(files: PartFiles, config: RunConfig) -> Iterator[Problem]:
    """Problems of the parts, from their headers, each with its option and the fix."""
    beside = _adapter_shapes(files, config)

    def of_denoiser(path: Path, own: Shapes) -> Iterator[Problem]:
        if "llm_adapter" not in files.parts and f"{adapter.PREFIX}{keys.EMBEDDING}" not in own:
            yield Problem(
                "llm_adapter_path",
                "is not set, and {path} has no text adapter: give the file of one, or a model that has it",
                path=path,
                also="pretrained_model_name_or_path",
            )
        yield from config.compile.beyond({BLOCK: count(own), adapter.BLOCK: adapter.count({**own, **beside})})

    def widths(own: Shapes) -> dict[str, tuple[str, int]]:
        channels = own.get("final_layer.linear.weight", (0,))[0] // 4
        source = {**own, **beside}.get(f"{adapter.PREFIX}blocks.0.cross_attn.k_proj.weight")
        text = {"text_encoder": (language_model.EMBEDDING, source[1])} if source else {}
        return {"vae": (qwen_vae_names.MARK, channels)} | text

    yield from files.fitting(config, plain_shapes, of_denoiser, widths)


def _adapter_shapes(files: PartFiles, config: RunConfig) -> Shapes:
    """Return the shapes of a separate, valid adapter file on this machine; `fitting` reports an invalid one."""
    with contextlib.suppress(ConfigError):
        if "llm_adapter" in files.parts and (path := files.present(config, "llm_adapter")):
            return plain_shapes(read_entries(path), "llm_adapter")
    return {}


def plain_shapes(entries: Entries, part: str) -> Shapes:
    """Shapes by the network's own keys."""
    if part == "denoiser":
        return DENOISER.plain_shapes(entries)
    known = {"vae": qwen_vae_names.plain, "text_encoder": language_model.plain_names, "llm_adapter": keys.adapter}
    return {plain: tuple(entries[name]["shape"]) for plain, name in known[part](entries).items()}


def open_denoiser(
    files: PartFiles, config: RunConfig, path: Path, dtype: torch.dtype, keep_8_bits: bool, mmap: bool = True
) -> Any:
    """DenoiserFile.open, with the adapter from its own file, if there is one."""
    beside: Extra = {}
    if "llm_adapter" in files.parts:
        file = weights.read(files.located(config, "llm_adapter"), mmap)
        shapes = file.shapes()
        beside = {own: (shapes[name], file.source(name)) for own, name in keys.adapter(file).items()}
    return DENOISER.open(path, dtype, keep_8_bits, mmap, beside)


def encode_anima_captions(
    model: Any, tokenizer: Any, captions: Sequence[str], length: int = MAX_TOKENS
) -> tuple[Tensor, Tensor]:
    """Captions, without any template -> the last states of Qwen3-0.6B [B, length, C], zero behind each caption,
    and a mask [B, length] of its own tokens."""
    ids = tokenizer(list(captions), max_length=length, truncation=True).input_ids if captions else []
    return language_model.encode(model, ids, length)


CHECKPOINT = Checkpoint(
    FILES[False],
    functools.partial(problems, FILES[False]),
    plain_shapes,
    DENOISER.open,
    {"vae": qwen_vae.load, "text_encoder": language_model.load_qwen3},
    tokenizers.QWEN3_SMALL,
    encode_anima_captions,
    lambda _tokenizer, _captions: MAX_TOKENS,
)
