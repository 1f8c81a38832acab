"""FLUX.2's files: locate, validate and read each of the three parts."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from library.config.outside_files import table_of
from library.config.problems import ConfigError, Message, Problem
from library.families.facts import Shapes
from library.families.flux_2 import keys, text_encoder
from library.families.flux_2.facts import FACTS, FLUX_2_TRANSFORMER, VAE, recognise_flux_2
from library.families.flux_2.model import DOUBLE, SINGLE, Flux2, Flux2Shape
from library.families.flux_2.options import DEV_ENCODER, OTHER_FLUX_2_FILES
from library.families.flux_2.versions import VERSIONS, may_be_version, model_in_header
from library.families.shared import autoencoder, expected_tensors, language_model, statistics_vae, tokenizers
from library.families.shared.double_stream_file import DoubleStreamFile
from library.families.shared.one_encoder import Checkpoint, part_widths
from library.families.shared.part_files import Part, PartFiles, complete, plain_shapes_of, read_entries, whole_model

FLUX_2_PARTS = {
    "denoiser": Part(
        "pretrained_model_name_or_path",
        "a FLUX.2 transformer (flux-2-klein-base-4b.safetensors, or a diffusers folder)",
        ("transformer", "flux-2-*.safetensors", "flux2*.safetensors"),
        ("double_blocks.0.img_attn.qkv.weight",),
    ),
    "text_encoder": language_model.qwen3_part(OTHER_FLUX_2_FILES["text_encoder"], "qwen_3_[48]b*.safetensors"),
    "vae": statistics_vae.part(OTHER_FLUX_2_FILES["vae"], "flux2-vae.safetensors"),
}
MISTRAL_PART = Part(
    "text_encoder",
    DEV_ENCODER,
    ("text_encoder", "mistral_3_small_flux2_*.safetensors"),
    (language_model.EMBEDDING,),
    expected_tensors.mistral,
)
FLUX_2_WORDS = {"denoiser": FLUX_2_TRANSFORMER, "text_encoder": language_model.QWEN3, "vae": VAE}
PART_FILES_OF_FLUX_2 = PartFiles(FLUX_2_PARTS, FACTS, FLUX_2_WORDS, "FLUX.2 klein or dev")
DEV_FILES = replace(
    PART_FILES_OF_FLUX_2,
    parts=FLUX_2_PARTS | {"text_encoder": MISTRAL_PART},
    words=FLUX_2_WORDS | {"text_encoder": language_model.MISTRAL},
)
# Captions of dev may come from caches alone: its text encoder is larger than most models.
CACHED_FILES = replace(
    PART_FILES_OF_FLUX_2,
    parts={part: definition for part, definition in FLUX_2_PARTS.items() if part != "text_encoder"},
)
FLUX_2_DENOISER = DoubleStreamFile(
    lambda _shapes: FLUX_2_TRANSFORMER,
    keys.TREES.is_diffusers,
    keys.flux_2_sources,
    lambda shapes: Flux2(Flux2Shape.of(shapes)),
)


def find_flux_2_problems(config: Any, path: Path, shapes: Shapes) -> Iterator[Problem]:
    """Yield problems of a transformer beside this config. Raises ConfigError if its sizes cannot be read."""
    with complete(path, FLUX_2_TRANSFORMER):
        sizes = Flux2Shape.of(shapes)
    yield from other_model_problems(path, sizes, config)
    yield from config.compile.beyond({DOUBLE: sizes.double_blocks, SINGLE: sizes.single_blocks})


def without_encoder(config: Any) -> Iterator[Problem]:
    """Yield problems of options that dev does not support without its text encoder."""
    if not config.cache.cache_text_encoder_outputs_to_disk:
        yield Problem(
            "text_encoder",
            "is needed: give {what}; it may be empty only if cache_text_encoder_outputs_to_disk is set and all "
            "captions are cached beside the images",
            what=Message(DEV_ENCODER),
            also="cache_text_encoder_outputs_to_disk",
        )
    if config.sample.wanted:
        option = "sample_prompts" if config.sample.sample_prompts else "sample_from_captions"
        yield Problem(
            option,
            "cannot be sampled without the text encoder: set text_encoder, or leave it empty",
            also="text_encoder",
            fix={"sample_images": False},
        )


def other_model_problems(path: Path, sizes: Flux2Shape, config: Any) -> Iterator[Problem]:
    """Yield the problem of a transformer that does not match model_version. Distilled kleins have the header of their
    base model, so without a model_version, the name of the file or folder is checked.
    """
    version, in_header = config.model.model_version, model_in_header(sizes.hidden, sizes.guidance)
    if in_header == "dev" and not version:
        yield Problem(
            "model_version",
            ": {path} is FLUX.2 dev: set model_version = dev",
            path=path,
            also="pretrained_model_name_or_path",
            fix={"model_version": "dev"},
        )
    elif version and not may_be_version(version, sizes.hidden, sizes.guidance):
        yield Problem(
            "model_version",
            "= {version}, but {path} is {found}: use model_version = {fitting}",
            version=version,
            path=path,
            found=VERSIONS[in_header].title,
            fitting=in_header,
            also="pretrained_model_name_or_path",
            fix={"model_version": in_header},
        )
    elif not version and not sizes.guidance and calls_itself_distilled(path):
        fitting = in_header.replace("base-", "")
        yield Problem(
            "model_version",
            ": {path} seems to be a distilled klein, whose files look the same: set model_version = {fitting}, or "
            "{found} if it is not",
            path=path,
            fitting=fitting,
            found=in_header,
            also="pretrained_model_name_or_path",
            fix={"model_version": fitting},
        )


def calls_itself_distilled(path: Path) -> bool:
    """Return whether a model's file name or folder names a distilled klein."""
    whole = whole_model(path)
    name = (whole or path).name.lower()
    if "klein" in name:
        return "base" not in name
    return whole is not None and table_of(whole / "model_index.json").get("is_distilled") is True


