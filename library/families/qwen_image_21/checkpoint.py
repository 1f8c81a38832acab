"""Qwen-Image-2.1's files: locate, validate and read each of the three parts, and encode captions."""

from collections.abc import Iterator
from pathlib import Path

from library.config.outside_files import table_of
from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.families.facts import Shapes
from library.families.qwen_image_21 import keys, text_encoder, vae, vae_names
from library.families.qwen_image_21.facts import FACTS, QWEN_21_TRANSFORMER, QWEN_21_VAE
from library.families.qwen_image_21.model import BLOCK, BLOCK_LIST, Qwen21Shape, QwenImage21
from library.families.qwen_image_21.options import OTHER_QWEN_21_FILES
from library.families.shared import qwen3_vl, qwen_vae_names, tokenizers, turbo
from library.families.shared.denoiser_file import DenoiserFile
from library.families.shared.one_encoder import Checkpoint, part_widths
from library.families.shared.part_files import Entries, Part, PartFiles, whole_model
from library.families.shared.tensor_names import count_list_blocks

QWEN_21_PARTS = {
    "denoiser": Part(
        "pretrained_model_name_or_path",
        "a Qwen-Image-2.1 transformer (qwen_image_2.1_bf16.safetensors, or a diffusers folder)",
        ("transformer", "qwen_image_2.1_*.safetensors"),
        ("txt_in.text_norm.weight",),
    ),
    "text_encoder": Part(
        "text_encoder",
        OTHER_QWEN_21_FILES["text_encoder"],
        ("text_encoder", "qwen3vl_8b*.safetensors"),
        (qwen3_vl.VISION_MARK,),
        text_encoder.qwen_21_encoder_tensors,
    ),
    "vae": Part(
        "vae",
        OTHER_QWEN_21_FILES["vae"],
        ("vae", "qwen_image_2.1_vae*.safetensors"),
        (qwen_vae_names.DIFFUSERS_MARK,),
        vae_names.qwen_21_vae_tensors,
    ),
}
QWEN_21_WORDS = {"denoiser": QWEN_21_TRANSFORMER, "text_encoder": qwen3_vl.QWEN3_VL, "vae": QWEN_21_VAE}
QWEN_21_FILES = PartFiles(QWEN_21_PARTS, FACTS, QWEN_21_WORDS, "Qwen-Image-2.1")
QWEN_21_DENOISER = DenoiserFile(
    QWEN_21_TRANSFORMER,
    "Qwen-Image-2.1",
    lambda shapes: QwenImage21(Qwen21Shape.of(shapes)),
    lambda name: "blocks." in name,
    keys.qwen_21_sources,
)


def find_qwen_21_problems(config: RunConfig, path: Path, shapes: Shapes) -> Iterator[Problem]:
    yield from turbo.find_unnamed_turbo(path, config, "base", is_called_turbo(path))
    yield from config.compile.beyond({BLOCK: count_list_blocks(shapes, BLOCK_LIST)})


def is_called_turbo(path: Path) -> bool:
    """Return whether a model's name is Turbo's, or the index of its folder has the steps of a distilled model."""
    whole = whole_model(path)
    if "turbo" in (whole or path).name.lower():
        return True
    return whole is not None and bool(table_of(whole / "model_index.json").get("sample_sigmas"))


def qwen_21_shapes(entries: Entries, part: str) -> Shapes:
    """Return shapes by the network's own keys."""
    if part == "denoiser":
        return QWEN_21_DENOISER.plain_shapes(entries)
    if part == "text_encoder":
        names = text_encoder.plain_qwen_21_encoder_names(entries)
        return {plain: tuple(entries[name]["shape"]) for plain, name in names.items()}
    names = vae_names.plain_qwen_21_vae_names(entries)
    return {plain: vae_names.plain_qwen_21_vae_shape(tuple(entries[name]["shape"])) for plain, name in names.items()}


QWEN_21_CHECKPOINT = Checkpoint(
    QWEN_21_FILES,
    find_qwen_21_problems,
    part_widths("txt_in.in_layer.weight", "img_in.weight", qwen_vae_names.DIFFUSERS_MARK, latents=1),
    qwen_21_shapes,
    QWEN_21_DENOISER.open,
    {"vae": vae.load_qwen_21_vae, "text_encoder": text_encoder.load_qwen_21_encoder},
    tokenizers.QWEN3_VL,
    text_encoder.encode_qwen_21_captions,
    text_encoder.longest_qwen_21_caption,
    max_tokens=text_encoder.MAX_CHAT_TOKENS,
    template_tokens=8,  # of USER and BEHIND
)
