"""What sample images say about a training: they became noise or one colour, or still look like the base model's."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

from library.config.problems import Message
from library.sampling.prompts import Prompt

# What the numbers were measured on: docs/dev/quality.md, "What samples say".
SIDE = 64  # pixels of the copy whose roughness is measured: the mean difference of neighbours
CELLS = 32  # pixels of the copy that is compared
NOISY, BROKEN = 3.0, 0.3  # noise is more times as rough as the base model's image, and further from it
FLAT, PLAIN = 0.1, 0.002  # less than this share as rough is one colour, unless the base model's image is as plain
MIN_STEPS = 50  # a shorter training need not have learned anything
SAME = 0.01  # distance from the base model's image below which nobody sees a difference
BECAME_NOISE = (
    "the sample images have become noise: the learning rate is probably too high; use an earlier file, or train again "
    "with a tenth of the rate"
)
BECAME_ONE_COLOUR = (
    "the sample images have become one plain colour: the learning rate is probably too high, or numbers overflow; "
    "use an earlier file, or train again with a tenth of the rate"
)
NOTHING_LEARNED = (
    "the sample images still look like the base model's: too little was learned; raise the learning rate or the number "
    "of steps, check alpha, and use the words of your captions in the prompts"
)
Drawn = tuple[str, int | None]  # a prompt's words and seed


@dataclass(frozen=True)
class Look:
    """A small copy of an image, and how rough it is."""

    cells: np.ndarray
    roughness: float

    def distance(self, other: "Look") -> float:
        """Return the root mean squared difference of the copies, 0 to 1."""
        return float(np.sqrt(np.mean((self.cells - other.cells) ** 2)))


def look_at(path: Path) -> Look:
    """Return the look of an image file."""
    with Image.open(path) as image:
        small, large = (
            np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BOX), np.float32) / 255
            for side in (CELLS, SIDE)
        )
    roughness = (np.abs(np.diff(large, axis=0)).mean() + np.abs(np.diff(large, axis=1)).mean()) / 2
    return Look(small, float(roughness))


class SampleChanges:
    """Compares the samples of a step with the base model's of the same prompts and seeds."""

    def __init__(self) -> None:
        self._first: dict[Drawn, Look] = {}
        self._told: set[str] = set()

    def judge(self, files: Iterable[tuple[Prompt, Path]], step: int, is_last: bool) -> Message | None:
        """Return the verdict on a step's images unless it was returned before; None if all is well."""
        looks = {(prompt.prompt, prompt.seed): look_at(path) for prompt, path in files if path.is_file()}
        if not step:
            self._first = looks
            return None
        pairs = [(self._first[drawn], now) for drawn, now in looks.items() if drawn in self._first]
        verdict = _verdict(pairs, is_last and step >= MIN_STEPS) if pairs else ""
        if not verdict or verdict in self._told:
            return None
        self._told.add(verdict)
        return Message(verdict)


def _verdict(pairs: list[tuple[Look, Look]], has_learned_long: bool) -> str:
    """Return the verdict on the changes from the base model's images, "" if there is none."""
    distances = [first.distance(now) for first, now in pairs]
    rougher = [now.roughness / max(first.roughness, PLAIN) for first, now in pairs]
    if median(rougher) > NOISY and median(distances) > BROKEN:
        return BECAME_NOISE
    if max(rougher) < FLAT and any(first.roughness > PLAIN for first, _ in pairs):
        return BECAME_ONE_COLOUR
    return NOTHING_LEARNED if has_learned_long and max(distances) < SAME else ""
