"""Qwen-Image's files: locate, validate and read each of the three parts."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from library.config.outside_files import table_of
from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.families.facts import Shapes
from library.families.qwen_image import pictures, text_encoder
from library.families.qwen_image.facts import FACTS, INDEX, TEXT_ENCODER, VAE, options_of
from library.families.qwen_image.model import BLOCK_LIST, QwenImage, QwenShape
from library.families.qwen_image.options import OTHER_QWEN_FILES
from library.families.qwen_image.variants import EDIT_2511, QWEN_VARIANTS, TRANSFORMER, QwenVariant, called
from library.families.shared import expected_tensors, qwen_vae, qwen_vae_names, tokenizers, weights
from library.families.shared.denoiser_file import DenoiserFile
from library.families.shared.one_encoder import Checkpoint, part_widths
from library.families.shared.part_files import (
    Part,
    PartFiles,
    complete,
    pipeline,
    plain_shapes_of,
    read_entries,
    whole_model,
)
from library.families.shared.tensor_names import count_list_blocks
from library.families.shared.weights import shapes_of

QWEN_PARTS = {
    "denoiser": Part(
        "pretrained_model_name_or_path",
        "a Qwen-Image transformer (qwen_image_bf16.safetensors, or a diffusers folder)",
        ("transformer", "qwen_image_*.safetensors"),
        ("transformer_blocks.0.img_mod.1.weight",),
    ),
    "text_encoder": Part(
        "text_encoder",
        OTHER_QWEN_FILES["text_encoder"],
        ("text_encoder", "qwen_2.5_vl*.safetensors"),
        ("layers.0.self_attn.q_proj.bias",),
        expected_tensors.vision_language_model,
    ),
    "vae": qwen_vae.part(OTHER_QWEN_FILES["vae"], "qwen_image_vae.safetensors"),
}
SEEING = replace(
    QWEN_PARTS["text_encoder"],
    what="the Qwen2.5-VL text encoder with its vision part (qwen_2.5_vl_7b.safetensors)",
    marker=(pictures.VISION_MARK,),
)
PIPELINES = {  # of diffusers -> the value of model_version
    "QwenImagePipeline": "original",
    "QwenImageEditPipeline": "edit",
    "QwenImageEditPlusPipeline": "edit-2509",
    "QwenImageLayeredPipeline": "layered",
}


@functools.cache
def qwen_checkpoint(variant: QwenVariant) -> Checkpoint:
    """Return the Checkpoint of a variant, which loads its files."""
    seeing = bool(variant.template)
    parts = QWEN_PARTS | ({"text_encoder": SEEING} if seeing else {})
    words = {"denoiser": (TRANSFORMER, EDIT_2511), "vae": VAE, "text_encoder": TEXT_ENCODER}
    files = PartFiles(parts, FACTS, words, "Qwen-Image or Qwen-Image-Edit")
    denoiser = DenoiserFile(
        TRANSFORMER,
        variant.title,
        lambda shapes: QwenImage(QwenShape.of(shapes, variant.still_references)),
        lambda name: "blocks." in name,
        lambda plain: {name: (name, 0, 1) for name in plain if name != INDEX},
    )
    before = text_encoder.BEFORE_EDIT if seeing else text_encoder.BEFORE

    plain_shapes = plain_shapes_of(
        denoiser.plain_shapes,
        vae=qwen_vae_names.plain_qwen_vae_names,
        text_encoder=functools.partial(text_encoder.plain_qwen_names, seeing=seeing),
    )
    return Checkpoint(
        files,
        find_qwen_problems,
        part_widths("txt_in.weight", "img_in.weight", qwen_vae_names.DIFFUSERS_MARK),
        plain_shapes,
        denoiser.open,
        {"vae": qwen_vae.load_qwen_vae, "text_encoder": functools.partial(load_qwen_encoder, seeing)},
        tokenizers.QWEN_VL,
        text_encoder.encode_qwen_captions,
        functools.partial(text_encoder.longest_qwen_caption, before=before),
        max_tokens=text_encoder.MAX_TOKENS,
        template_tokens=5,
    )


def find_qwen_problems(config: RunConfig, path: Path, shapes: Shapes) -> Iterator[Problem]:
    yield from other_version_problems(path, config)
    yield from config.compile.beyond({"QwenImageTransformerBlock": count_list_blocks(shapes, BLOCK_LIST)})


def other_version_problems(path: Path, config: Any) -> Iterator[Problem]:
    """Yield the problem of a model of another version than model_version. If only its name indicates that, the problem
    names both choices.
    """
    option_value, proven = config.model.model_version, version_of(path)
    if proven == "layered":
        yield Problem(
            "pretrained_model_name_or_path",
            ": {path} is Qwen-Image-Layered, which is not trained here: use Qwen-Image or Qwen-Image-Edit",
            path=path,
        )
    elif proven and proven != (option_value or "original"):
        yield Problem(
            "model_version",
            ": {path} is {title}: set model_version = {version}",
            path=path,
            title=QWEN_VARIANTS[proven].title,
            version=proven,
            also="pretrained_model_name_or_path",
            fix=options_of(proven),
        )
    elif not option_value and not proven and (version := called(path)):
        yield Problem(
            "model_version",
            ": {path} is {title} by its name: set model_version = {version}, or original if it is Qwen-Image",
            path=path,
            title=QWEN_VARIANTS[version].title,
            version=version,
            also="pretrained_model_name_or_path",
            fix=options_of(version),
        )


def version_of(path: Path) -> str:
    """Return the model_version that a model's folder or header proves, else ""."""
    if whole := whole_model(path):
        version = PIPELINES.get(pipeline(whole), "")
        return "edit-2511" if version == "edit-2509" and has_still_references(whole) else version
    shapes = shapes_of(read_entries(path))
    return "edit-2511" if FACTS.recognise(shapes) == EDIT_2511 else ""


def has_still_references(whole: Path) -> bool:
    return bool(table_of(whole / "transformer" / "config.json").get("zero_cond_t"))


def load_qwen_encoder(seeing: bool, path: Path, dtype: Any, mmap: bool = True) -> nn.Module:
    """Read Qwen2.5-VL, or its language model alone, from a file or a folder of any transformers version."""
    file = weights.open_weights(path, mmap)
    with complete(path, TEXT_ENCODER):
        named = text_encoder.plain_qwen_names(file, seeing)
        tensors = {plain: weights.cast_floating(file[name], dtype) for plain, name in named.items()}
        return pictures.build_vision_model(tensors) if seeing else text_encoder.build_text_encoder(tensors)
