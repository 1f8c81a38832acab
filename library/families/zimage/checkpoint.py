"""Z-Image's files: where each of the three parts is, whether it is what it should be, and how it is read."""

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.families.base import WeightPlacement
from library.families.facts import Shapes
from library.families.shared import autoencoder, language_model, tokenizers, transfer, unfilled, weights
from library.families.shared.one_encoder import Checkpoint
from library.families.shared.part_files import Entries, Part, PartFiles, complete, whole_model
from library.families.shared.weights import FileRange, Source, Weights
from library.families.zimage import keys, text_encoder
from library.families.zimage.facts import FACTS, TRANSFORMER
from library.families.zimage.model import ZImage, ZImageShape, counts
from library.families.zimage.options import OTHERS

logger = logging.getLogger(__name__)

PARTS = {
    "denoiser": Part(
        "pretrained_model_name_or_path",
        "a Z-Image transformer (z_image_bf16.safetensors, or a diffusers folder)",
        ("transformer", "z_image_*.safetensors"),
        ("layers.0.attention.to_q.weight",),
    ),
    "text_encoder": Part(
        "text_encoder",
        OTHERS["text_encoder"],
        ("text_encoder", "qwen_3_4b*.safetensors"),
        (language_model.QWEN3_MARK,),
    ),
    "vae": Part("vae", OTHERS["vae"], ("vae", "ae.safetensors"), ("decoder.conv_in.weight",)),
}
WORDS = {"denoiser": TRANSFORMER, "text_encoder": language_model.QWEN3, "vae": "a VAE"}
FILES = PartFiles(PARTS, FACTS, WORDS, "Z-Image or Z-Image Turbo")
TURBO_SHIFT = 3.0  # of the scheduler in Turbo's folder; that of the base model has another


def problems(config: RunConfig) -> Iterator[Problem]:
    """What is missing or wrong among the three parts, from their headers, each with its option and the fix."""
    found: dict[str, Shapes] = {}

    def look(part: str, path: Path, entries: Entries) -> Iterator[Problem]:
        shapes = plain_shapes(entries, part)
        if problem := FILES.unfit(part, path, entries, shapes):
            yield Problem(PARTS[part].option, ": {problem}", problem=problem)
            return
        found[part] = shapes
        if part == "denoiser":
            yield from another(path, config)
            yield from config.compile.beyond(counts(shapes))

    yield from FILES.problems(config, look)
    own = found.get("denoiser", {})
    yield from FILES.mismatched(found, {
        "text_encoder": (language_model.EMBEDDING, own.get("cap_embedder.1.weight", (0, 0))[1]),
        "vae": ("decoder.conv_in.weight", own.get("all_x_embedder.2-1.weight", (0, 0))[1] // 4),
    })  # fmt: skip


def another(path: Path, config: Any) -> Iterator[Problem]:
    """Turbo has the same header; where nobody has said which one a file is, its name or folder may contradict."""
    if not config.model.model_version and calls_itself_turbo(path):
        yield Problem("model_version",
            ": {path} calls itself Turbo, which only you can know: set model_version = turbo, or base if it is not",
            path=path, also="pretrained_model_name_or_path", fix={"model_version": "turbo"})  # fmt: skip


def calls_itself_turbo(path: Path) -> bool:
    """Whether the name of a model or the scheduler in its folder is Turbo's. De-Turbo is trained like base."""
    whole = whole_model(path)
    name = (whole or path).name.lower().replace("_", "-")
    if "turbo" in name:
        return "de-turbo" not in name and "deturbo" not in name
    try:
        text = (whole / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8") if whole else "{}"
        return json.loads(text).get("shift") == TURBO_SHIFT
    except (OSError, ValueError, AttributeError):
        return False


def names_of(entries: Mapping[str, Any], part: str) -> dict[str, tuple[str, int, int]]:
    """Keys of a part's file -> {the network's own key: key in the file, which of its row pieces, of how many}."""
    if part == "denoiser":
        plain = weights.without_prefix(entries)
        return {own: (plain[name], piece, pieces) for own, (name, piece, pieces) in keys.sources(plain).items()}
    known = language_model.plain_names(entries) if part == "text_encoder" else {name: name for name in entries}
    return {plain: (name, 0, 1) for plain, name in known.items()}


def plain_shapes(entries: Entries, part: str) -> dict[str, tuple[int, ...]]:
    """Shapes by the network's own keys."""
    return _shapes({name: tuple(entry["shape"]) for name, entry in entries.items()}, part)


def _shapes(stored: Shapes, part: str) -> dict[str, tuple[int, ...]]:
    found = {}
    for own, (name, _, pieces) in names_of(stored, part).items():
        rows, *rest = stored[name] or (0,)
        found[own] = (rows // pieces, *rest) if stored[name] else ()
    return found


def open_denoiser(
    path: Path, dtype: torch.dtype, keep_8_bits: bool, mmap: bool = True
) -> tuple[ZImage, Callable[[WeightPlacement | None], object]]:
    """A transformer of any layout as our module without its weights, and what reads these in `dtype`.

    With `keep_8_bits` the matrices of the blocks that the file holds as plain float8_e4m3fn stay so; all else is
    widened. Raises ConfigError when tensors are missing or of a wrong shape.
    """
    file = weights.read(path, mmap)
    names, shapes = names_of(file.shapes(), "denoiser"), _shapes(file.shapes(), "denoiser")
    with complete(path, TRANSFORMER):
        with unfilled.empty_weights():
            model = ZImage(ZImageShape.of(shapes))
        transfer.expect(model, {name: shapes[name] for name in model.state_dict()})
    sources = {name: rows_of(file, *names[name]) for name in model.state_dict()}
    if unread := len(names) - len(sources):
        logger.warning("%s: %d tensors are not part of Z-Image and are left out", path, unread)
    keeps = (lambda name: "layers." in name or "_refiner." in name) if keep_8_bits else None
    return model, functools.partial(transfer.fill, model, sources, transfer.widened(dtype, keeps))


def rows_of(file: Weights, name: str, piece: int, pieces: int) -> Source:
    """One of the equal row pieces of a tensor in a file."""
    whole = file.source(name)
    if pieces == 1:
        return whole

    def read() -> Tensor:
        return whole.read().chunk(pieces)[piece].clone()  # or the other pieces would be kept with it

    if whole.range is None:
        return Source(None, read)
    place, (rows, *rest) = whole.range, whole.range.shape
    length = place.length // pieces
    shape = (rows // pieces, *rest)
    return Source(FileRange(place.path, place.offset + piece * length, length, place.dtype, shape), read)


def load_vae(path: Path, dtype: Any, mmap: bool = True) -> nn.Module:
    """Read FLUX.1's autoencoder, single file or diffusers."""
    return autoencoder.load(path, dtype, autoencoder.FLUX, mmap)


def load_text_encoder(path: Path, dtype: Any, mmap: bool = True) -> nn.Module:
    """Read Qwen3 without the layer that is not needed."""
    return language_model.load_qwen3(path, dtype, text_encoder.SKIPPED, mmap)


CHECKPOINT = Checkpoint(
    FILES,
    problems,
    plain_shapes,
    open_denoiser,
    {"vae": load_vae, "text_encoder": load_text_encoder},
    tokenizers.QWEN3,
    text_encoder.encode,
    text_encoder.longest,
)
