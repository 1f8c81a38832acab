"""The images of a training: their properties and repeats. Pure; reads no file."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from library.config.dataset import DatasetConfig, SubsetConfig
from library.config.json_types import JsonObject
from library.config.problems import MessageLike
from library.config.run_config import Preservation
from library.data import captions
from library.data.buckets import BucketFit, Buckets, Size
from library.data.pixels import AS_STORED, Decoding

if TYPE_CHECKING:
    from library.data.encoding import Latents
    from library.data.text_encoding import Texts


@dataclass(frozen=True, slots=True)
class ControlImage:
    """A control or reference image, or the image itself with a masked region, as additional model input.

    `mask` is the mask's file, or the image's path if its transparency is the mask. Without a file it may be a random
    mask: the one numbered `drawn`. A reference has neither.
    """

    path: str
    size: Size  # decoded width and height
    fit: BucketFit
    mask: str = ""
    drawn: int | None = None
    how: Decoding = AS_STORED

    @property
    def is_masked(self) -> bool:
        return bool(self.mask) or self.drawn is not None


@dataclass(slots=True)
class Image:
    """One image of the data set: path, caption, repeats and crop."""

    path: str
    size: Size  # width, height after decoding
    caption: str
    repeats: int
    subset: SubsetConfig  # the subset it belongs to
    dataset: int  # position in ImageSet.datasets
    fit: BucketFit
    caption_file: str = ""
    mask_file: str = ""
    controls: tuple[ControlImage, ...] = ()
    how: Decoding = AS_STORED

    @property
    def encoded_caption(self) -> str:
        return captions.encoded_once(self.caption, self.subset, os.path.basename(self.path))

    def variant(self, number: int) -> str:
        # Variant 0 is `encoded_caption`.
        return captions.variant(self.caption, self.subset, os.path.basename(self.path), number)

    def preserved_caption(self, words: str, preservation: Preservation) -> str:
        return preservation.caption(words, self.subset.trigger_phrase)

    def preserved_captions(self, words: Sequence[str], preservation: Preservation) -> list[str]:
        """Return the preserved prompts of an image with these captions, which may be dropped."""
        dropped = [""] if captions.may_be_dropped(self.subset) else []
        return [*dict.fromkeys(self.preserved_caption(each, preservation) for each in (*words, *dropped))]

    def encoded_captions(self, variants: int) -> list[str]:
        dropped = [""] if captions.may_be_dropped(self.subset) else []
        return [*dict.fromkeys([*map(self.variant, range(variants)), *dropped])]

    @property
    def bucket_key(self) -> tuple[Any, ...]:
        references = tuple(control.fit.bucket for control in self.controls if not control.is_masked)
        return (self.dataset, self.fit.bucket, *([references] if references else []))

    @property
    def size_with_controls(self) -> Size:
        """(width, height) as wide as the bucket, with as many pixels as the image and its reference images together."""
        width, height = self.fit.bucket
        return width, height + sum(a * b for a, b in (c.fit.bucket for c in self.controls if not c.is_masked)) // width

    @property
    def has_random_masks(self) -> bool:
        return bool(self.controls) and self.controls[0].drawn is not None

    @property
    def is_reg(self) -> bool:
        return self.subset.is_reg

    @property
    def interpolation(self) -> str | None:
        return self.subset.resize_interpolation


@dataclass(slots=True)
class ImageSet:
    """All images of a training; after encoding, their latents and text encoder outputs."""

    items: list[Image]
    datasets: tuple[DatasetConfig, ...]
    warnings: tuple[MessageLike, ...] = ()
    unused: tuple[str, ...] = ()  # surplus regularisation images
    validation: "ImageSet | None" = None
    is_validation: bool = False  # whether they are only measured, always with the same caption
    held_out: tuple[str, ...] | None = ()  # marks of the images of `validation`, see `held_out.Split`
    latents: "Latents | None" = None
    text: "Texts | None" = None

    def __len__(self) -> int:
        return len(self.items)

    def buckets(self) -> dict[tuple[Any, ...], list[int]]:
        """Positions of images by `bucket_key`, sorted; each repeated as often as the image."""
        positions: dict[tuple[Any, ...], list[int]] = {}
        for i, image in enumerate(self.items):
            positions.setdefault(image.bucket_key, []).extend([i] * image.repeats)
        return dict(sorted(positions.items()))


def bucket_rules(dataset: DatasetConfig) -> Buckets:
    """Return the bucketing rules of a data set."""
    return Buckets(
        resolution=dataset.resolution or (1024, 1024),
        enabled=dataset.enable_bucket,
        no_upscale=dataset.bucket_no_upscale,
        smallest=dataset.min_bucket_reso,
        largest=dataset.max_bucket_reso,
        step=dataset.bucket_reso_steps,
    )


def balance(regular: Sequence[Image], needed: int) -> list[Image]:
    """Take regularisation images, then raise their repeats one by one until they match the `needed` number."""
    used: list[Image] = []
    num_used = 0
    for image in regular:
        if num_used >= needed:
            break
        used.append(image)
        num_used += image.repeats
    missing = max(0, needed - num_used)
    for i, image in enumerate(used):
        image.repeats += missing // len(used) + (i < missing % len(used))
    return used


def summarise_images(images: ImageSet, world: int = 1) -> JsonObject:
    """Return counts for the log and the run's record: images, repeats, buckets, batches per epoch and process."""
    rows, batches = [], 0
    for (position, bucket, *references), members in images.buckets().items():
        size = images.datasets[position].batch_size
        count = -(-len(members) // size)
        batches += count
        counts = {"images": len(set(members)), "repeats": len(members), "batches": count}
        reference_sizes = {"references": [list(size) for size in references[0]]} if references else {}
        rows.append({"dataset": position, "size": list(bucket), **reference_sizes, **counts})
    all_paths, held_paths = (
        {image.path for image in image_set.items} if image_set else set() for image_set in (images, images.validation)
    )
    return {
        "images": len(all_paths),  # once, also those at several sizes
        "regularisation": len({image.path for image in images.items if image.is_reg}),
        "repeats": sum(row["repeats"] for row in rows),
        "buckets": rows,
        "batches_per_epoch": -(-batches // world),
        "validation": len(held_paths),
        "dropped": list(images.unused),
    }
