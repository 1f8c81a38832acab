"""Opening image files of data sets: ordinary files only, and at most one with very many pixels at a time."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from library.config.outside_files import open_regular

MANY_PIXELS = 2**26  # above it an image takes gigabytes if each thread decodes one
_alone = threading.RLock()  # held while such an image is decoded


@contextlib.contextmanager
def opened_image(path: str | Path) -> Iterator[Image.Image]:
    """Open an image to decode it. Raises OSError for a pipe or a device, and whatever its decoder raises."""
    with open_regular(path) as file, Image.open(file) as image, room_to_decode(image):
        yield image


def room_to_decode(image: Image.Image) -> contextlib.AbstractContextManager[object]:
    """Return a context in which no other thread decodes an image with very many pixels, if this one has."""
    return _alone if image.width * image.height > MANY_PIXELS else contextlib.nullcontext()
