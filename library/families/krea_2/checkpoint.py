"""Krea 2's files: locate, validate and read each of the three parts, and encode captions."""

from collections.abc import Iterator
from pathlib import Path

from library.config.outside_files import table_of
from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.families.facts import Shapes
from library.families.krea_2 import keys
from library.families.krea_2.facts import FACTS, KREA_2_TRANSFORMER
from library.families.krea_2.model import Krea2, Krea2Shape, count_krea_2_blocks
from library.families.krea_2.options import OTHER_KREA_2_FILES
from library.families.shared import qwen3_vl, qwen_chat, qwen_vae, qwen_vae_names, tokenizers, turbo
from library.families.shared.denoiser_file import DenoiserFile
from library.families.shared.one_encoder import Checkpoint, part_widths
from library.families.shared.part_files import Part, PartFiles, plain_shapes_of, whole_model

KREA_2_PARTS = {
    "denoiser": Part(
        "pretrained_model_name_or_path",
        "a Krea 2 transformer (krea2_raw_bf16.safetensors, or a diffusers folder)",
        ("transformer", "krea2_*.safetensors", "raw.safetensors", "turbo.safetensors"),
        ("txtfusion.projector.weight",),
    ),
    "text_encoder": qwen3_vl.part(OTHER_KREA_2_FILES["text_encoder"]),
    "vae": qwen_vae.part(OTHER_KREA_2_FILES["vae"], "qwen_image_vae.safetensors"),
}
KREA_2_WORDS = {"denoiser": KREA_2_TRANSFORMER, "text_encoder": qwen3_vl.QWEN3_VL, "vae": "a Qwen-Image VAE"}
KREA_2_FILES = PartFiles(KREA_2_PARTS, FACTS, KREA_2_WORDS, "Krea 2 Raw or Turbo")
KREA_2_DENOISER = DenoiserFile(
    KREA_2_TRANSFORMER,
    "Krea 2",
    lambda shapes: Krea2(Krea2Shape.of(shapes)),
    lambda name: "blocks." in name,
    keys.krea_2_sources,
    keys.krea_2_view,
)
krea_2_shapes = plain_shapes_of(
    KREA_2_DENOISER.plain_shapes,
    text_encoder=qwen3_vl.plain_qwen3_vl_names,
    vae=qwen_vae_names.plain_qwen_vae_names,
)
TEXT = qwen3_vl.TappedText(
    first=2, step=3, before=qwen_chat.BEFORE, behind=qwen_chat.BEHIND, max_tokens=512, multiple=64
)


def find_krea_2_problems(config: RunConfig, path: Path, shapes: Shapes) -> Iterator[Problem]:
    yield from turbo.find_unnamed_turbo(path, config, "raw", is_krea_2_turbo(path))
    yield from config.compile.beyond(count_krea_2_blocks(shapes))


def is_krea_2_turbo(path: Path) -> bool:
    """Return whether a model's name, or the index of its folder, is Turbo's."""
    whole = whole_model(path)
    if "turbo" in (whole or path).name.lower():
        return True
    return whole is not None and table_of(whole / "model_index.json").get("is_distilled") is True


KREA_2_CHECKPOINT = Checkpoint(
    KREA_2_FILES,
    find_krea_2_problems,
    part_widths("txtmlp.1.weight", "first.weight", qwen_vae_names.DIFFUSERS_MARK),
    krea_2_shapes,
    KREA_2_DENOISER.open,
    {"vae": qwen_vae.load_qwen_vae, "text_encoder": qwen3_vl.reader(TEXT)},
    tokenizers.QWEN3_VL,
    TEXT.encode,
    TEXT.longest,
    max_tokens=TEXT.max_tokens,
    template_tokens=5,  # of TEXT.behind
)
