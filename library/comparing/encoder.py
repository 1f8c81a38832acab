"""Likeness of images by an image encoder: DINOv2, CLIP or another one of transformers, in a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from library import families
from library.captioning.describer import check_folder
from library.config.json_types import JsonObject
from library.config.pasted import pasted_path
from library.config.problems import ConfigError, Message, Report, first_line
from library.data.image_files import opened_image
from library.data.pixels import unreadable_image
from library.downloads import model_folder

ENCODER_REPOSITORIES = {"dinov2": "facebook/dinov2-base", "clip": "openai/clip-vit-large-patch14"}
ABSENT = "--encoder {name} is not there: write dinov2, clip or the folder of an image encoder"
COPY = 0.95  # cosine similarity from which two images count as near copies
SURE = 0.99  # the same for training images that are very similar to each other
AUTO_CLASSES = ("Model", "ImageProcessor")
BATCH_SIZE = 16


def check_name(name: str) -> None:
    """Raise ConfigError for a word that is neither an encoder to download nor a folder with a model."""
    if not name:
        return
    repository = ENCODER_REPOSITORIES.get(name.lower(), name)
    if model_folder.is_repository(repository):
        return
    folder = pasted_path(repository)
    if not folder.is_dir():
        raise ConfigError(ABSENT, name=name)
    check_folder(folder)


def encoder_folder(name: str, into: Path, report: Report) -> Path:
    """Return the folder of an encoder: dinov2, clip and Hugging Face ids are downloaded once into `into`; other names
    are folders.
    """
    path = model_folder.find_model_folder(
        ENCODER_REPOSITORIES.get(name.lower(), name), model_folder.TRANSFORMERS, into, report
    )
    if not path.is_dir():
        raise ConfigError(ABSENT, name=name)
    return path


class ImageEncoder:
    """A loaded encoder."""

    def __init__(self, folder: Path) -> None:
        """Weights must be .safetensors, and no code of the folder is executed. Raises ConfigError for other folders."""
        check_folder(folder)
        local_only: JsonObject = {"local_files_only": True, "trust_remote_code": False}
        try:
            # Import only if likeness is requested.
            model, processor = (families.load_object(f"transformers.models.auto:Auto{name}") for name in AUTO_CLASSES)
            self._model: Any = model.from_pretrained(str(folder), use_safetensors=True, **local_only).eval()
            self._processor: Any = processor.from_pretrained(str(folder), **local_only)
        except Exception as error:  # any error of an unknown model's folder
            template = "{folder} cannot be used as an image encoder: {why}"
            raise ConfigError(template, folder=folder, why=first_line(error)) from error
        if self._model.main_input_name != "pixel_values" and not hasattr(self._model, "get_image_features"):
            raise ConfigError(
                "{folder} is not an image encoder: choose dinov2, clip or a folder with one", folder=folder
            )

    def features(self, paths: Sequence[str], device: torch.device, report: Report) -> torch.Tensor:
        """Return unit-length features [N, D], float32 on the CPU. Raises ConfigError for an unreadable image."""
        self._model.to(device)
        batches = []
        for start in range(0, len(paths), BATCH_SIZE):
            report(Message("encoding images"), start, len(paths))
            opened = [_open_image(path) for path in paths[start : start + BATCH_SIZE]]
            pixels = self._processor(images=opened, return_tensors="pt")["pixel_values"].to(device)
            with torch.inference_mode():
                batches.append(self._features(pixels).float().cpu())
        self._model.to("cpu")
        return torch.nn.functional.normalize(torch.cat(batches), dim=-1)

    def _features(self, pixels: torch.Tensor) -> torch.Tensor:
        if hasattr(self._model, "get_image_features"):
            return self._model.get_image_features(pixel_values=pixels).pooler_output
        answer = self._model(pixel_values=pixels)
        pooled = getattr(answer, "pooler_output", None)
        return (answer.last_hidden_state[:, 0] if pooled is None else pooled).flatten(1)


def threshold(training: torch.Tensor) -> float:
    """Return the cosine similarity from which an image counts as a near copy."""
    # It must exceed the similarity of training images to each other.
    if len(training) < 2:
        return COPY
    alike = training @ training.T
    alike.fill_diagonal_(-1)
    return max(COPY, min(SURE, float(alike.max())))


def _open_image(path: str) -> Image.Image:
    try:
        with opened_image(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise unreadable_image(path, error) from error
