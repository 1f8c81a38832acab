"""Common parts of encoding images and captions before training: the inputs, and each process' share."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from library.config.problems import ConfigError, Message, Report
from library.config.run_config import RunConfig
from library.data.threads import ahead
from library.families.base import Family, ModelComponents
from library.files import clean_up

if TYPE_CHECKING:
    from library.data.images import Image

Arrays = dict[str, np.ndarray]
SHOWN_TWICE = (
    "{path} is used with two reference images or masks, but there is one cache for it: make a copy of it in another "
    "folder"
)


class EncodingProcess(Protocol):
    """The device and the ranks that encode."""

    @property
    def device(self) -> torch.device:
        """The device that networks run on."""

    rank: int
    ranks: int


@dataclass(frozen=True, slots=True)
class EncodingJob:
    """The inputs of every step of encoding."""

    family: Family
    components: ModelComponents
    config: RunConfig
    world: EncodingProcess
    report: Report  # of progress


def finish(last: Callable, results: Iterator, phase: Message, total: int, report: Report) -> None:
    """Apply `last`, such as writing, to each result on another thread while this one computes the next."""
    done = 0
    report(phase, done, total)
    for count in ahead(last, results, workers=1, depth=8):
        done += count
        report(phase, done, total)


def clean_up_after(files: Iterable[str]) -> None:
    for folder in {os.path.dirname(file) for file in files}:
        clean_up(folder, lambda name: name.endswith((".npz", ".safetensors")))


def refuse_other_references(images: Iterable["Image"]) -> None:
    """Raise ConfigError for an image with different reference images in two data sets."""
    # It has one file of latents and one per caption.
    paths_by_image: dict[str, list[str]] = {}
    for image in images:
        paths = [control.path for control in image.controls]
        if paths_by_image.setdefault(image.path, paths) != paths:
            raise ConfigError(SHOWN_TWICE, path=image.path)


def share(items: list, name: Callable[[Any], str], world: EncodingProcess) -> list:
    order = {key: i for i, key in enumerate(dict.fromkeys(map(name, items)))}
    return [item for item in items if order[name(item)] % world.ranks == world.rank]
