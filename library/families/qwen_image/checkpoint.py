"""Qwen-Image's files: where each of the three parts is, whether it is what it should be, and how it is read."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from library.config.problems import Problem, Text
from library.config.run_config import RunConfig
from library.families import recognition
from library.families.base import WeightPlacement
from library.families.facts import Shapes
from library.families.qwen_image import keys, text_encoder, vae
from library.families.qwen_image.facts import FACTS, TRANSFORMER, VAE
from library.families.qwen_image.model import QwenImage, QwenShape, count
from library.families.qwen_image.options import OTHERS
from library.families.shared import transfer, weights
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
FILES = PartFiles(PARTS)
RELATIVES = {  # pipelines of diffusers -> what they are of
    "QwenImageEditPipeline": "Qwen-Image-Edit",
    "QwenImageEditPlusPipeline": "Qwen-Image-Edit-2509",
    "QwenImageLayeredPipeline": "Qwen-Image-Layered",
}


def problems(config: RunConfig) -> Iterator[Problem]:
    """What is missing or wrong among the three parts, from their headers, each with its option and the fix."""
    found: dict[str, Shapes] = {}

    def look(part: str, path: Path, entries: Entries) -> Iterator[Problem]:
        if problem := unfit(path, entries, part):
            yield Problem(PARTS[part].option, ": {problem}", problem=problem)
            return
        found[part] = plain_shapes(entries, part)
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
    return keys.vae(entries) if part == "vae" else keys.text_encoder(entries)


def plain_shapes(entries: Entries, part: str) -> dict[str, tuple[int, ...]]:
    """Shapes by the network's own keys."""
    return {plain: tuple(entries[name]["shape"]) for plain, name in names_of(entries, part).items()}


def unfit(path: Path, entries: Entries, part: str) -> str | None:
    """Why a file cannot serve as a part, in a sentence with the fix; None when it can."""
    about, shapes = PARTS[part], plain_shapes(entries, part)
    of, found = recognition.described({name: tuple(entry["shape"]) for name, entry in entries.items()})
    if found == "a LoRA file":
        use = ": give it as --network_weights" if part == "denoiser" else ""
        return Text("{path} is a LoRA file, not a model{use}; expected {what}", path=path, use=use, what=about.what)
    fits = found in {"denoiser": (TRANSFORMER,), "vae": (VAE,)}.get(part, (found,))
    if not fits or not any(name.endswith(about.marker) for name in shapes):
        other = of if part == "denoiser" and of is not FACTS else None
        if of is FACTS and found != TRANSFORMER:
            return Text("{path} is {found}, which is not trained here: use Qwen-Image or Qwen-Image-2512",
                path=path, found=found)  # fmt: skip
        trainer = f"; train it with {' or '.join(other.scripts)}" if other else ""
        return Text(
            "{path} is {found}{trainer}; expected {what}", path=path, found=found, trainer=trainer, what=about.what
        )
    return weights.stored_oddly(path, entries, scaled=True)


def mismatched(shapes: Mapping[str, Shapes]) -> Iterator[Problem]:
    """Parts that are each in order but do not belong together: a smaller text encoder, another VAE."""
    if "denoiser" not in shapes:
        return
    widths = {
        "text_encoder": ("embed_tokens.weight", 1, shapes["denoiser"].get("txt_in.weight", (0, 0))[1]),
        "vae": ("decoder.conv_in.weight", 1, shapes["denoiser"].get("img_in.weight", (0, 0))[1] // 4),
    }
    for part, (name, dimension, expected) in widths.items():
        got = shapes[part][name][dimension] if name in shapes.get(part, {}) else expected
        if got != expected:
            yield Problem(part,
                ": has {got} channels where this model expects {expected}: give {what}", got=got,
                expected=expected, what=Text(PARTS[part].what))  # fmt: skip


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
        named = keys.text_encoder(file)
        return text_encoder.build({plain: weights.cast(file[name], dtype) for plain, name in named.items()})
