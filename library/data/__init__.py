"""What a training learns from: images found, captioned, sorted into buckets, encoded once, and given out in batches."""

from library.data.finding import scan
from library.data.images import Image, ImageSet, summary
from library.data.preflight import Check, check, problems, warnings

__all__ = ["Check", "Image", "ImageSet", "check", "problems", "scan", "summary", "warnings"]
