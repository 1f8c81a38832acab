"""What a training learns from: images found, captioned, sorted into buckets, encoded once, and given out in batches.

Only `encode` and `batches` load torch, when they are called.
"""

from typing import TYPE_CHECKING, Any

from library.data.finding import scan
from library.data.images import Image, ImageSet, summary
from library.data.preflight import Check, check, problems, warnings
from library.data.threads import Report

if TYPE_CHECKING:
    from library.data.encoding import EncodingProcess
    from library.data.loading import Batches

__all__ = ["Check", "Image", "ImageSet", "batches", "check", "encode", "problems", "scan", "summary", "warnings"]


def encode(images: ImageSet, family: Any, parts: Any, config: Any, world: "EncodingProcess", report: Report) -> None:
    """Encode images and captions once, as the config's cache options ask for; see `encoding.encode`."""
    from library.data import encoding

    encoding.encode(images, family, parts, config, world, report)


def batches(images: ImageSet, config: Any, seed: int, rank: int = 0, world: int = 1) -> "Batches":
    """Make the batches of one process; see `loading.Batches`."""
    from library.data.loading import Batches

    return Batches(images, config, seed, rank, world)
