"""FLUX.2's files: where each of the three parts is, whether it is what it should be, and how it is read."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from library.config.problems import Problem
from library.families.facts import Shapes
from library.families.flux_2 import keys, text_encoder, vae
from library.families.flux_2.facts import FACTS, TRANSFORMER, VAE
from library.families.flux_2.model import DOUBLE, SINGLE, Flux2, Flux2Shape
from library.families.flux_2.options import OTHERS
from library.families.flux_2.versions import VERSIONS, fits, recognised
from library.families.shared import autoencoder, expected_tensors, language_model, tokenizers, weights
from library.families.shared.double_stream_file import DoubleStreamFile
from library.families.shared.one_encoder import Checkpoint
from library.families.shared.part_files import Entries, Part, PartFiles, complete, whole_model

PARTS = {
    "denoiser": Part(
        "pretrained_model_name_or_path",
        "a FLUX.2 transformer (flux-2-klein-base-4b.safetensors, or a diffusers folder)",
        ("transformer", "flux-2-*.safetensors", "flux2*.safetensors"),
        ("double_blocks.0.img_attn.qkv.weight",),
    ),
    "text_encoder": Part(
        "text_encoder",
        OTHERS["text_encoder"],
        ("text_encoder", "qwen_3_[48]b*.safetensors"),
        (language_model.QWEN3_MARK,),
        expected_tensors.language_model,
    ),
    "vae": Part(
        "vae",
        OTHERS["vae"],
        ("vae", "flux2-vae.safetensors"),
        (autoencoder.MARKER,),
        expected_tensors.autoencoder_with_statistics,
    ),
}
WORDS = {"denoiser": TRANSFORMER, "text_encoder": language_model.QWEN3, "vae": VAE}
FILES = PartFiles(PARTS, FACTS, WORDS, "FLUX.2 klein or dev")
# The text encoder of dev is not read: its captions come from caches that another program wrote.
DEV_FILES = replace(FILES, parts={part: about for part, about in PARTS.items() if part != "text_encoder"})
DENOISER = DoubleStreamFile(
    lambda _shapes: TRANSFORMER, keys.TREES, keys.sources, lambda shapes: Flux2(Flux2Shape.of(shapes))
)


def problems(config: Any) -> Iterator[Problem]:
    """What is missing or wrong among the three parts, from their headers, each with its option and the fix."""

    def of_denoiser(path: Path, shapes: Shapes) -> Iterator[Problem]:
        with complete(path, TRANSFORMER):
            sizes = Flux2Shape.of(shapes)
        yield from another(path, sizes, config)
        yield from config.compile.beyond({DOUBLE: sizes.double_blocks, SINGLE: sizes.single_blocks})

    files = DEV_FILES if config.model.model_version == "dev" else FILES
    yield from files.fitting(config, plain_shapes, of_denoiser, widths)


def widths(own: Shapes) -> dict[str, tuple[str, int]]:
    """A tensor of each part, and how many columns it has for a denoiser of these shapes."""
    if not {"txt_in.weight", "img_in.weight"} <= own.keys():
        return {}
    return {
        "text_encoder": (language_model.EMBEDDING, own["txt_in.weight"][1] // text_encoder.TAPS),
        "vae": (autoencoder.MARKER, own["img_in.weight"][1] // 4),
    }


def another(path: Path, sizes: Flux2Shape, config: Any) -> Iterator[Problem]:
    """The problem of a transformer that is of another model than model_version says. Distilled kleins have the header
    of their base: where nobody has said which one a file is, its name or folder may contradict."""
    version, found = config.model.model_version, recognised(sizes.hidden, sizes.guidance)
    if found == "dev" and not version:
        yield Problem("model_version",
            ": {path} is FLUX.2 dev: set model_version = dev, and train from captions that are cached already",
            path=path, also="pretrained_model_name_or_path", fix={"model_version": "dev"})  # fmt: skip
    elif version and not fits(version, sizes.hidden, sizes.guidance):
        yield Problem("model_version", "= {version}, but {path} is {found}: use model_version = {fitting}",
            version=version, path=path, found=VERSIONS[found].title, fitting=found,
            also="pretrained_model_name_or_path", fix={"model_version": found})  # fmt: skip
    elif not version and not sizes.guidance and calls_itself_distilled(path):
        fitting = found.replace("base-", "")
        yield Problem("model_version",
            ": {path} calls itself a distilled klein, which only you can know: set model_version = {fitting}, or "
            "{found} if it is not", path=path, fitting=fitting, found=found,
            also="pretrained_model_name_or_path", fix={"model_version": fitting})  # fmt: skip


def calls_itself_distilled(path: Path) -> bool:
    """Whether the name of a model is that of a distilled klein, or its folder says that it is one."""
    whole = whole_model(path)
    name = (whole or path).name.lower()
    if "klein" in name:
        return "base" not in name
    try:
        text = (whole / "model_index.json").read_text(encoding="utf-8") if whole else "{}"
        return json.loads(text).get("is_distilled") is True
    except (OSError, ValueError, AttributeError):
        return False


def plain_shapes(entries: Entries, part: str) -> Shapes:
    """Shapes by the network's own keys. KeyError names a tensor that a transformer lacks."""
    shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    if part == "denoiser":
        return DENOISER.bfl_shapes({plain: shapes[name] for plain, name in weights.without_prefix(shapes).items()})
    known = language_model.plain_names(shapes) if part == "text_encoder" else autoencoder.plain(shapes)
    return {plain: shapes[name] for plain, name in known.items()}


CHECKPOINT = Checkpoint(
    FILES,
    problems,
    plain_shapes,
    DENOISER.open,
    {"vae": vae.load, "text_encoder": text_encoder.load},
    tokenizers.QWEN3,
    text_encoder.encode,
    None,
    most=text_encoder.LENGTH,
    around=12,
)
DEV_CHECKPOINT = replace(CHECKPOINT, files=DEV_FILES, readers={"vae": vae.load})
