"""FLUX 3's files: locate, validate and read each of the three parts."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from library.config.problems import Problem
from library.families.facts import Shapes
from library.families.flux_3 import keys, text_encoder
from library.families.flux_3.facts import DISTILLED, FACTS, FLUX_3_TRANSFORMER, recognise_flux_3
from library.families.flux_3.model import JOINT, OF_IMAGE, OF_REFERENCES, OF_TEXT, Flux3, Flux3Shape
from library.families.flux_3.options import OTHER_FLUX_3_FILES
from library.families.shared import autoencoder, qwen3_vl, statistics_vae, tokenizers
from library.families.shared.double_stream_file import DoubleStreamFile
from library.families.shared.one_encoder import Checkpoint, part_widths
from library.families.shared.part_files import Part, PartFiles, complete, plain_shapes_of

SHARED_VAE = "a FLUX.2 VAE"  # the description by `recognise`


def encoder_tensors(shapes: Shapes) -> list[str]:
    """Return the tensors of a complete text encoder, which has more layers than are read."""
    return [*dict.fromkeys([*qwen3_vl.qwen3_vl_tensors(shapes), f"layers.{text_encoder.TAPS}.input_layernorm.weight"])]


FLUX_3_PARTS = {
    "denoiser": Part(
        "pretrained_model_name_or_path",
        "a FLUX.3 transformer (flux3_image_klein_base_bf16.safetensors, or a diffusers folder)",
        ("transformer", "flux3*.safetensors", "flux-3*.safetensors", "flux_3*.safetensors"),
        ("single_blocks.0.mlp_in.weight",),
    ),
    "text_encoder": replace(qwen3_vl.part(OTHER_FLUX_3_FILES["text_encoder"]), tensors=encoder_tensors),
    "vae": statistics_vae.part(OTHER_FLUX_3_FILES["vae"], "flux2-vae.safetensors", "flux3*vae*.safetensors"),
}
FLUX_3_FILES = PartFiles(
    FLUX_3_PARTS,
    FACTS,
    {"denoiser": (FLUX_3_TRANSFORMER, DISTILLED), "text_encoder": qwen3_vl.QWEN3_VL, "vae": SHARED_VAE},
    "FLUX 3 Image Klein Base",
)
FLUX_3_DENOISER = DoubleStreamFile(
    lambda shapes: recognise_flux_3(shapes) or FLUX_3_TRANSFORMER,
    keys.LAYOUTS.is_diffusers,
    keys.flux_3_sources,
    lambda shapes: Flux3(Flux3Shape.of(shapes)),
)


def find_flux_3_problems(config: Any, path: Path, shapes: Shapes) -> Iterator[Problem]:
    """Yield problems of a transformer beside this config. Raises ConfigError if its sizes cannot be read."""
    with complete(path, recognise_flux_3(shapes) or FLUX_3_TRANSFORMER):
        sizes = Flux3Shape.of(shapes)
    blocks = dict.fromkeys((OF_IMAGE, OF_REFERENCES, OF_TEXT), sizes.mode_blocks)
    yield from config.compile.beyond(blocks | {JOINT: sizes.joint_blocks})


flux_3_shapes = plain_shapes_of(
    FLUX_3_DENOISER.plain_shapes,
    text_encoder=qwen3_vl.plain_qwen3_vl_names,
    vae=autoencoder.plain_vae_names,
)
FLUX_3_CHECKPOINT = Checkpoint(
    FLUX_3_FILES,
    find_flux_3_problems,
    part_widths("txt_in.weight", "emb_in.image.weight", autoencoder.VAE_MARKER, text_encoder.TAPS),
    flux_3_shapes,
    FLUX_3_DENOISER.open,
    {
        "vae": partial(statistics_vae.load_statistics_vae, SHARED_VAE),
        "text_encoder": partial(qwen3_vl.load_qwen3_vl, text_encoder.unread_layers),
    },
    tokenizers.QWEN3_VL,
    text_encoder.encode_flux_3_captions,
    text_encoder.longest_window,
    max_tokens=text_encoder.MAX_CHAT_TOKENS,
    template_tokens=text_encoder.TEMPLATE_TOKENS,
)
