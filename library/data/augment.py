"""Random changes of an image at load time: crop, flip and colours.

Pure functions of a random generator, so that an image is the same in every process and after a resume.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from library.data.buckets import BucketFit, Size

Face = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class View:
    """The visible part of an image: scaled to `resized`, then cropped to `size` at (left, top); all in pixels."""

    resized: tuple[int, int]
    left: int
    top: int
    size: tuple[int, int]
    flip: bool = False


def middle(fit: "BucketFit", flip: bool = False) -> View:
    width, height = fit.bucket
    return View(fit.resized, (fit.resized[0] - width) // 2, (fit.resized[1] - height) // 2, fit.bucket, flip)


def anywhere(fit: "BucketFit", random: Random, flip: bool = False) -> View:
    """Return a uniformly distributed random crop."""
    width, height = fit.bucket
    left = random.randint(0, fit.resized[0] - width)
    return View(fit.resized, left, random.randint(0, fit.resized[1] - height), fit.bucket, flip)


def face_of(path: str | Path) -> Face | None:
    """Centre and size of the face, in pixels, from a name like `photo_320_240_80_90.png`."""
    parts = Path(path).stem.split("_")
    if len(parts) < 5:
        return None
    try:
        left, top, width, height = (int(part) for part in parts[-4:])
    except ValueError:
        return None
    return (left, top, width, height) if min(width, height) > 0 else None


def around_face(
    size: "Size", window: "Size", face: Face, bounds: tuple[float, float], random: Random, at_random: bool = False
) -> View:
    """Scale an image until the crop is bounds[0] to bounds[1] times as large as its face, and crop around the face: a
    little beside its centre, or with `at_random` anywhere, but most often near it.

    Enlarges the image only as far as the crop requires. Draws as sd-scripts does.
    """
    cover = max(window[0] / size[0], window[1] / size[1])
    # The max keeps a bound of 0 from dividing by zero.
    tight, wide = (min(window) / (max(face[2:]) * max(bound, 1e-6)) for bound in bounds)
    min_scale, max_scale = max(cover, min(1.0, wide)), max(cover, min(1.0, tight))
    scale = random.uniform(min_scale, max_scale) if min_scale < max_scale else min_scale
    resized = (max(window[0], int(size[0] * scale + 0.5)), max(window[1], int(size[1] * scale + 0.5)))
    largest = max(face[2:])
    moves = bounds[0] != bounds[1] and largest > min(window) // 10 and largest >= 40
    corner = [0, 0]
    for axis in (1, 0):
        centre = int(face[axis] * scale + 0.5)
        start = centre - window[axis] // 2
        if at_random:
            reach = max(resized[axis] - centre, centre)
            start += random.randint(0, reach) + random.randint(0, reach) - reach
        elif moves:
            start += random.randint(-largest // 20, largest // 20)
        corner[axis] = max(0, min(start, resized[axis] - window[axis]))
    return View(resized, corner[0], corner[1], window)


def color(picture: "np.ndarray", random: Random) -> "np.ndarray":
    """Slightly change one image in three: half of those in hue, half in gamma; RGB uint8 [H,W,3] in and out."""
    import cv2

    if random.random() > 0.33:
        return picture
    if random.random() > 0.5:
        # RGB is read as BGR, as upstream does: hue names differ, but the rotation is the same.
        hsv = cv2.cvtColor(picture, cv2.COLOR_BGR2HSV)
        hsv[:, :, 0] = ((hsv[:, :, 0] + random.uniform(-8, 8)) % 180).astype(np.uint8)
        return cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)
    curve = np.arange(256, dtype=np.float64) ** random.uniform(0.95, 1.05)
    return curve.clip(0, 255).astype(np.uint8)[picture]
