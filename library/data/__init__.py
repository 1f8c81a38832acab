"""The data of a training: images are found, captioned, sorted into buckets, encoded once, and put into batches."""

from library.data.finding import scan
from library.data.images import Image, ImageSet, summary
from library.data.preflight import Check, check_data, find_data_problems, warnings

__all__ = ["Check", "Image", "ImageSet", "check_data", "find_data_problems", "scan", "summary", "warnings"]
