"""Qwen-Image's files: where each of the three parts is, whether it is what it should be, and how it is read."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.families.base import WeightPlacement
from library.families.facts import Shapes
from library.families.qwen_image import keys, text_encoder, vae
from library.families.qwen_image.facts import FACTS, TRANSFORMER, VAE
from library.families.qwen_image.model import QwenImage, QwenShape, count
from library.families.qwen_image.options import OTHERS
from library.families.shared import language_model, tokenizers, transfer, weights
from library.families.shared.one_encoder import Checkpoint
from library.families.shared.part_files import Entries, Part, PartFiles, complete, pipeline, whole_model

logger = logging.getLogger(__name__)

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
    "vae": Part("vae", OTHERS["vae"], ("vae", "qwen_image_vae.safetensors"), ("decoder.conv_in.weight",)),
}
FILES = PartFiles(PARTS, FACTS, {"denoiser": TRANSFORMER, "vae": VAE}, "Qwen-Image or Qwen-Image-2512")
RELATIVES = {  # pipelines of diffusers -> what they are of
    "QwenImageEditPipeline": "Qwen-Image-Edit",
    "QwenImageEditPlusPipeline": "Qwen-Image-Edit-2509",
    "QwenImageLayeredPipeline": "Qwen-Image-Layered",
}


def problems(config: RunConfig) -> Iterator[Problem]:
    """What is missing or wrong among the three parts, from their headers, each with its option and the fix."""
    found: dict[str, Shapes] = {}

    def look(part: str, path: Path, entries: Entries) -> Iterator[Problem]:
        found[part] = plain_shapes(entries, part)
        if problem := FILES.unfit(part, path, entries, found[part]):
            del found[part]
            yield Problem(PARTS[part].option, ": {problem}", problem=problem)
            return
        if part == "denoiser":
            yield from relative(path, config)
            yield from config.compile.beyond({"QwenImageTransformerBlock": count(found[part])})

    yield from FILES.problems(config, look)
    yield from mismatched(found)


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


def names_of(entries: Mapping[str, Any], part: str) -> dict[str, str]:
    """Keys of a part's file -> {the network's own key: key in the file}."""
    if part == "denoiser":
        return weights.without_prefix(entries)
    return keys.vae(entries) if part == "vae" else language_model.plain_names(entries)


def plain_shapes(entries: Entries, part: str) -> dict[str, tuple[int, ...]]:
    """Shapes by the network's own keys."""
    return {plain: tuple(entries[name]["shape"]) for plain, name in names_of(entries, part).items()}


def mismatched(shapes: Mapping[str, Shapes]) -> Iterator[Problem]:
    """Parts that are each in order but do not belong together: a smaller text encoder, another VAE."""
    own = shapes.get("denoiser", {})
    yield from FILES.mismatched(shapes, {
        "text_encoder": ("embed_tokens.weight", own.get("txt_in.weight", (0, 0))[1]),
        "vae": ("decoder.conv_in.weight", own.get("img_in.weight", (0, 0))[1] // 4),
    })  # fmt: skip


def open_denoiser(
    path: Path, dtype: torch.dtype, keep_8_bits: bool, mmap: bool = True
) -> tuple[QwenImage, Callable[[WeightPlacement | None], object]]:
    """A transformer of any layout as our module without its weights, and what reads these in `dtype`.

    With `keep_8_bits` the matrices of the blocks that the file holds as plain float8_e4m3fn stay so; all else is
    widened. Raises ConfigError when tensors are missing or of a wrong shape.
    """
    file = weights.read(path, mmap)
    names, stored = weights.without_prefix(file), file.shapes()
    with complete(path, TRANSFORMER):
        with torch.device("meta"):
            model = QwenImage(QwenShape.of({plain: stored[name] for plain, name in names.items()}))
        transfer.expect(model, {name: stored[names[name]] for name in model.state_dict()})
    sources = {name: file.source(names[name]) for name in model.state_dict()}
    if unread := len(names) - len(sources):
        logger.warning("%s: %d tensors are not part of Qwen-Image and are left out", path, unread)
    kind = transfer.widened(dtype, (lambda name: "blocks." in name) if keep_8_bits else None)
    return model, functools.partial(transfer.fill, model, sources, kind)


def load_vae(path: Path, dtype: Any, mmap: bool = True) -> nn.Module:
    """Read a VAE, single file or diffusers."""
    file = weights.read(path, mmap)
    with complete(path, VAE):
        return vae.build({plain: weights.cast(file[name], dtype) for plain, name in keys.vae(file).items()})


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
    open_denoiser,
    {"vae": load_vae, "text_encoder": load_text_encoder},
    tokenizers.QWEN_VL,
    text_encoder.encode,
    text_encoder.longest,
)
