"""The pictures of a training: what is known of each, and how often each is seen. Pure; no file is touched."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from library.config.dataset import DatasetConfig, SubsetConfig
from library.config.json_types import JsonObject
from library.data.buckets import BucketFit, Buckets, Size

if TYPE_CHECKING:
    from library.data.encoding import Latents, Texts


@dataclass(slots=True)
class Image:
    """One picture of the data set: where it is, what it shows, how often it is seen, and how it is cut."""

    path: str
    size: Size  # width, height as stored in the file
    caption: str
    repeats: int
    subset: SubsetConfig  # the SubsetConfig that it came by
    dataset: int  # which of Images.datasets
    fit: BucketFit
    caption_file: str = ""
    mask_file: str = ""

    @property
    def is_reg(self) -> bool:
        """Whether it shows what the model should not forget, rather than what it should learn."""
        return self.subset.is_reg

    @property
    def interpolation(self) -> str | None:
        """How it is resized, where that is set."""
        return self.subset.resize_interpolation


@dataclass(slots=True)
class ImageSet:
    """All pictures of a training, and once they are encoded, where to find that."""

    items: list[Image]
    datasets: tuple[DatasetConfig, ...]
    warnings: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()  # regularisation images that were more than needed
    validation: "ImageSet | None" = None
    latents: "Latents | None" = None
    text: "Texts | None" = None

    def __len__(self) -> int:
        return len(self.items)

    def buckets(self) -> dict[tuple[int, Size], list[int]]:
        """Positions of images, each as often as it is repeated, by data set and bucket, sorted."""
        found: dict[tuple[int, Size], list[int]] = {}
        for i, image in enumerate(self.items):
            found.setdefault((image.dataset, image.fit.bucket), []).extend([i] * image.repeats)
        return dict(sorted(found.items()))


def bucket_rules(dataset: DatasetConfig) -> Buckets:
    """The bucketing rules of a data set."""
    return Buckets(
        resolution=dataset.resolution or (1024, 1024),
        enabled=dataset.enable_bucket,
        no_upscale=dataset.bucket_no_upscale,
        smallest=dataset.min_bucket_reso,
        largest=dataset.max_bucket_reso,
        step=dataset.bucket_reso_steps,
    )


def split(images: list[Image], share: float, seed: int | None, fallback: int) -> tuple[list[Image], list[Image]]:
    """Hold a share of the images back for validation; the seed chooses which. Returns (to learn, held back)."""
    if not share:
        return images, []
    mixed = list(images)
    Random(fallback if seed is None else seed).shuffle(mixed)
    keep, hold = math.ceil(len(mixed) * (1 - share)), round(len(mixed) * share)
    return sorted(mixed[:keep], key=_path), sorted(mixed[len(mixed) - hold :], key=_path)


def balance(regular: Sequence[Image], needed: int) -> list[Image]:
    """Take regularisation images, then repeat them one by one, until they are seen as often as the others."""
    used: list[Image] = []
    seen = 0
    for image in regular:
        if seen >= needed:
            break
        used.append(image)
        seen += image.repeats
    missing = max(0, needed - seen)
    for i, image in enumerate(used):
        image.repeats += missing // len(used) + (i < missing % len(used))
    return used


def summary(images: ImageSet, world: int = 1) -> JsonObject:
    """Counts for the log and the run's record: images, repeats, buckets, batches per epoch and process."""
    rows, batches = [], 0
    for (position, bucket), members in images.buckets().items():
        size = images.datasets[position].batch_size
        count = -(-len(members) // size)
        batches += count
        counts = {"images": len(set(members)), "repeats": len(members), "batches": count}
        rows.append({"dataset": position, "size": list(bucket), **counts})
    return {
        "images": len(images),
        "regularisation": sum(image.is_reg for image in images.items),
        "repeats": sum(row["repeats"] for row in rows),
        "buckets": rows,
        "batches_per_epoch": -(-batches // world),
        "validation": len(images.validation) if images.validation else 0,
        "dropped": list(images.unused),
    }


def _path(image: Image) -> str:
    return image.path
