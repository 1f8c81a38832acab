"""Segmentation models of transformers in a local folder: CLIPSeg by text, others by their classes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from library.captioning.describer import check_folder, chosen_device
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, first_line, option_name
from library.curation.tags import split_tags

BY_WORDS = "clipseg"
MAX_CLASSES_LISTED = 12  # classes that a message lists


class SegmentationModel:
    """A loaded segmentation model. Calling it returns the segmentation of each image, [H,W] in 0..1."""

    def __init__(
        self, folder: Path, words: str, threshold: float = 0.4, batch_size: int = 1, device: str = "auto"
    ) -> None:
        """`words`: what to segment, separated by commas; for a model of classes their names. `threshold`: the least
        probability of a pixel, for CLIPSeg. Raises ConfigError when the folder is not a segmentation model."""
        self.name, self.words, self.threshold = folder.name, split_tags(words), threshold
        self.batch_size = max(1, batch_size)
        if not self.words:
            raise ConfigError(
                "{name}: write what is to be learned, such as person, or dog, cat", name=option_name("words")
            )
        if not 0 < threshold < 1:
            raise ConfigError(
                "{name} is {value}: it is a probability between 0 and 1",
                name=option_name("threshold"),
                value=f"{threshold:g}",
            )
        kind = check_folder(folder)
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
        self.model, self.processor = _load_segmenter(folder, kind)
        self.device = chosen_device(device)
        self.model.to(self.device).eval().requires_grad_(False)
        self.classes = [] if kind == BY_WORDS else self._classes()

    def __call__(self, pictures: list[Image.Image]) -> list[np.ndarray]:
        """Segment RGB images."""
        sizes = [(picture.height, picture.width) for picture in pictures]
        if self.classes:
            inputs = self.processor(images=pictures, return_tensors="pt").to(self.device)
            maps = self.processor.post_process_semantic_segmentation(self.model(**inputs), target_sizes=sizes)
            return [np.isin(class_map.cpu().numpy(), self.classes).astype(np.float32) for class_map in maps]
        # CLIPSeg takes pairs of one text and one image, so each image is repeated for every word.
        texts = [word for _ in pictures for word in self.words]
        repeated = [picture for picture in pictures for _ in self.words]
        inputs = self.processor(text=texts, images=repeated, padding=True, return_tensors="pt").to(self.device)
        logits = self.model(**inputs).logits.float().cpu().numpy()
        best_logits = logits.reshape(len(pictures), len(self.words), *logits.shape[-2:]).max(1)
        # Clipped, since exp overflows float32 at 89.
        probability_maps = np.reciprocal(1 + np.exp(-np.clip(best_logits, -60, 60)))
        # The maps have the size of the model's input, not the image's.
        resized_maps = [
            Image.fromarray(probabilities).resize(picture.size, Image.Resampling.BICUBIC)
            for probabilities, picture in zip(probability_maps, pictures, strict=True)
        ]
        return [(np.asarray(probabilities) >= self.threshold).astype(np.float32) for probabilities in resized_maps]

    def _classes(self) -> list[int]:
        """Return the indices of the classes that the words name."""
        names: dict[str, list[int]] = {}
        for number, label in self.model.config.id2label.items():
            # Labels may list synonyms, separated by commas or semicolons.
            for name in {str(label), *split_tags(str(label).replace(";", ","))}:
                names.setdefault(name.casefold(), []).append(int(number))
        missing = [word for word in self.words if word.casefold() not in names]
        if missing:
            raise ConfigError(
                "{model} knows no class {word}: it knows {names}",
                model=self.name,
                word=missing[0],
                names=_first_names(list(self.model.config.id2label.values())),
            )
        return sorted({number for word in self.words for number in names[word.casefold()]})


def _load_segmenter(folder: Path, kind: str) -> tuple[Any, Any]:
    """Load the model and its processor."""
    # Imported from their own modules: from `transformers.models`, type checkers would read every model.
    from transformers.models.auto import (
        AutoImageProcessor,
        AutoModelForSemanticSegmentation,
        AutoModelForUniversalSegmentation,
        AutoProcessor,
        modeling_auto,
    )
    from transformers.models.clipseg import CLIPSegForImageSegmentation

    classes = modeling_auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES
    universal = modeling_auto.MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES
    local_options: JsonObject = {"local_files_only": True, "trust_remote_code": False}
    if kind == BY_WORDS:
        loaders = CLIPSegForImageSegmentation, AutoProcessor
    elif kind in classes:
        loaders = AutoModelForSemanticSegmentation, AutoImageProcessor
    elif kind in universal:
        loaders = AutoModelForUniversalSegmentation, AutoImageProcessor
    else:
        raise ConfigError(
            "{folder} is a {kind} model: choose CLIPSeg, which finds what is described, or a model of "
            "semantic segmentation such as SegFormer, UPerNet or Mask2Former",
            folder=folder,
            kind=kind,
        )
    try:
        model = loaders[0].from_pretrained(str(folder), use_safetensors=True, **local_options)
        return model, loaders[1].from_pretrained(str(folder), **local_options)
    except Exception as error:  # any error of an unknown model's folder
        raise ConfigError("{folder} cannot be used for masks: {why}", folder=folder, why=first_line(error)) from error


def _first_names(names: Sequence[object]) -> str:
    shown = ", ".join(map(str, names[:MAX_CLASSES_LISTED]))
    return shown if len(names) <= MAX_CLASSES_LISTED else f"{shown} and {len(names) - MAX_CLASSES_LISTED} more"
