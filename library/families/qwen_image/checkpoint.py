"""Qwen-Image's files: where each of the three parts is, whether it is what it should be, and how it is read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.families.facts import Shapes
from library.families.qwen_image import text_encoder
from library.families.qwen_image.facts import FACTS, TRANSFORMER, VAE
from library.families.qwen_image.model import QwenImage, QwenShape, count
from library.families.qwen_image.options import OTHERS
from library.families.shared import language_model, qwen_vae, qwen_vae_names, tokenizers, weights
from library.families.shared.denoiser_file import DenoiserFile
from library.families.shared.one_encoder import Checkpoint
from library.families.shared.part_files import Entries, Part, PartFiles, complete, pipeline, whole_model

PARTS = {
    "denoiser": Part(
        "pretrained_model_name_or_path",
        "a Qwen-Image transformer (qwen_image_bf16.safetensors, or a diffusers folder)",
        ("transformer", "qwen_image_*.safetensors"),
        ("transformer_blocks.0.img_mod.1.weight",),
    ),
    "text_encoder": Part(
        "text_encoder",
        OTHERS["text_encoder"],
        ("text_encoder", "qwen_2.5_vl*.safetensors"),
        ("layers.0.self_attn.q_proj.bias",),
    ),
    "vae": Part("vae", OTHERS["vae"], ("vae", "qwen_image_vae.safetensors"), (qwen_vae_names.MARK,)),
}
FILES = PartFiles(PARTS, FACTS, {"denoiser": TRANSFORMER, "vae": VAE}, "Qwen-Image or Qwen-Image-2512")
DENOISER = DenoiserFile(
    TRANSFORMER, "Qwen-Image", lambda shapes: QwenImage(QwenShape.of(shapes)), lambda name: "blocks." in name
)
RELATIVES = {  # pipelines of diffusers -> what they are of
    "QwenImageEditPipeline": "Qwen-Image-Edit",
    "QwenImageEditPlusPipeline": "Qwen-Image-Edit-2509",
    "QwenImageLayeredPipeline": "Qwen-Image-Layered",
}


def problems(config: RunConfig) -> Iterator[Problem]:
    """What is missing or wrong among the three parts, from their headers, each with its option and the fix."""

    def of_denoiser(path: Path, shapes: Shapes) -> Iterator[Problem]:
        yield from relative(path, config)
        yield from config.compile.beyond({"QwenImageTransformerBlock": count(shapes)})

    yield from FILES.fitting(config, plain_shapes, of_denoiser, lambda own: {
        "text_encoder": (language_model.EMBEDDING, own.get("txt_in.weight", (0, 0))[1]),
        "vae": (qwen_vae_names.MARK, own.get("img_in.weight", (0, 0))[1] // 4),
    })  # fmt: skip


def relative(path: Path, config: Any) -> Iterator[Problem]:
    """Models with the same header that are trained with reference images; only the user knows what a file is."""
    if whole := whole_model(path):
        if title := RELATIVES.get(pipeline(whole)):
            yield Problem("pretrained_model_name_or_path",
                ": {path} is {title}, which is not trained here: use Qwen-Image or Qwen-Image-2512",
                path=whole, title=title)  # fmt: skip
    elif not config.model.model_version and "edit" in path.name.lower():
        yield Problem("pretrained_model_name_or_path",
            ": {path} is Qwen-Image-Edit by its name, which is not trained here: if it is Qwen-Image, "
            "set model_version = original", path=path, also="model_version")  # fmt: skip


def plain_shapes(entries: Entries, part: str) -> Shapes:
    """Shapes by the network's own keys."""
    if part == "denoiser":
        return DENOISER.plain_shapes(entries)
    known = qwen_vae_names.plain(entries) if part == "vae" else language_model.plain_names(entries)
    return {plain: tuple(entries[name]["shape"]) for plain, name in known.items()}


def load_text_encoder(path: Path, dtype: Any, mmap: bool = True) -> nn.Module:
    """Read the language model of Qwen2.5-VL: a single file, or a folder of whatever version of transformers."""
    file = weights.read(path, mmap)
    with complete(path, "a Qwen2.5-VL text encoder"):
        named = language_model.plain_names(file)
        return text_encoder.build({plain: weights.cast(file[name], dtype) for plain, name in named.items()})


CHECKPOINT = Checkpoint(
    FILES,
    problems,
    plain_shapes,
    DENOISER.open,
    {"vae": qwen_vae.load, "text_encoder": load_text_encoder},
    tokenizers.QWEN_VL,
    text_encoder.encode,
    text_encoder.longest,
)
