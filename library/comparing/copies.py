"""Pictures that are nearly training pictures, by the perceptual hash that finds duplicates in a data set. No torch."""

from collections.abc import Sequence

from library.config.problems import Message, Report
from library.curation.similar_images import NEAR, looks


class TrainingLooks:
    """The hashes of training pictures."""

    def __init__(self, paths: Sequence[str], report: Report) -> None:
        """Pictures that cannot be read, or are too plain to be told apart, are left out."""
        self._known: list[tuple[str, tuple[int, int]]] = []
        for number, path in enumerate(paths):
            report(Message("reading the training pictures"), number, len(paths))
            if (found := looks(path)) is not None:
                self._known.append((path, found))

    def nearest(self, picture: str) -> str:
        """The training picture that this one nearly is, "" where it is none."""
        own = looks(picture)
        if own is None:
            return ""
        apart = [(_apart(own, other), path) for path, other in self._known]
        bits, path = min(apart, default=(NEAR + 1, ""))
        return path if bits <= NEAR else ""


def _apart(one: tuple[int, int], other: tuple[int, int]) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))
