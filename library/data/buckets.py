"""Aspect ratio buckets, and how each image is resized and cropped to its bucket.

Everything is a pure function of sizes in pixels, (width, height). The rules are kohya's, number for number, so that a
data set falls into the same buckets as in sd-scripts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from library.config.problems import Problem

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BucketFit:
    """How one image is fitted to its bucket: scaled to `resized`, then centre-cropped to `bucket`."""

    bucket: Size
    resized: Size

    @property
    def cut(self) -> tuple[float, float]:
        return 1 - self.bucket[0] / self.resized[0], 1 - self.bucket[1] / self.resized[1]


@dataclass(frozen=True, slots=True)
class Buckets:
    """The bucketing rules of one data set; `resolution` is a (width, height) that stands for an area."""

    resolution: Size
    enabled: bool = True
    no_upscale: bool = False
    smallest: int = 256
    largest: int = 1024
    step: int = 64

    def problems(self, grid: int = 1) -> Iterator[Problem]:
        """Yield why these rules are impossible for a model whose sides are multiples of `grid` pixels."""
        if not self.enabled:
            yield from (
                Problem(
                    "",
                    "resolution: {side} is not a multiple of {grid}, which this model needs without enable_bucket",
                    side=side,
                    grid=grid,
                )
                for side in sorted(set(self.resolution))
                if side % grid
            )
            return
        if self.step < 1 or self.step % grid:
            yield Problem(
                "bucket_reso_steps", ": {step} must be a multiple of {grid} for this model", step=self.step, grid=grid
            )
        if self.no_upscale or self.step < 1:
            return
        if self.smallest < self.step:
            yield Problem("min_bucket_reso", "must not be below bucket_reso_steps ({steps}): raise it", steps=self.step)
            return
        smallest, largest = _bounds(self.smallest, self.largest, self.step)
        if min(self.resolution) < smallest:
            yield Problem(
                "min_bucket_reso",
                ": {smallest} is larger than the resolution {min}",
                smallest=self.smallest,
                min=min(self.resolution),
            )
        if max(self.resolution) > largest:
            yield Problem(
                "max_bucket_reso",
                ": {largest} is smaller than the resolution {max}",
                largest=self.largest,
                max=max(self.resolution),
            )

    def fit(self, size: Size) -> BucketFit | None:
        return _fit(self, size)  # None: the image is thinner than the thinnest bucket


def resolutions(resolution: Size, smallest: int, largest: int, step: int) -> tuple[Size, ...]:
    """List the buckets with about the area of `resolution`, sorted; the bounds are widened to multiples of `step`."""
    smallest, largest = _bounds(smallest, largest, step)
    area = resolution[0] * resolution[1]
    square = int(math.sqrt(area) // step) * step
    sizes = {(square, square)}
    for width in range(smallest, largest + 1, step):
        height = min(largest, area // width // step * step)
        if height >= smallest:
            sizes |= {(width, height), (height, width)}
    return tuple(sorted(sizes))


def crop_ltrb(bucket: Size, size: Size) -> tuple[float, float, float, float]:
    """Return the crop coordinates (left, top, right, bottom) that condition SDXL: the letterbox of the image in its
    bucket.
    """
    # Not the real crop: upstream conditions on the letterbox.
    width, height = bucket
    aspect = size[0] / size[1]
    if width / height > aspect:
        inner_width, inner_height = height * aspect, float(height)
    else:
        inner_width, inner_height = float(width), width / aspect
    left, top = (width - inner_width) // 2, (height - inner_height) // 2
    return left, top, left + inner_width, top + inner_height


@lru_cache(maxsize=1 << 16)
def _fit(rules: Buckets, size: Size) -> BucketFit | None:
    if not rules.enabled:
        return _cover(rules.resolution, size)
    if rules.no_upscale:
        return _shrink(rules.resolution[0] * rules.resolution[1], rules.step, size)
    sizes = _known_sizes(rules.resolution, rules.smallest, rules.largest, rules.step)
    if size in sizes:
        return BucketFit(size, size)
    aspect = size[0] / size[1]
    return _cover(min(sizes, key=lambda bucket: abs(bucket[0] / bucket[1] - aspect)), size)


@lru_cache(maxsize=64)
def _known_sizes(resolution: Size, smallest: int, largest: int, step: int) -> dict[Size, None]:
    return dict.fromkeys(resolutions(resolution, smallest, largest, step))


def _cover(bucket: Size, size: Size) -> BucketFit:
    """Scale until the image covers the bucket."""
    wide = size[0] / size[1] > bucket[0] / bucket[1]
    scale = bucket[1] / size[1] if wide else bucket[0] / size[0]
    return BucketFit(bucket, (int(size[0] * scale + 0.5), int(size[1] * scale + 0.5)))


def _shrink(area: int, step: int, size: Size) -> BucketFit | None:
    """Scale down to the area if needed, never up; the bucket is the largest on the grid of `step` that fits."""
    resized = size if size[0] * size[1] <= area else _shrunk(area, step, size[0] / size[1])
    bucket = (resized[0] // step * step, resized[1] // step * step)
    return BucketFit(bucket, resized) if min(bucket) else None


def _shrunk(area: int, step: int, aspect: float) -> Size:
    """Round one side to the grid: the one that changes the aspect ratio less once the other is rounded, too."""
    width = math.sqrt(area * aspect)
    by_width, by_height = _round_to_step(width, step), _round_to_step(area / width, step)
    height, other_width = _round_to_step(by_width / aspect, step), _round_to_step(by_height * aspect, step)
    width_error = abs(by_width / height - aspect) if height else math.inf
    height_error = abs(other_width / by_height - aspect) if by_height else math.inf
    if width_error < height_error:
        return by_width, int(by_width / aspect + 0.5)
    return int(by_height * aspect + 0.5), by_height


def _round_to_step(side: float, step: int) -> int:
    return int(side + 0.5) // step * step  # halves go up, as upstream; round() would take them to the even number


def _bounds(smallest: int, largest: int, step: int) -> Size:
    return smallest // step * step, -(-largest // step) * step  # the second is rounded up
