"""WD14 taggers: a folder with model.onnx and selected_tags.csv, run by ONNX Runtime."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from library.config.problems import ConfigError, first_line, option_name
from library.curation.tags import split_tags, tag_key

MODEL, TAGS = "model.onnx", "selected_tags.csv"
GENERAL, CHARACTER, RATING = "0", "4", "9"  # categories in selected_tags.csv
MISSING = "onnxruntime is not installed, which WD14 taggers need: pip install onnxruntime (onnxruntime-gpu for NVIDIA)"


@dataclass(frozen=True)
class Limits:
    """Thresholds and filters of tags."""

    general: float = 0.35
    character: float = 0.75
    rating: bool = False
    undesired: str = ""  # tags that are never written, separated by commas
    underscores: bool = False  # whether they are kept; else they become spaces

    def __post_init__(self) -> None:
        for name in ("general", "character"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    "{name} is {value}: it is a probability, from 0 to 1",
                    name=option_name(name),
                    value=f"{getattr(self, name):g}",
                )


class Tagger:
    """A loaded tagger. Calling it returns the tags of each image: characters first, then by descending probability."""

    makes_tags = True

    def __init__(self, folder: Path, limits: Limits, batch_size: int = 4, device: str = "auto") -> None:
        """Raises ConfigError when a file is missing or damaged, or ONNX Runtime is not installed."""
        self.name, self.limits = folder.name, limits
        self.tags = read_tags(folder / TAGS)
        self.session = _session(folder / MODEL, device)
        shape = self.session.get_inputs()[0].shape
        if len(shape) != 4 or 3 not in (shape[1], shape[3]):
            raise ConfigError(
                "{path} takes {shape}, not images: it is not a WD14 tagger", path=folder / MODEL, shape=shape
            )
        self.channels_first = shape[1] == 3  # [N,3,H,W] instead of [N,H,W,3]
        side = shape[2]
        self.side = side if isinstance(side, int) else 448  # symbolic in the file: the size that WD14 taggers use
        self.batch_size = shape[0] if isinstance(shape[0], int) and shape[0] > 0 else max(1, batch_size)
        self.fixed = isinstance(shape[0], int)
        self.unwanted = set(map(tag_key, split_tags(limits.undesired)))

    def __call__(self, pictures: list[Image.Image]) -> list[str]:
        """Tag RGB images; the tags of each are separated by commas."""
        stacked = np.stack([prepare_picture(picture, self.side) for picture in pictures])
        if self.fixed and len(stacked) < self.batch_size:  # the model takes exactly this many images: fill up
            stacked = np.concatenate(
                [stacked, np.zeros((self.batch_size - len(stacked), *stacked.shape[1:]), np.float32)]
            )
        batch = np.ascontiguousarray(stacked.transpose(0, 3, 1, 2)) if self.channels_first else stacked
        probabilities = self.session.run(None, {self.session.get_inputs()[0].name: batch})[0]
        if probabilities.shape[1:] != (len(self.tags),):
            raise ConfigError(
                "the model answers with {count} tags, and {tags} has {known}",
                count=probabilities.shape[-1],
                tags=TAGS,
                known=len(self.tags),
            )
        return [", ".join(self._chosen(row)) for row in np.asarray(probabilities, np.float32)[: len(pictures)]]

    def _chosen(self, row: np.ndarray) -> Iterator[str]:
        ranked = sorted(zip(row.tolist(), self.tags, strict=True), key=lambda pair: -pair[0])
        ratings = [tag for _, (tag, kind) in ranked if kind == RATING]
        thresholds = {CHARACTER: self.limits.character, GENERAL: self.limits.general}
        tags = ratings[:1] if self.limits.rating else []
        for category, limit in thresholds.items():
            tags += [tag for probability, (tag, kind) in ranked if kind == category and probability >= limit]
        for tag in map(self._written, tags):
            if tag_key(tag) not in self.unwanted:
                yield tag

    def _written(self, tag: str) -> str:
        # Emoticons such as >_< are tags too, and all short.
        return tag if self.limits.underscores or len(tag) <= 3 else tag.replace("_", " ")


def read_tags(path: Path) -> list[tuple[str, str]]:
    """Read the tags of selected_tags.csv, in the model's order, with their categories. Raises ConfigError for any other
    file."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            tags = [(row["name"], row["category"]) for row in csv.DictReader(file)]
    except FileNotFoundError:
        raise ConfigError(
            "{path} is missing: it belongs to the tagger, beside {model}", path=path, model=MODEL
        ) from None
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise ConfigError(
            "{path} is not a list of tags (columns name and category): {error}", path=path, error=error
        ) from None
    if not tags:
        raise ConfigError("{path} holds no tags", path=path)
    return tags


def prepare_picture(picture: Image.Image, side: int) -> np.ndarray:
    """Return an image as input of the taggers: padded to a white square, [side, side, 3] float32, BGR, 0 to 255."""
    longest = max(picture.size)
    square = Image.new("RGB", (longest, longest), "white")
    square.paste(picture, ((longest - picture.width) // 2, (longest - picture.height) // 2))
    if longest != side:
        square = square.resize((side, side), Image.Resampling.BICUBIC)
    return np.asarray(square, dtype=np.float32)[:, :, ::-1]


def _session(path: Path, device: str) -> Any:
    if not path.is_file():
        raise ConfigError(
            "{path} is missing: choose the folder of a WD14 tagger, with {model} and {tags}",
            path=path,
            model=MODEL,
            tags=TAGS,
        )
    try:
        import onnxruntime
    except ImportError:
        raise ConfigError(MISSING) from None
    onnxruntime.disable_telemetry_events()
    available = onnxruntime.get_available_providers()
    preferred = [] if device == "cpu" else ["CUDAExecutionProvider"]
    if device == "cuda" and preferred[0] not in available:
        template = "{name} is cuda, but this onnxruntime has no CUDA: pip install onnxruntime-gpu, or use cpu"
        raise ConfigError(template, name=option_name("device"))
    try:
        return onnxruntime.InferenceSession(
            str(path), providers=[p for p in [*preferred, "CPUExecutionProvider"] if p in available]
        )
    except Exception as error:  # its errors have no common class
        raise ConfigError("{name} cannot be loaded: {why}", name=path, why=first_line(error)) from None
