"""Near copies of training images, found by the perceptual hash for duplicates in a data set. Loads no torch."""

from collections.abc import Sequence

from library.config.problems import Message, Report
from library.curation.similar_images import NEAR, looks


class TrainingLooks:
    """The hashes of training images."""

    def __init__(self, paths: Sequence[str], report: Report) -> None:
        """Skips unreadable images and images too plain to distinguish."""
        self._known: list[tuple[str, tuple[int, int]]] = []
        for number, path in enumerate(paths):
            report(Message("reading the training pictures"), number, len(paths))
            if (hashes := looks(path)) is not None:
                self._known.append((path, hashes))

    def nearest(self, picture: str) -> str:
        """Return the training image that this image nearly copies, "" if none."""
        picture_hashes = looks(picture)
        if picture_hashes is None:
            return ""
        distances = [(_distance(picture_hashes, other), path) for path, other in self._known]
        bits, path = min(distances, default=(NEAR + 1, ""))
        return path if bits <= NEAR else ""


def _distance(first: tuple[int, int], second: tuple[int, int]) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(first, second, strict=True))  # the number of different bits