flux_2_shapes = plain_shapes_of(
    FLUX_2_DENOISER.plain_shapes,
    text_encoder=language_model.plain_language_names,
    vae=autoencoder.plain_vae_names,
)
READ_VAE = partial(statistics_vae.load_statistics_vae, VAE)
FLUX_2_CHECKPOINT = Checkpoint(
    PART_FILES_OF_FLUX_2,
    find_flux_2_problems,
    part_widths("txt_in.weight", "img_in.weight", autoencoder.VAE_MARKER, text_encoder.TAPS),
    flux_2_shapes,
    FLUX_2_DENOISER.open,
    {"vae": READ_VAE, "text_encoder": partial(language_model.load_qwen3, skipped=text_encoder.skipped)},
    tokenizers.QWEN3,
    text_encoder.encode_flux_2_captions,
    None,
    max_tokens=text_encoder.LENGTH,
    template_tokens=text_encoder.QWEN3.tokens,
)
DEV_CHECKPOINT = replace(
    FLUX_2_CHECKPOINT,
    files=DEV_FILES,
    readers={"vae": READ_VAE, "text_encoder": text_encoder.load_short_mistral},
    tokenizer=tokenizers.MISTRAL_REPOSITORY,
    encode=partial(text_encoder.encode_flux_2_captions, template=text_encoder.MISTRAL_TEMPLATE),
    template_tokens=text_encoder.MISTRAL_TEMPLATE.tokens,
)
CACHED_CHECKPOINT = replace(DEV_CHECKPOINT, files=CACHED_FILES, readers={"vae": READ_VAE})


def transformer_sizes(config: Any) -> Flux2Shape | None:
    """Return the sizes of the transformer, from its header; None if its file is not on this machine."""
    with contextlib.suppress(ConfigError, KeyError):
        if path := PART_FILES_OF_FLUX_2.present(config, "denoiser"):
            shapes = flux_2_shapes(read_entries(path), "denoiser")
            return Flux2Shape.of(shapes) if recognise_flux_2(shapes) else None  # FLUX.1 has most of its names, too
    return None


def flux_2_checkpoint(config: Any, sizes: Flux2Shape | None) -> Checkpoint:
    """Return the files of a model, determined by its transformer, or by the options without one."""
    if not (sizes.guidance if sizes else config.model.model_version == "dev"):
        return FLUX_2_CHECKPOINT
    return DEV_CHECKPOINT if DEV_FILES.named(config, "text_encoder") else CACHED_CHECKPOINT
